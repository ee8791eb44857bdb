"""Look at steps: what they will cost and what they really do. Nothing here decides anything."""
