"""The command ``jax-offload``, as far as it needs nothing that is not always installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec

MISSING = 8  # the exit code where the extra is not installed


def main() -> None:
    """The entry point: the commands, or what to install for them."""
    missing = [name for name in ("click", "rich") if find_spec(name) is None]
    if missing:
        print(f"jax-offload needs {' and '.join(missing)}: pip install 'jax_offload[cli]'", file=sys.stderr)
        raise SystemExit(MISSING)
    from jax_offload._analysis.commands import commands

    commands()
