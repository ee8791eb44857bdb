"""The parts of ``benchmarks.run``, a module each: ``cases`` returns names, and ``run`` runs one of them.

``ALONE``: each case needs a process of its own; ``TIMED``: cases measure time, and so run one after the other. A part
may have ``XLA_FLAGS`` for its processes.
"""
