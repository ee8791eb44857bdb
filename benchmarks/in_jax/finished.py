"""How a benchmark of steps on this CPU ends: what it ran on, and its rows in a file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import optax


def finished(what: str, rows: Sequence[Any], path: Path | None) -> None:
    """Prints ``what`` ran, and on which machine; all of it as JSON, where there is a path."""
    about = (
        f"{what}; {os.cpu_count()} cores of {platform.processor() or platform.machine()}, "
        f"jax {jax.__version__}, optax {optax.__version__}"
    )
    print(f"\n{about}; load {os.getloadavg()[0]:.1f}")
    if path:
        path.write_text(json.dumps({"about": about, "load": os.getloadavg(), "rows": rows}, indent=1) + "\n")
