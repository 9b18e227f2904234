"""A teacher's model otherwise than whole and as it is: in shards, or compiled."""
