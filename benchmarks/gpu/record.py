"""The file of results of a run on a GPU: a result per part and case, written whole after each."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu.summary import markdown
from benchmarks.harness.store import Store

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "optax", "numpy")


def versions() -> dict[str, str | None]:
    """Of what decides about the results; the driver's as its own tool says it."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60)
        found["driver"] = said.stdout.strip().splitlines()[0] if said.returncode == 0 and said.stdout.strip() else None
    except (OSError, subprocess.TimeoutExpired):
        found["driver"] = None
    return found


class Record(Store):
    """``data["cases"]``: {"part", "case", "result", "commit", "date"} each; ``data["left"]``: part -> cases not run."""

    MODULE = "benchmarks.gpu"

    def __init__(self, path: Path, device: str):
        super().__init__(path, device)
        self.data["about"]["versions"] = versions()
        self.data.setdefault("left", {})

    def markdown(self) -> str:
        return markdown(self.data)

    def result(self, part: str, name: str) -> dict[str, Any] | None:
        found = (e["result"] for e in self.data["cases"] if (e["part"], e["case"]) == (part, name))
        return next(found, None)

    def set_result(self, part: str, name: str, result: dict[str, Any]) -> None:
        others = [e for e in self.data["cases"] if (e["part"], e["case"]) != (part, name)]
        made = {"commit": self.commit, "date": self.data["about"]["date"], "versions": self.data["about"]["versions"]}
        self.data["cases"] = [*others, {"part": part, "case": name, "result": result, **made}]
        self.save()

    def set_left(self, part: str, names: list[str]) -> None:
        self.data["left"] = {k: v for k, v in self.data["left"].items() if k != part} | ({part: names} if names else {})
        self.save()
