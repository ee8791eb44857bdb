"""The three things that happen to a leaf of the state, by the names under which a profile and the compiled program show
them: ``jax_offload/prefetch/<leaf>``, ``jax_offload/update/<leaf>``, ``jax_offload/write-back/<leaf>``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jax_offload._ir.program import Var

Names = Mapping[Var, str]  # the leaf's path in the state, of each of its values


def prefetch(v: Var, names: Names) -> contextlib.AbstractContextManager[Any]:
    """The scope in which a leaf, or rows of it, is read and moved to the device."""
    return jax.named_scope(f"jax_offload/prefetch/{names.get(v, 'state')}")


def write_back(v: Var, names: Names) -> contextlib.AbstractContextManager[Any]:
    """The scope in which a leaf, or rows of it, is moved to the host and written."""
    return jax.named_scope(f"jax_offload/write-back/{names.get(v, 'state')}")


def update_of(leaves: Sequence[Var], names: Names) -> contextlib.AbstractContextManager[Any]:
    """The scope of an update that needs these leaves together; it has the name of the first."""
    return jax.named_scope(f"jax_offload/update/{names.get(leaves[0], 'state') if leaves else 'state'}")
