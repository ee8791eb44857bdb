"""Read real text that every Python has: the source of its standard library, with a token for each byte."""

import sysconfig
from pathlib import Path

import numpy as np

SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "encodings"}  # encodings: tables, not text


def load(path: str | None = None, limit: int = 16 << 20) -> np.ndarray:
    """Read the files under ``path``, or that one file, in the order of their names, up to ``limit`` bytes."""
    root = Path(path or sysconfig.get_path("stdlib"))
    pattern = "*" if path else "*.py"
    files = [root] if root.is_file() else sorted(f for f in root.rglob(pattern) if f.is_file())
    texts, size = [], 0
    for file in files:
        if size >= limit:
            break
        if root.is_dir() and SKIP.intersection(file.relative_to(root).parts):
            continue
        text = file.read_bytes()
        if b"\0" in text[:1024]:  # not text
            continue
        texts.append(text)
        size += len(text)
    if not size:
        raise SystemExit(f"no text found in {root}")
    return np.frombuffer(b"\n".join(texts)[:limit], np.uint8)


def split(data: np.ndarray, held_out: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Split off the last files, which no run trains on."""
    cut = int(len(data) * (1 - held_out))
    return data[:cut], data[cut:]


def batch(data: np.ndarray, step: int, size: int, context: int) -> np.ndarray:
    """Return ``size`` random pieces of ``context + 1`` bytes. They depend on ``step`` alone, so a resumed run sees the
    same pieces as a run without the interruption."""
    starts = np.random.default_rng(step).integers(len(data) - context, size=size)
    return data[starts[:, None] + np.arange(context + 1)]
