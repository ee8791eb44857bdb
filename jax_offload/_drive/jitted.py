"""A jitted step whose updates the host's cores have a part in: called as the ``jit`` would be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from jax_offload._base.on_disk import is_on_disk
from jax_offload._drive.run import Driven


class DrivenJit:
    """A step, driven from Python; compiled for each kind of arguments: their tree, types, shardings and static values.

    Args:
      jitted: the step under ``jax.jit``, which traces it.
      fun: the step.
      options: those of ``jax.jit``.
      compiler_options: for the programs of the device.
      for_sending: for those that send something to the host.
    """

    def __init__(
        self,
        jitted: Any,
        fun: Callable[..., Any],
        options: Mapping[str, Any],
        compiler_options: Mapping[str, Any],
        for_sending: Mapping[str, Any],
    ) -> None:
        self._jitted, self._options = jitted, options
        self._static = _static(fun, options)
        self._programs: dict[Hashable, tuple[Driven, Any]] = {}
        self._compiler_options = compiler_options, for_sending

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step's results; its arguments as for ``jax.jit``."""
        indices, names = self._static
        indices = {i % len(args) for i in indices if -len(args) <= i < len(args)}
        given = (
            tuple(x for i, x in enumerate(args) if i not in indices),
            {name: x for name, x in kwargs.items() if name not in names},
        )
        if (places := self._options.get("in_shardings")) is not None:
            given = (_put(given[0], tuple(places) if isinstance(places, list) else places), given[1])
        leaves, tree = jax.tree.flatten(given)
        statics = tuple((i, args[i]) for i in sorted(indices)), tuple((k, kwargs[k]) for k in names if k in kwargs)
        key = tree, statics, tuple(map(_kind, jax.tree.leaves(given, is_leaf=is_on_disk)))
        if key not in self._programs:
            traced = self._jitted.trace(*args, **kwargs)
            donated = [info.donated for info in jax.tree.leaves(traced.args_info)]
            self._programs[key] = Driven(traced.jaxpr, leaves, donated, *self._compiler_options), traced.out_tree
        driven, out_tree = self._programs[key]
        result = jax.tree.unflatten(out_tree, driven(leaves))
        places = self._options.get("out_shardings")
        return result if places is None else _put(result, places)


def _kind(x: Any) -> Hashable:
    """What a step is compiled for; a token is read here, wherever it is."""
    if is_on_disk(x):
        token = jax.typeof(x.token)
        return x.place, token.shape, token.dtype
    return jax.typeof(x), getattr(x, "sharding", None)


def _put(tree: Any, places: Any) -> Any:
    """A tree where a prefix of shardings says; ``None`` says nothing."""
    broadcast = jax.tree.broadcast(places, tree, is_leaf=lambda x: x is None)
    leaves, treedef = jax.tree.flatten(tree)
    where = jax.tree.leaves(broadcast, is_leaf=lambda x: x is None)
    moved = [
        x if s is None or getattr(x, "sharding", None) == s else jax.device_put(x, s)
        for x, s in zip(leaves, where, strict=True)
    ]
    return jax.tree.unflatten(treedef, moved)


def _static(fun: Callable[..., Any], options: Mapping[str, Any]) -> tuple[set[int], set[str]]:
    """The places and the names of static arguments: each parameter that one of both names, as ``jax.jit`` has it."""
    given = options.get("static_argnums"), options.get("static_argnames")
    indices: set[int] = {given[0]} if isinstance(given[0], int) else set(given[0] or ())
    names: set[str] = {given[1]} if isinstance(given[1], str) else set(given[1] or ())
    try:
        parameters = list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):
        return indices, names
    by_name = {k for k, name in enumerate(parameters) if name in names}
    by_number = {parameters[k] for k in indices if -len(parameters) <= k < len(parameters)}
    return indices | by_name, names | by_number
