"""Sweeps over a store in files, compared with plain programs on the same disk."""
