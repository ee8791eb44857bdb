"""The file of results: whole at any moment, so that a run that is killed can go on."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.cases import Case
from benchmarks.harness.machine import host_memory
from benchmarks.harness.report import GIB, markdown

FOLDER = Path(__file__).parents[1] / "results"


def path_for(chip: str, kind: str) -> Path:
    """The newest file of results of this chip, or one with today's date."""
    name = "-".join(filter(None, [re.sub("[^a-z0-9]+", "-", chip.lower()).strip("-"), kind]))
    found = sorted(FOLDER.glob(f"[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]-{name}.json"))
    return found[-1] if found else FOLDER / f"{datetime.date.today().isoformat()}-{name}.json"


class Store:
    """A dict of results in a file, with its Markdown beside it.

    Attributes:
      MODULE: what ``python -m`` runs.
    """

    MODULE = "benchmarks.run"

    def __init__(self, path: Path, device: str):
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": []}
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=FOLDER)
        self.commit = commit.stdout.strip()
        self.data["about"] = {
            "device": device,
            "date": datetime.date.today().isoformat(),
            "command": " ".join([f"python -m {self.MODULE}", *sys.argv[1:]]),
            "machine": f"{os.cpu_count()} cores of {platform.machine()}, {host_memory() / GIB:.0f} GiB of host memory",
            "python": platform.python_version(),
            "commit": self.commit,
        }

    def markdown(self) -> str:
        return markdown(self.data)

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        texts = {self.path: json.dumps(self.data, indent=1) + "\n", self.path.with_suffix(".md"): self.markdown()}
        for path, text in texts.items():
            new = path.with_name(path.name + ".new")
            new.write_text(text)
            new.replace(path)

    def entry(self, case: Case) -> dict[str, Any] | None:
        return next((e for e in self.data["cases"] if _key(e) == case.to_json()), None)

    def put(self, case: Case, result: dict[str, Any]) -> None:
        others = [e for e in self.data["cases"] if _key(e) != case.to_json()]
        made = {"commit": self.commit, "date": self.data["about"]["date"]}
        self.data["cases"] = [*others, {"case": dataclasses.asdict(case), "result": result, **made}]
        self.save()


def _key(entry: dict[str, Any]) -> str:
    return json.dumps(entry["case"], sort_keys=True)
