"""``jax.jit`` with donation that respects memory kinds.

jax pairs donated arguments with results by shape, dtype and memory kind, and XLA writes each result into its
partner's buffer (``_set_up_aliases`` in ``jax/_src/interpreters/mlir.py``). But where the kind of a single
argument or result is unknown, jax ignores all kinds and pairs by shape and dtype alone, in order: a result
in device memory may get a ``pinned_host`` buffer. The kind is unknown for a result without
``out_shardings``, and for an uncommitted argument, such as a NumPy batch. :func:`jit` permutes the results
inside the jitted function until the pairing in order is one of equal kinds, so what jax knows does not
matter, and restores them outside.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import jax
from jax.core import Tracer

from jax_offload import _memory

_Buffer = tuple[Any, bool]  # (shape on one device, dtype), by which jax pairs; whether it is in host memory


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    out_shardings: Any = None,
    **jit_options: Any,
) -> Any:
    """``jax.jit`` that reuses a donated buffer only for a result of the same memory kind.

    Takes the arguments of ``jax.jit``; without donated ones it is ``jax.jit``. Each donated leaf is paired
    with the next result of its shape, dtype and memory kind. A leaf without such a result, whose buffer jax
    could give to a result of the other kind, is itself returned by the computation, and freed.

    What differs from ``jax.jit``: Unused arguments are kept, so unused donated arrays may be deleted as
    well. A call with traced arguments, as under ``jax.grad``, donates nothing. ``out_shardings`` are applied
    with ``jax.device_put``: inside the computation, and outside to results whose sharding is equivalent but
    not equal. Lowered and compiled text, ``jaxpr``, ``out_tree`` and ``out_avals`` show the permuted
    results; calls, ``eval_shape``, ``out_info`` and ``output_shardings`` do not. What ``trace`` and
    ``lower`` return wraps the stages of ``jax.stages``. ``jax.export`` is not supported.

    Raises ``NotImplementedError`` while tracing if arrays of both kinds live on a mesh of several devices
    with ``Explicit`` axes, and it has other axes too or ``in_shardings`` are given: the shapes by which jax
    pairs are then not known.
    """
    if fun is None:
        options = {"donate_argnums": donate_argnums, "donate_argnames": donate_argnames}
        return functools.partial(jit, **options, out_shardings=out_shardings, **jit_options)
    nums, names = _donated_parameters(fun, donate_argnums, donate_argnames)
    plain = jax.jit(fun, out_shardings=out_shardings, **jit_options)
    if not nums and not names:
        return plain

    @functools.wraps(fun)
    def permuted(*args: Any, **kwargs: Any) -> _Permuted:
        # In jax's order: positional arguments, then keywords by name.
        keywords = [kwargs[name] for name in sorted(kwargs) if name in names]
        donated = jax.tree.leaves([args[i] for i in nums if i < len(args)] + keywords)
        results = fun(*args, **kwargs)
        if out_shardings is not None:
            try:
                results = jax.device_put(results, out_shardings)
            except ValueError as error:
                raise ValueError(f"out_shardings: {error}") from error
        leaves, treedef = jax.tree.flatten(results)
        _check_meshes((*donated, *leaves), "in_shardings" in jit_options)
        order = _order([_buffer(x) for x in donated], [_buffer(x) for x in leaves])
        return _Permuted([leaves[i] if i >= 0 else donated[~i] for i in order], order, treedef)

    donation = {"donate_argnums": nums, "donate_argnames": names or donate_argnames}
    jitted = jax.jit(permuted, **{**jit_options, **donation, "keep_unused": True})
    restoring = _Restoring(jitted, out_shardings, plain)
    return functools.update_wrapper(restoring, fun, updated=())


def _donated_parameters(
    fun: Callable[..., Any], argnums: int | Sequence[int] | None, argnames: str | Sequence[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names. As in ``jax.jit``, if only one is given the other follows from the signature."""
    nums = () if argnums is None else (argnums,) if isinstance(argnums, int) else tuple(argnums)
    names = () if argnames is None else (argnames,) if isinstance(argnames, str) else tuple(argnames)
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # some builtins have none
        parameters = ()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    nums = tuple(i % len(positional) if i < 0 and positional else i for i in nums)
    either = [(i, p.name) for i, p in enumerate(positional) if p.kind is p.POSITIONAL_OR_KEYWORD]
    if argnums is None:
        nums = tuple(i for i, name in either if name in names)
    elif argnames is None:
        names = tuple(name for i, name in either if i in nums)
    return tuple(sorted(set(nums))), names


