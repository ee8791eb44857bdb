"""Beside the update: checkpoints, jit, options of XLA."""
