"""What is measured: shapes of models, and one run of a system on one of them. All workers read it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT: pre-norm blocks, tied embeddings, matrices without biases."""

    layers: int
    width: int
    heads: int
    vocab: int = 50304
    context: int = 2048

    @property
    def parameters(self) -> int:
        block = 12 * self.width**2 + 2 * self.width
        return self.layers * block + (self.vocab + self.context + 1) * self.width


SHAPES = {
    "toy": Shape(3, 96, 2, vocab=256, context=32),
    "1.3b": Shape(24, 2048, 16),
    "2.7b": Shape(32, 2560, 32),
    "6.7b": Shape(32, 4096, 32),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of one system.

    Attributes:
      scans: in how many groups blocks are stacked and scanned, one array per kind of matrix; 0: an array per layer.
      batch: sequences of ``shape.context`` tokens per step.
      clip: the gradients' global norm, to 1.
      warmup, steps: steps before the clock starts, and those that are timed.
      options: what the system takes: see ``systems.py``.
    """

    system: str
    shape: Shape
    batch: int
    scans: int = 0
    clip: bool = False
    warmup: int = 3
    steps: int = 10
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.batch * self.shape.context

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Case:
        fields = json.loads(text)
        return Case(**{**fields, "shape": Shape(**fields["shape"])})


# The optimizer, the same everywhere: AdamW, decay on every parameter.
ADAMW = dict(learning_rate=3e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)

# name, rows, columns in widths of the model; each number of a leaf is a hash of its place, so that every framework
# begins with the same ones (in_jax/gpt.py).
MATRICES = {"qkv": (1, 3), "attention": (1, 1), "up": (1, 4), "down": (4, 1)}
STDDEV = 0.02
