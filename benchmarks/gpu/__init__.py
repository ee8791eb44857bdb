"""The first thing to run when a GPU is at hand: values, donation, the link, steps (see benchmarks/README.md)."""
