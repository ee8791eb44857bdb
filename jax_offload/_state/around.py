"""Facts about a trace that its arguments do not show: the one context variable of the package.

``init`` and ``update`` have optax's arguments, and what stands between a caller and an ``offload``, a chain, a ``cond``
or ``optax.MultiSteps``, hands on no others. So five things reach an ``offload`` from the side:

* how the parameters are sharded. With Auto axes no type tells, and a constraint that did would be in the program and
  would be lost at the next branch, whose operands are new variables;
* whether the traced function is going to run. A description may neither warn nor be remembered like a step, and what
  each ``offload`` remembers is its own: nobody else can put it back;
* whether an ``offload`` traces its inner optimizer, which must not hold another one;
* whether a recipe around it gathers what ZeRO-1 divides;
* which values the step has loaded from host memory, where a model computes with parameters that live there.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from jax_offload._program import memory
from jax_offload._program.arrays import is_array
from jax_offload._program.paths import by_key
from jax_offload._program.private import traces
from jax_offload._program.shardings import Shardings, devices_of, same_sharding, sharding_of

NESTED = (
    "inner: there is an offload(...) inside the optimizer that offload wraps. Wrap once: the whole chain, "
    "jo.offload(optax.chain(clip, adamw)), or the part that has a state, optax.chain(clip, jo.offload(adamw))."
)


@dataclasses.dataclass(frozen=True)
class Around:
    """Facts about a trace that its arguments do not show.

    Attributes:
      shardings: the parameters' shardings by path; ``None``: only their types tell them.
      runs: whether the traced function is going to run, as far as an ``offload`` can know.
      remembers: whether the parameters' shardings are remembered.
      within_offload: whether an ``offload`` traces its inner optimizer.
      gathered: the options of each ``offload`` whose divided updates a recipe around it gathers; ``None``: each gathers
        its own.
      loaded: the values on the device that the step has loaded, each with its origin in host memory; ``None``: it
        loads what it needs by itself.
      states: the origins that an update has received as its state.
    """

    shardings: Shardings | None = None
    runs: bool = True
    remembers: bool = True
    within_offload: bool = False
    gathered: list[Any] | None = None
    loaded: list[tuple[Any, Any]] | None = None
    states: list[Any] = dataclasses.field(default_factory=list[Any])


_AROUND: contextvars.ContextVar[Around] = contextvars.ContextVar("jax_offload_around", default=Around())  # noqa: B039


def facts() -> Around:
    """Return the facts about the current trace."""
    return _AROUND.get()


@contextlib.contextmanager
def _within(**changes: Any) -> Iterator[None]:
    token = _AROUND.set(dataclasses.replace(_AROUND.get(), **changes))
    try:
        yield
    finally:
        _AROUND.reset(token)


def described(params: Any = None, *, remember: bool = False) -> contextlib.AbstractContextManager[None]:
    """A context in which a function is traced only to be read.

    Args:
      params: parameters with the shardings of the trace; ``None`` for a whole step, whose arguments have shardings.
      remember: whether each ``offload`` remembers the parameters' shardings.
    """
    told = {} if params is None else {"shardings": _shardings_in(params)}
    return _within(runs=False, remembers=remember, **told)


def within_offload() -> contextlib.AbstractContextManager[None]:
    """Inside, an ``offload`` traces the optimizer that it wraps, which has to be a plain one."""
    return _within(within_offload=True)


@contextlib.contextmanager
def gathering() -> Iterator[list[Any]]:
    """Inside, an ``offload`` leaves updates divided that ZeRO-1 divides, and appends its options to the list."""
    options: list[Any] = []
    with _within(gathered=options):
        yield options


@contextlib.contextmanager
def loading(states: list[Any]) -> Iterator[None]:
    """Inside, a step computes with what ``load`` returns, and an update streams the origins of these values. Those of
    a state are appended to ``states``."""
    with _within(loaded=list[tuple[Any, Any]](), states=states):
        yield


def load(x: Any) -> Any:
    """Return ``x`` on the device; ``from_host`` returns it again."""
    loaded = _AROUND.get().loaded
    if loaded is None or not memory.on_host(x):
        return x
    loaded.append((memory.to_device(x), x))
    return loaded[-1][0]


def from_host(state: Any, params: Any) -> tuple[Any, Any]:
    """Return both trees with the values that ``load`` has loaded where they were, in host memory."""
    origins = {id(x): origin for x, origin in facts().loaded or ()}
    if not origins:
        return state, params
    facts().states.extend(origins[id(x)] for x in jax.tree.leaves(state) if id(x) in origins)
    return jax.tree.map(lambda x: origins.get(id(x), x), (state, params))


def check_not_within_offload() -> None:
    """Raise ``TypeError`` if one ``offload`` stands somewhere inside another."""
    if _AROUND.get().within_offload:
        raise TypeError(NESTED)


def shardings_of(params: Any) -> Shardings:
    """The known shardings of parameters, by path."""
    given = _AROUND.get().shardings
    return _shardings_in(params) if given is None else given


def without_sharding(params: Any, shardings: Shardings) -> frozenset[str]:
    """The paths of parameters that have no entry in ``shardings`` and might be divided: a description gives them no
    sharding, or a trace tells only that their mesh has several devices."""
    described = _AROUND.get().shardings is not None
    missing = {path: x for path, x in by_key(params).items() if path not in shardings and is_array(x)}
    return frozenset(path for path, x in missing.items() if described or devices_of(x) > 1)


class Remembered:
    """The parameters' shardings that one ``offload`` remembers: those in eager ``init``, and those given wherever the
    state's shardings were asked for. A trace with Auto axes does not tell them. ``placement`` shows where they decided.
    """

    def __init__(self) -> None:
        self._shardings: dict[str, list[Sharding]] = {}

    def remember(self, shardings: Shardings) -> None:
        """Add the shardings of an ``init``'s parameters. A sharding that types carry replaces those known before."""
        for path, sharding in shardings.items() if _AROUND.get().remembers else ():
            mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
            typed = isinstance(mesh, AbstractMesh) and bool(mesh.explicit_axes)
            known = self._shardings.setdefault(path, []) if not typed else [sharding]
            if not any(same_sharding(sharding, other) for other in known):
                known.append(sharding)

    def of(self, path: str) -> Sequence[Sharding]:
        """All shardings that this parameter has had."""
        return self._shardings.get(path, ())

    def unambiguous(self, params: Any) -> Shardings:
        """The shardings of the parameters that have had only one; with several, a trace may be about any of them."""
        return {path: found[0] for path in by_key(params) if len(found := self._shardings.get(path, ())) == 1}