def _buffer(x: Any) -> _Buffer:
    """What decides about the pairing of ``x``.

    Only axes of type ``Explicit`` show in a traced sharding. On other meshes of several devices jax leaves
    the pairing to XLA (``jax.buffer_donor``), which respects memory kinds.
    """
    aval = jax.typeof(x)
    shape = aval.shape if aval.sharding.mesh.empty else aval.sharding.shard_shape(aval.shape)
    return (shape, aval.dtype), _memory.on_host(x)


def _order(donated: Sequence[_Buffer], results: Sequence[_Buffer]) -> tuple[int, ...]:
    """The results' indices in an order that pairs buffers of equal kind; ``~j`` stands for donated leaf j.

    jax walks the results and gives each the first donated buffer of its class, (shape, dtype), that is left.
    So the partners of the donated buffers come first, in the order of these, then the other results. A
    buffer without a partner takes itself if a result of its class follows, which is then of the other kind.
    """
    free: dict[_Buffer, deque[int]] = defaultdict(deque)
    for i, buffer in enumerate(results):
        free[buffer].append(i)
    partners = [free[buffer].popleft() if free[buffer] else None for buffer in donated]
    rest = sorted(i for unpaired in free.values() for i in unpaired)
    followed = {results[i][0] for i in rest}
    paired: list[int] = []
    for j, (cls, _) in reversed(list(enumerate(donated))):
        partner = ~j if partners[j] is None and cls in followed else partners[j]
        if partner is not None:
            paired.append(partner)
            followed.add(cls)
    return (*reversed(paired), *rest)


def _check_meshes(arrays: Sequence[Any], in_shardings: bool) -> None:
    if len({_memory.on_host(x) for x in arrays}) < 2:
        return
    for mesh in {jax.typeof(x).sharding.mesh for x in arrays}:
        mixed = in_shardings or len(set(mesh.axis_types)) > 1
        if mesh.size > 1 and mixed and jax.sharding.AxisType.Explicit in mesh.axis_types:
            raise NotImplementedError(
                "donation from host and device memory on a mesh with Explicit axes: all axes must be Explicit"
                f" and in_shardings not given; got {mesh.axis_types}, in_shardings given: {in_shardings}."
            )


@jax.tree_util.register_pytree_node_class
class _Permuted:
    """The leaves of a result in the order of :func:`_order`."""

    def __init__(self, leaves: Sequence[Any], order: tuple[int, ...], treedef: Any) -> None:
        self.leaves, self.order, self.treedef = leaves, order, treedef

    def restore(self) -> list[Any]:
        places = dict(zip(self.order, self.leaves, strict=True))
        return [places[i] for i in range(self.treedef.num_leaves)]

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self.leaves, (self.order, self.treedef)

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Sequence[Any]) -> _Permuted:
        return cls(leaves, *aux)


class _Restoring:
    """A jitted function, or a stage of it, whose results are back in their places."""

    _stage: Any = None

    def __init__(self, stage: Any, out_shardings: Any, plain: Any = None) -> None:
        self._stage, self._out_shardings, self._plain = stage, out_shardings, plain
        self._given = functools.cache(functools.partial(_broadcast, out_shardings))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._plain and any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs))):
            return self._plain(*args, **kwargs)  # a transformation may drop results, and so spoil the order
        results = self._stage(*args, **kwargs)
        leaves = results.restore()
        for i, sharding in () if self._out_shardings is None else self._given(results.treedef):
            if leaves[i].sharding != sharding:  # P("x") for P("x", None) would compile the next call again
                leaves[i] = jax.device_put(leaves[i], sharding)
        return jax.tree.unflatten(results.treedef, leaves)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if inspect.ismethod(value):
            return lambda *args, **kwargs: self._restored(value(*args, **kwargs))
        return self._restored(value)

    def _restored(self, value: Any) -> Any:
        if isinstance(value, jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled):
            return _Restoring(value, self._out_shardings)
        return jax.tree.unflatten(value.treedef, value.restore()) if isinstance(value, _Permuted) else value


def _broadcast(out_shardings: Any, treedef: Any) -> list[tuple[int, Any]]:
    """Each result, by its index, that has a sharding in this prefix of the results' tree."""
    results = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    given = jax.tree.broadcast(out_shardings, results, is_leaf=lambda s: s is None)
    pairs: list[tuple[int, Any]] = []
    jax.tree.map(lambda i, sharding: pairs.append((i, sharding)), results, given)
    return [pair for pair in pairs if isinstance(pair[1], jax.sharding.Sharding)]
