"""The student: its engine, sequence and pipeline parallelism, the ds_config."""
