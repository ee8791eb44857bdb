"""What stands around a trace and does not show in its arguments: the one context variable of the package.

``init`` and ``update`` have optax's arguments, and what stands between a caller and an ``offload``, a chain, a ``cond``
or ``optax.MultiSteps``, hands on no others. So three things reach an ``offload`` from the side:

* how the parameters are sharded. With Auto axes no type tells, and a constraint that did would be in the program and
  would be lost at the next branch, whose operands are new variables;
* whether what is traced is going to run. A description may neither warn nor be remembered as a step would be, and what
  each ``offload`` remembers is its own: nobody else can put it back;
* whether a wrapper has loaded the state, and stores it. The wrapper chooses between the old state and the new one, and
  ``cond`` wants both in one memory while it is traced: nothing can be put right later.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from jax_offload._base.paths import key_of
from jax_offload._base.shardings import Shardings, same_sharding, sharding_of

Remembered = dict[str, list[Sharding]]  # path of a parameter -> all the shardings that it was in


@dataclasses.dataclass(frozen=True)
class Around:
    """What stands around a trace.

    Attributes:
      shardings: of the parameters, by path; ``None``: only what their types tell.
      runs: whether what is traced is going to run, as far as an ``offload`` can know.
      remembers: whether the parameters' shardings are remembered.
      moved: ``None`` where no wrapper loads and stores the state for the ``offload`` that asks; else whether its state
        was moved to the device for that.
    """

    shardings: Shardings | None = None
    runs: bool = True
    remembers: bool = True
    moved: bool | None = None


_AROUND: contextvars.ContextVar[Around] = contextvars.ContextVar("jax_offload_around", default=Around())  # noqa: B039


def around() -> Around:
    """What stands around the trace that is under way."""
    return _AROUND.get()


@contextlib.contextmanager
def _within(**changes: Any) -> Iterator[None]:
    token = _AROUND.set(dataclasses.replace(_AROUND.get(), **changes))
    try:
        yield
    finally:
        _AROUND.reset(token)


def running(params: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, what is traced runs on parameters that are sharded like ``params``."""
    return _within(shardings=_shardings_in(params), runs=True, remembers=True)


def described(params: Any, *, remember: bool = False) -> contextlib.AbstractContextManager[None]:
    """Inside, what is traced does not run: it is to be read, for parameters that are sharded like ``params``."""
    return _within(shardings=_shardings_in(params), runs=False, remembers=remember)


def step_described() -> contextlib.AbstractContextManager[None]:
    """Inside, a whole step is traced to be read."""
    return _within(runs=False, remembers=False)


def wrapped(moved: bool) -> contextlib.AbstractContextManager[None]:
    """Inside, each ``offload`` leaves its state on the device, where a wrapper has loaded it."""
    return _within(moved=moved)


def shardings_of(params: Any) -> Shardings:
    """Of each parameter, by its path, as far as anything tells."""
    given = _AROUND.get().shardings
    return _shardings_in(params) if given is None else given


def remember(remembered: Remembered, shardings: Shardings) -> None:
    """Adds what the parameters of an ``init`` were in. Types tell for themselves, at every trace."""
    for path, sharding in shardings.items() if _AROUND.get().remembers else ():
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        typed = isinstance(mesh, AbstractMesh) and bool(mesh.explicit_axes)
        known = remembered.setdefault(path, []) if not typed else [sharding]
        if not any(same_sharding(sharding, other) for other in known):
            known.append(sharding)


def unambiguous(remembered: Remembered) -> Shardings:
    """Of those that were in one sharding only. Of others, two models' say, nobody knows which a trace is about."""
    return {path: shardings[0] for path, shardings in remembered.items() if len(shardings) == 1}


def _shardings_in(params: Any) -> Shardings:
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    return {key_of(path): s for path, x in flat if (s := sharding_of(x)) is not None}
