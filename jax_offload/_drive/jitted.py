"""Jitted steps that are driven from Python: what ``jax.jit`` returns in their place, and what is called then."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from itertools import compress
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from jax_offload._base.jaxprs import ClosedJaxpr, jit
from jax_offload._base.memory import on_host
from jax_offload._base.on_disk import Token
from jax_offload._drive.run import Driven, WithoutUpdate, places_of
from jax_offload._step.rewritten import is_driven


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Undone:
    """A step that jax has traced and that is to be driven. It stands for each of its results, a tree without leaves.

    So ``jax.jit`` finds it in its own cache, by all that jax tells apart: types, static arguments, contexts.

    Attributes:
      step: the closed jaxpr.
      result: the structure of what it returns.
      static: the arguments that are static: the numbers of positional ones, the names of others.
    """

    step: ClosedJaxpr
    result: Any
    static: Set[int | str]

    def tree_flatten(self) -> tuple[tuple[()], Undone]:
        return (), self

    @classmethod
    def tree_unflatten(cls, undone: Undone, _: Any) -> Undone:
        return undone

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call without those that are static."""
        return (
            tuple(x for i, x in enumerate(args) if i not in self.static),
            {name: x for name, x in kwargs.items() if name not in self.static},
        )

    def is_traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return any(isinstance(x, Tracer) for x in jax.tree.leaves(self.given(args, kwargs)))


def undone_in(result: Any) -> Undone | None:
    """What a result says is still to be done."""
    leaves = jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, Undone))
    return leaves[0] if leaves and isinstance(leaves[0], Undone) else None


class DrivenSteps:
    """The steps of one function that are driven, compiled for each ``Undone``, sharding of arguments and donation."""

    def __init__(self) -> None:
        self._programs: dict[Hashable, tuple[Driven | WithoutUpdate, Sequence[bool]]] = {}
        self._shardings: dict[tuple[Sharding, int], Sharding] = {}
        self._any = False

    def __bool__(self) -> bool:
        return self._any

    def left_out(self, step: ClosedJaxpr, result: Any, static: Set[int | str]) -> Any:
        """What the trace of a driven step returns."""
        self._any = True
        undone = Undone(step, result, static)
        return jax.tree.unflatten(result, [undone] * result.num_leaves)

    def __call__(
        self,
        undone: Undone,
        jitted: Any,
        options: Mapping[str, Any],
        compiling: tuple[Mapping[str, Any], Mapping[str, Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """The results of a step.

        Args:
          undone: the step.
          jitted: the object of ``jax.jit`` that has returned it, and that has checked its arguments.
          options: those of ``jax.jit``.
          compiling: the compiler's options for the programs of the device, and for those that send to the host.
          args, kwargs: the step's arguments.
        """
        given = undone.given(args, kwargs)
        if (places := options.get("in_shardings")) is not None:
            given = (_put(given[0], tuple(places) if isinstance(places, list) else places), given[1])
        leaves = jax.tree.leaves(given)
        how = repr([options.get(name) for name in ("donate_argnums", "donate_argnames", "compiler_options")])
        key = undone, how, tuple(map(self._same, places_of(leaves), map(np.ndim, leaves)))
        if key not in self._programs:
            donated = [info.donated for info in jax.tree.leaves(jitted.trace(*args, **kwargs).args_info)]
            step = undone.step
            driven = Driven(step, leaves, donated, *compiling) if is_driven(step) else WithoutUpdate(step)
            self._programs[key] = driven, donated
        driven, donated = self._programs[key]
        results = driven.committed(_handed_over(driven(leaves), compress(leaves, donated)))
        result = jax.tree.unflatten(undone.result, results)
        places = options.get("out_shardings")
        return result if places is None else _put(result, places)

    def _same(self, place: Sharding | None, ndim: int) -> Sharding | None:
        """The first sharding that means what this one does."""
        if place is not None and (place, ndim) not in self._shardings:
            alike = (s for s, n in self._shardings if n == ndim and s.is_equivalent_to(place, n))
            self._shardings[place, ndim] = next((s for s in alike if s.memory_kind == place.memory_kind), place)
        return None if place is None else self._shardings[place, ndim]


def _handed_over(results: Sequence[Any], donated: Iterable[Any]) -> list[Any]:
    """Results, of which those on the device that were donated become others: ``jax.jit`` deletes what is donated."""
    given = {id(x) for x in donated}
    same = {id(x): x for x in results if id(x) in given and isinstance(x, jax.Array) and not on_host(x)}
    new = dict(zip(same, _renamed([*same.values()]), strict=True)) if same else {}
    return [new.get(id(x), x) for x in results]


@functools.partial(jit, donate_argnums=0)
def _renamed(arrays: list[jax.Array]) -> list[jax.Array]:
    """The arrays, as others in their memory."""
    return arrays


def _put(tree: Any, places: Any) -> Any:
    """A tree where a prefix of shardings says; ``None`` says nothing."""
    broadcast = jax.tree.broadcast(places, tree, is_leaf=lambda x: x is None)
    leaves, treedef = jax.tree.flatten(tree)
    where = jax.tree.leaves(broadcast, is_leaf=lambda x: x is None)
    moved = [
        x if s is None or isinstance(x, Token) or getattr(x, "sharding", None) == s else jax.device_put(x, s)
        for x, s in zip(leaves, where, strict=True)
    ]
    return jax.tree.unflatten(treedef, moved)
