"""What a step will cost and what it really does: chips, the compiled program, its timeline. Decides nothing."""
