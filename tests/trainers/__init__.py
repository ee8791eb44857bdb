"""Trainers that people use, unchanged, with an offloaded optimizer: opt-in (``make trainers``).

The same run twice, with the plain optimizer and with the offloaded one: equal losses over a dozen steps, and the state
in host memory from the first completed update on.
"""
