"""The process that runs cases of a part, one after the other, and reports each when it is done.

    python -m benchmarks.gpu.worker PART '["case", ...]' [--toy] [--programs FOLDER]

A case that raises is a result, too; one that ends the process is for the one that waits to note.
"""

from __future__ import annotations

import argparse
import importlib
import json
import traceback
from pathlib import Path

from benchmarks.harness.machine import reason, say, take_the_device


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("cases", type=json.loads)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--programs", type=Path)
    args = parser.parse_args(argv)
    take_the_device()
    module = importlib.import_module(f"benchmarks.gpu.{args.part}")
    for name in args.cases:
        try:
            result = module.run(name, args.toy, args.programs)
        except Exception as error:
            traceback.print_exc()
            result = {"error": reason(error)}
        say(result)


if __name__ == "__main__":
    main()
