"""A step in several programs, driven from Python: its update in groups, on the device and on the host's cores."""
