"""State on disk: the store, what of it is being read and written, commits, and the placeholders of leaves."""
