"""Flags: how a command line, a YAML file and a name of a model are read."""
