"""Look at steps: where leaves live, what a step will cost, and what it really does. Nothing here decides anything."""
