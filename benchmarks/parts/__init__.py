"""What ``benchmarks.run`` runs, a module a part: ``cases``, their names, and ``run``, of one of them.

``ALONE``: each case needs a process of its own; ``TIMED``: cases measure time, and so run one after the other. A part
may have ``XLA_FLAGS`` for its processes.
"""
