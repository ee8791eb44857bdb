"""Measure how moments in fewer bits affect training: the held-out loss of the example's language model.

    python -m benchmarks.storage [--model test] [--steps 1200] [--lr 2e-3] [--seeds 3] [--json FILE]

Every run sees the same text in the same order; seeds differ in the initial parameters. Runs that the JSON file already
has are not repeated. Takes about 40 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import optax

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_lm

RUNS = {  # name: arguments of the example
    "float32": ["--storage", "float32"],
    "bfloat16": ["--storage", "bfloat16"],
    "float16": ["--storage", "float16"],
    "int8, nu uint8": ["--storage", "int8"],
    "float8_e4m3fn, nu float16": ["--storage", "float8"],
    "float8_e4m3fn, both": ["--storage", "float8_both"],
    "bfloat16 parameters, float32 masters": ["--param-dtype", "bfloat16", "--master", "float32"],
    "the same, int8, nu uint8": ["--param-dtype", "bfloat16", "--master", "float32", "--storage", "int8"],
}


def loss(arguments: list[str]) -> float:
    with contextlib.redirect_stdout(io.StringIO()):
        return train_lm.main([*arguments, "--sample", "0"])["held_out"][1]


def table(losses: dict[str, list[float]]) -> str:
    """Means over seeds, and the differences of pairs with the same seed."""
    lines = ["| storage | held-out loss | against float32 | each seed |", "|---|---:|---:|---|"]
    for name, values in losses.items():
        parts = [100 * (b / a - 1) for a, b in zip(losses["float32"], values, strict=False)]
        each = ", ".join(f"{part:+.2f} %" for part in parts)
        lines.append(f"| {name} | {statistics.mean(values):.4f} | {statistics.mean(parts):+.2f} % | {each} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="test")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=2e-3, help="small enough that rounding does not decide the run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    command = f"python -m benchmarks.storage --model {args.model} --steps {args.steps} --lr {args.lr}"
    command += f" --seeds {args.seeds}"
    results: dict[str, Any] = {"command": command, "losses": {}}
    if args.json and args.json.exists():
        results = json.loads(args.json.read_text())
        if results["command"] != command:
            raise SystemExit(f"{args.json} is of another command: {results['command']}")
    results["about"] = (
        f"{os.cpu_count()} cores of {platform.machine()}, jax {jax.__version__}, optax {optax.__version__}"
    )
    for seed in range(args.seeds):
        for name, arguments in RUNS.items():
            values = results["losses"].setdefault(name, [])
            if len(values) > seed:
                continue
            common = ["--model", args.model, "--steps", f"{args.steps}", "--lr", f"{args.lr}", "--seed", f"{seed}"]
            values.append(loss([*common, *arguments]))
            print(f"{name}, seed {seed}: {values[-1]:.4f}", file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{table(results['losses'])}\n\n`{command}`, {results['about']}")


if __name__ == "__main__":
    main()
