"""Breaks the package at random, in one place after the other, and says whether the tests notice.

    python -m tests.mutations jax_offload/_plan/gates.py --tests tests/aot/test_compiled.py [--number 10] [--seed 0]

Works on a copy: nothing here is changed. A condition is negated, a comparison or an operator becomes another, a whole
number is one more. Prints a table in Markdown, a row as soon as it is known. What no test notices is either a place
that no test reaches, or one that makes no difference.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
}  # fmt: skip


def broken(node: ast.AST) -> ast.AST | None:
    """The expression, with one thing wrong; ``None`` where there is nothing to break."""
    new = copy.deepcopy(node)
    match new:
        case ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            new.ops = [OTHER[type(op)]()]
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in OTHER:
            new.op = OTHER[type(op)]()
        case ast.Constant(value=int(n)) if not isinstance(n, bool):
            new.value = n + 1
        case _:
            return None
    return ast.fix_missing_locations(new)


def mutations(source: str) -> Iterator[tuple[int, str, str, str]]:
    """For each place of a module that can be broken: its line, the text before and after, and the module."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    starts = [sum(map(len, lines[:k])) for k in range(len(lines))]
    whole = source.encode()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    nodes = {(node.lineno, node.col_offset): node for f in functions for each in f.body for node in ast.walk(each)
             if isinstance(node, ast.expr)}  # fmt: skip
    for node in nodes.values():
        if (new := broken(node)) is not None and node.end_lineno is not None and node.end_col_offset is not None:
            first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            text = f"({ast.unparse(new)})"
            yield node.lineno, ast.unparse(node), text, (whole[:first] + text.encode() + whole[last:]).decode()


def noticed(folder: Path, tests: list[str], seconds: float) -> str:
    """The test that fails; empty where none does."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--daily", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "not done in time"
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or [f"exit status {done.returncode}"])[0] if done.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", help="of the package, by their paths in the repository")
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest is to run: files, and -k words")
    parser.add_argument("--number", type=int, default=10, help="how many places")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600, help="for each run of tests")
    args = parser.parse_args()
    places = [(name, *each) for name in args.files for each in mutations((ROOT / name).read_text())]
    chosen = random.Random(args.seed).sample(places, min(args.number, len(places)))
    caught = 0
    print("| line | was | became | noticed by |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".hypothesis"))
        for name, line, was, became, text in chosen:
            before = (folder / name).read_text()
            (folder / name).write_text(text)
            by = noticed(folder, args.tests, args.seconds)
            (folder / name).write_text(before)
            caught += bool(by)
            print(f"| {name}:{line} | `{was}` | `{became}` | {f'`{by}`' if by else '**nothing**'} |", flush=True)
    print(f"\n{caught} of {len(chosen)} noticed")


if __name__ == "__main__":
    main()
