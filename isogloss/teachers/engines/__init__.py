"""A teacher's model otherwise than whole and as it is: in shards, compiled, in 8 bits."""
