"""``jit`` and ``pipelined``: a step whose update is rewritten, or driven."""
