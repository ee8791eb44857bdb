"""The schedule of an update, as a value: what to load, when, how, and through which window."""
