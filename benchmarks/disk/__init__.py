"""Sweeps over a store in files, beside what the same disk gives to programs that do nothing else."""
