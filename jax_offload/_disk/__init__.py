"""State on disk: the store, the reads and writes under way, commits, and the placeholders of leaves."""