def _shardings_in(params: Any) -> Shardings:
    found = {path: s for path, x in by_key(params).items() if (s := sharding_of(x)) is not None}
    on_device = {path: memory.with_kind(s, memory.DEVICE_KIND) for path, s in found.items()
                 if s.memory_kind == memory.HOST_KIND}  # fmt: skip
    return found | on_device


# ---- an update outside of any ``jit``


def compiled_where_eager(like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function so that it is jitted outside a trace. Inside one, and with an argument that cannot be hashed,
    it runs unchanged.

    Run equation by equation, an update would be traced anew, and each loop over chunks compiled, at every step.

    Args:
      like: maps the function's arguments to the parameters, or to values sharded like them. Arrays tell their
        shardings, and tracers do not.
    """

    def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
        like.__qualname__ = fun.__qualname__  # it is called first, and named in the error of a missing argument

        @functools.partial(jax.jit, static_argnums=(0, 1, 2))
        def run(treedef: Any, given: tuple[Any, ...], shardings: tuple[Any, ...], arrays: list[Any]) -> Any:
            def filled(operands: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
                """The call's arguments, with these in the places of its operands, which ``given`` leaves empty."""
                values = iter(operands)
                return jax.tree.unflatten(treedef, [next(values) if x is None else x[1] for x in given])

            args, kwargs = filled(types.SimpleNamespace(sharding=sharding) for sharding in shardings)
            with _within(shardings=_shardings_in(like(*args, **kwargs)), runs=True, remembers=True):
                args, kwargs = filled(arrays)
                return fun(*args, **kwargs)

        @functools.wraps(fun)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            leaves, treedef = jax.tree.flatten((args, kwargs))
            unhashable = not all(_is_operand(x) or isinstance(x, Hashable) for x in leaves)
            if unhashable or any(isinstance(x, Tracer) for x in leaves) or traces():
                return fun(*args, **kwargs)
            given = tuple(None if _is_operand(x) else (type(x), x) for x in leaves)  # True == 1 == 1.0
            operands = [x for x, static in zip(leaves, given, strict=True) if static is None]
            return run(treedef, given, tuple(getattr(x, "sharding", None) for x in operands), operands)

        return wrapper

    return decorate


def _is_operand(x: Any) -> bool:
    """Whether ``x`` is an operand: an array, or a float, which may change at every step. An int may be a flag."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, float, complex))
