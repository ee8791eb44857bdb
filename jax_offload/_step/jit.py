"""``jax.jit`` for a whole training step. Python drives a step whose state is on disk or updated by the host's cores."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import Any, cast

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding
from jax.tree_util import keystr

from jax_offload._disk.leaves import Token, is_on_disk
from jax_offload._emit.region import in_one_scan
from jax_offload._host.driver import Driven, places_of
from jax_offload._program.jaxprs import ClosedJaxpr, Jaxpr, jax_fun, typed_as, variables
from jax_offload._program.jaxprs import jit as jit_of_jax
from jax_offload._program.memory import is_host_aval, mesh_is_set, on_host
from jax_offload._program.primitives import guarded
from jax_offload._program.private import traces
from jax_offload._rewrite.inlined import explained, traced_step
from jax_offload._rewrite.rewritten import is_driven, rewritten


def jit(fun: Callable[..., Any] | types.EllipsisType = ..., **options: Any) -> Any:
    """Jit a training step as ``jax.jit`` does, and hide the transfers of its optimizer state.

    Where a ``lax.scan`` makes the gradients of stacked layers, each layer is updated inside that scan as soon as its
    gradient exists, while the state of its neighbors moves; the stacked gradients then never exist. Between unrolled
    layers, each update runs where its gradient appears. Loops that index layers, layers that the step stacks, gradients
    summed in a ``jax.new_ref`` and a whole step inside a ``shard_map`` count as well (docs/what_hides.md). Parameters
    of stacked layers may live in host memory too, ``jax_offload.to_host(params)``: the scans load each row while its
    neighbor computes, and store the new rows.

    The numbers equal the plain step's. An update that needs all gradients first, such as clipping by their norm, runs
    after the backward pass; ``jax_offload.pipelined`` hides such an update. ``jax_offload.placement(step, *args)`` says
    where each leaf is updated, and why.

    It sets ``jax_offload.compiler_options``, unless ``compiler_options`` are given. No donated buffer crosses memory
    kinds: ``jax.jit`` of a step that calls ``update``, ``update_params`` or ``init`` is as safe, but this function also
    covers programs that only pass a state on, such as the ``call`` of an exported step.

    Everything else works as in ``jax.jit``: caches, static arguments, contexts such as ``jax.enable_x64``,
    ``jax.disable_jit``, and ``jax.export``. If the host's cores update (``update_on=``) or the state is on disk, Python
    runs the step as several programs, with the same arguments and results.

    Args:
      fun: the function. Without it a decorator is returned.
      **options: the options of ``jax.jit``.

    Returns:
      The step, with the methods of a function of ``jax.jit``.

    Raises:
      TypeError: ``fun`` is not a function, or an option is unknown to ``jax.jit``.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> layers = jax.device_put(jnp.full((4, 256, 256), 0.01), jax.devices()[0])
      >>> tx = jo.offload(optax.adamw(1e-3))
      >>> def loss(layers, x):
      ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0].sum()
      >>> step = jo.jit(lambda p, s, x: jo.update_params(tx, jax.grad(loss)(p, x), s, p), donate_argnums=(0, 1))
      >>> layers, state = step(layers, tx.init(layers), jnp.ones((8, 256)))
      >>> state[0].mu.sharding.memory_kind
      'pinned_host'
    """
    if isinstance(fun, types.EllipsisType):
        return functools.partial(jit, **options)
    return Jitted(fun, options)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Undone:
    """A step that jax has traced and Python drives. It stands for each of the step's results, a tree without leaves.

    So ``jax.jit`` finds it in its own cache, by everything that jax distinguishes: types, static arguments, contexts.

    Attributes:
      step: the closed jaxpr.
      result: the structure of the step's result.
      static: the static arguments: positions, and names of keyword arguments.
      programs: the step compiled for shardings of arguments and for donation.
      shardings: a sharding, and the rank of an argument -> the first such sharding that means the same.
    """

    step: ClosedJaxpr
    result: Any
    static: Set[int | str]
    programs: dict[Hashable, Driven] = dataclasses.field(default_factory=dict[Any, Any])
    shardings: dict[tuple[Sharding, int], Sharding] = dataclasses.field(default_factory=dict[Any, Any])

    @classmethod
    def left(cls, step: ClosedJaxpr, result: Any, static: Set[int | str]) -> Any:
        """Return the result of tracing a driven step."""
        return jax.tree.unflatten(result, [cls(step, result, static)] * result.num_leaves)

    @classmethod
    def found_in(cls, result: Any) -> Undone | None:
        """Return the step that a result says Python is to drive."""
        if jax.tree.leaves(result):
            return None
        return next((x for x in jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, Undone))), None)

    def run(self, step: Jitted, traced: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Drive the step.

        Args:
          step: the jitted step.
          traced: the trace that has returned this, after jax checked the arguments.
          args, kwargs: the arguments of the call.
        """
        options, given = step._options, _without(self.static, args, kwargs)
        if (places := options.get("in_shardings")) is not None:
            given = (_put(given[0], tuple(places) if isinstance(places, list) else places), given[1])
        leaves, places = jax.tree.leaves(given), options.get("out_shardings")
        names = "donate_argnums", "donate_argnames", "compiler_options", "out_shardings"
        how = repr([options.get(name) for name in names])
        key = how, tuple(map(self._same, places_of(leaves), map(np.ndim, leaves)))
        if key not in self.programs:
            _check_devices(self.step.jaxpr, leaves)
            if places is not None:  # jax checks them before anything is donated
                types = jax.tree.unflatten(self.result, self.step.out_avals)
                types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), types, is_leaf=is_on_disk)
                jit_of_jax(lambda results: results, out_shardings=places).eval_shape(types)
            donated = [info.donated for info in jax.tree.leaves(traced().args_info)]
            compiling = step._compiling(compiler_options("cuda")), step._compiling(options_for_sending("cuda"))
            self.programs[key] = Driven(self.step, leaves, donated, compiling)
        run = self.programs[key]
        result = jax.tree.unflatten(self.result, map(run.committed, typed_as(self.step.out_avals, run(leaves))))
        return result if places is None else _put(result, places)

    def _same(self, place: Sharding | None, ndim: int) -> Sharding | None:
        if place is not None and (place, ndim) not in self.shardings:
            alike = (s for s, n in self.shardings if n == ndim and s.is_equivalent_to(place, n))
            self.shardings[place, ndim] = next((s for s in alike if s.memory_kind == place.memory_kind), place)
        return None if place is None else self.shardings[place, ndim]


def _check_devices(step: Jaxpr, leaves: Sequence[Any]) -> None:
    """Raise the error of ``jax.jit`` if arguments that the step reads are committed to different devices."""
    read = {*variables(step.outvars), *(v for eqn in step.eqns for v in variables(eqn.invars))}
    names = step.debug_info.arg_names or [""] * len(leaves)
    given = [(name, x) for v, name, x in zip(step.invars, names, leaves, strict=True)
             if v in read and isinstance(x, jax.Array) and x.committed]  # fmt: skip
    others = (each for each in given if each[1].sharding.device_set != given[0][1].sharding.device_set)
    if (other := next(others, None)) is not None:
        first, second = (
            f"argument {name} of {step.debug_info.func_name} with shape {jax.typeof(x).str_short()} and with device "
            f"ids {sorted(d.id for d in x.sharding.device_set)}"
            for name, x in (given[0], other)
        )
        raise ValueError(f"Received incompatible devices for jitted computation. Got {first} and {second}.")


def _put(tree: Any, places: Any) -> Any:
    """Put a tree where a prefix tree of shardings says; ``None`` leaves a part where it is."""

    def moved(place: Any, x: Any) -> Any:
        there = isinstance(x, Token) or getattr(x, "sharding", None) == place
        return x if there else jax.device_put(x, place)

    def put(place: Any, part: Any) -> Any:
        return part if place is None else jax.tree.map(functools.partial(moved, place), part)

    return jax.tree.map(put, places, tree, is_leaf=_is_none)


class Step:
    """A function as ``jax.jit`` traces it: rewritten, and with the function's names and signature, which jax reads.

    It does not keep the function alive: jax drops a function's programs together with the function.

    Args:
      fun: the function.
      driven: whether a step that Python drives is left ``Undone``.
      as_written: whether the updates stay where they are; parameters in host memory are loaded all the same.
    """

    def __init__(self, fun: Callable[..., Any], *, driven: bool = False, as_written: bool = False) -> None:
        named = jit_of_jax(fun)  # jax has a name for every callable
        self._fun, self._driven, self._as_written = weakref.ref(fun), driven, as_written
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(named, name):
                setattr(self, name, getattr(named, name))
        self.in_scan: bool | None = None  # whether the first trace has moved all its updates into scans

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return cast(Callable[..., Any], self._fun())

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fun = self.__wrapped__
        if not traces():  # jit is disabled, or jax looks for the operation that made a NaN
            with explained():
                return fun(*args, **kwargs)
        numbers = [i for i, x in enumerate(args) if _is_static(x)]
        named = {name: x for name, x in kwargs.items() if _is_static(x)}
        static = frozenset((*numbers, *named))
        given = _without(static, args, kwargs)
        step = functools.partial(fun, **named)  # jax.make_jaxpr would call the function's own attribute named trace
        closed, result = traced_step(step, *args, static=numbers, named=given[1])
        on_disk = any(map(is_on_disk, jax.tree.leaves(given, is_leaf=is_on_disk)))  # no program can take it
        if self._driven and (on_disk or is_driven(closed)):
            return Undone.left(closed, result, static)
        results = jax_fun(closed if self._as_written else rewritten(closed))(*jax.tree.leaves(given))
        return guarded(jax.tree.unflatten(result, typed_as(closed.out_avals, results)), given)


def _is_static(x: Any) -> bool:
    """Whether an argument of a jitted function is static; for arguments without leaves it does not matter."""
    leaves = jax.tree.leaves(x)
    try:
        return not any(isinstance(leaf, (Tracer, jax.Array)) for leaf in leaves) and hash(x) is not None
    except TypeError:
        return False


def _without(static: Set[int | str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call without the static ones."""
    given = tuple(x for i, x in enumerate(args) if i not in static)
    return given, {name: x for name, x in kwargs.items() if name not in static}


_steps: weakref.WeakKeyDictionary[Callable[..., Any], tuple[Step, Step]] = weakref.WeakKeyDictionary()


def _steps_of(fun: Callable[..., Any]) -> tuple[Step, Step]:
    """Return a function as jax traces it, inside of a program and as one: always the same objects, as jax's caches
    ask."""
    new = Step(fun), Step(fun, driven=True)
    try:
        return _steps.get(fun) or _steps.setdefault(fun, new)
    except TypeError:  # it has no hash
        return new


class Jitted:
    """The two ``jax.jit`` objects of a step: for calls inside another program, and for the step as a program.

    jax takes ``compiler_options`` from the outermost ``jit`` only, so the first has none of ours. The second leaves a
    step that is driven from Python undone, and says so in its result.
    """

    # A decorator such as jax.grad hands on what is in __dict__, so there are the function's own attributes alone.
    __slots__ = (
        "__dict__", "__weakref__", "_called", "_fun", "_inner", "_options", "_programs", "_was_called", "whole_step",
    )  # fmt: skip

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]) -> None:
        vars(self).update(getattr(fun, "__dict__", {}))  # the function's own attributes, as jax.jit has them
        self.whole_step, self._called = _steps_of(fun)
        self._inner: Any = jit_of_jax(self.whole_step, **options)  # it raises for options that it does not take
        functools.update_wrapper(self, self._inner, updated=())
        self._fun = self.__wrapped__ = self.whole_step.__wrapped__  # which the steps do not keep alive
        self._options, self._was_called = options, False
        # the step as a program, and as one that moves its state in a scan: jax takes the compiler's options first
        found = (self._compiling(compiler_options("cuda", in_scan=in_scan)) for in_scan in (False, True))
        every: list[dict[str, Any]] = [{**options, "compiler_options": of or None} for of in found]
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # which the first object has given
            self._programs: list[Any] = [jit_of_jax(self._called, **each) for each in every]

    def _compiling(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        """The compiler's options: the caller's, or else ours."""
        return dict((self._options["compiler_options"] or {}) if "compiler_options" in self._options else ours)

    def _outermost(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The program that a step needs, of the two; the first trace of its function decides."""
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return self._programs[0]  # the function itself runs, which may not be traceable
        if self._called.in_scan is None:
            # on several devices concurrent graphs raise the peak above resident's
            places = [getattr(x, "sharding", None) for x in jax.tree.leaves((args, kwargs))]
            several = any(place is not None and place.num_devices > 1 for place in places)
            self._called.in_scan = not several and in_one_scan(self._programs[0].trace(*args, **kwargs).jaxpr)
        return self._programs[self._called.in_scan]

    def compiling(self, platform: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The compiler's options for these arguments on a platform."""
        self._outermost(args, kwargs)
        return self._compiling(compiler_options(platform, in_scan=bool(self._called.in_scan)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if traces():
            return self._inner(*args, **kwargs)
        with _naming(self._fun, self._options.get("in_shardings"), args):
            return self._called_with(args, kwargs)

    def _called_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        jitted = self._outermost(args, kwargs)
        if not (self._was_called or jax.config.jax_disable_jit):  # pyright: ignore[reportAttributeAccessIssue]
            self._was_called = True
            _warn_of_uncommitted(self._fun, jitted.trace(*args, **kwargs), args, kwargs)
        # The program of a driven step is empty, and would be given every argument: only its trace is asked for.
        keeps = self._options.get("keep_unused") or jax.config.jax_debug_key_reuse  # pyright: ignore
        result = jitted.trace(*args, **kwargs).out_info if keeps else jitted(*args, **kwargs)
        if (undone := Undone.found_in(result)) is not None:
            return undone.run(self, functools.partial(jitted.trace, *args, **kwargs), args, kwargs)
        return jitted(*args, **kwargs) if keeps else result

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The same method as on the result of ``jax.jit``."""
        traced = self._outermost(args, kwargs).trace(*args, **kwargs)
        return traced if Undone.found_in(traced.out_info) is None else self._inner.trace(*args, **kwargs)

    def without_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a driven step that jax traces."""
        undone = Undone.found_in(self._outermost(args, kwargs).trace(*args, **kwargs).out_info)
        return (args, kwargs) if undone is None else _without(undone.static, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The same method as on the result of ``jax.jit``."""
        with _naming(self._fun, self._options.get("in_shardings"), args):
            return Jitted.trace(self, *args, **kwargs).lower()  # the function may have an attribute named trace

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The same method as on the result of ``jax.jit``."""
        return self._inner.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """The same method as on the result of ``jax.jit``."""
        self._called.in_scan = None
        traced: Any = jit_of_jax(self._fun)  # the function by itself, too
        for jitted in (self._inner, *self._programs, traced):
            jitted.clear_cache()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__slots__:
            raise AttributeError(name)
        return getattr(self._programs[bool(self._called.in_scan)], name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> Any:
        return functools.partial(jit, **self._options), (self._fun,)


@contextlib.contextmanager
def _naming(step: Callable[..., Any], places: Any, args: Sequence[Any]) -> Iterator[None]:
    """Name the argument that is in another memory than ``in_shardings`` say, since jax's error gives only its type."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Memory kinds passed to jax.jit"):
            raise
        named = zip(inspect.signature(step).parameters, args, strict=False)
        given = {name: x for name, x in named if not _is_static(x)}
        places = places if isinstance(places, list | tuple) else [places] * len(given)
        if len(places) != len(given):  # an argument without leaves
            raise
        wanted = jax.tree.broadcast(dict(zip(given, places, strict=True)), given, is_leaf=_is_none)
        leaves = jax.tree_util.tree_flatten_with_path(given)[0]
        for ((argument, *path), x), place in zip(leaves, jax.tree.leaves(wanted, is_leaf=_is_none), strict=True):
            kind, says = (getattr(s, "memory_kind", None) for s in (getattr(x, "sharding", None), place))
            if None not in (kind, says) and kind != says:
                raise ValueError(
                    f"in_shardings: {argument.key}{keystr(tuple(path))} is in memory of the kind {kind!r}, and they "
                    f"say {says!r}; jit moves no argument between memories. Fix: give None in its place, or "
                    f"jax.tree.map(lambda x: x.sharding, {argument.key})."
                ) from error
        raise


def _is_none(x: Any) -> bool:
    return x is None


def _warn_of_uncommitted(step: Callable[..., Any], traced: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Warn if donated parameters that nobody has placed stand beside a state in host memory: eager ``init`` warns too,
    and a traced one cannot. Arrays of rank 0 are excluded, because optax and flax make their counts so. Warn also if
    the type of an array in host memory says that it is on the device: the step would return it there. A batch is
    donated too, and no next step gets it: only arrays of a type that the step returns are meant."""
    infos, names = jax.tree.leaves(traced.args_info), traced.jaxpr.jaxpr.debug_info.arg_names or ()
    donated = {name for name, info in zip(names, infos, strict=False) if info.donated}
    if not donated or mesh_is_set():
        return
    flat = jax.tree_util.tree_flatten_with_path(inspect.signature(step).bind(*args, **kwargs).arguments)[0]
    carried = [(each.key, keystr(tuple(path)), x) for (each, *path), x in flat]
    carried = [(argument, path, x) for argument, path, x in carried if argument + path in donated]
    if not any(isinstance(x, jax.Array) and on_host(x) for *_, x in carried):
        return
    undone = Undone.found_in(traced.out_info)
    results = jax.tree.leaves(traced.out_info) if undone is None else undone.step.out_avals
    returned = {(x.shape, x.dtype) for x in results}
    for argument, path, x in carried:
        if on_host(x) and not is_host_aval(jax.typeof(x)):
            warnings.warn(
                f"jo.jit: {argument}{path} is in host memory, and jax types it as an array on the device, as a jit "
                "does whose out_shardings alone put it there. The step would load it as a whole and return it on the "
                f"device. Fix: {argument} = jo.to_host({argument}) of the part that is in host memory.",
                stacklevel=3,
            )
            return
        placed = getattr(x, "committed", False) or not isinstance(x, jax.Array | np.ndarray)
        if not placed and x.ndim and (x.shape, jax.typeof(x).dtype) in returned:
            warnings.warn(
                f"jo.jit: {argument}{path} is not committed to a device, and the state beside it is in host memory. "
                "jax commits whatever a step with host memory returns, so the second step would compile again. Fix: "
                f"{argument} = jax.device_put({argument}, jax.devices()[0]) (or a NamedSharding) before the first "
                "step, or jax.set_mesh.",
                stacklevel=3,
            )
            return


# ---- options of XLA's compiler that let transfers overlap with compute

# How many host copies XLA's latency-hiding scheduler keeps in flight; its default is two. With masters and two moments,
# a layer of a scan moves dozens of leaves in each direction. More copies only raise the peak.
_COPIES, _MANY = "xla_gpu_experimental_parallel_async_compute_limit", 32
# XLA records a scan's body as a CUDA graph, in which by default a copy waits for the kernel before it. Outside of
# scans concurrent graphs only raise the peak, because buffers are not used again: notes/xla.md.
_IN_SCAN = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}


def options_for_sending(platform: str) -> dict[str, Any]:
    """Like ``compiler_options``, for a program that copies to the host and nothing from it: gradients that wait for the
    host's cores. One copy at a time is in flight, as each further one is a gradient that waits on the device."""
    return {_COPIES: 1} if platform in ("cuda", "gpu") else {}


def compiler_options(platform: str, *, in_scan: bool = False) -> dict[str, Any]:
    """Return the options for ``jax.jit(..., compiler_options=)`` that make transfers overlap with arithmetic.

    Streaming works without them. XLA spends spare memory on overlap: add ``{"xla_gpu_memory_limit_slop_factor":
    percent}`` to limit temporaries to that share (95 by default) of what 80 % of the device leaves beside arguments and
    results. A lower share gives a lower peak and less overlap.

    Args:
      platform: ``"cuda"`` (or ``"gpu"``), ``"tpu"`` or ``"cpu"``. We found no option that helps on the last two.
      in_scan: whether state moves in the scan of a model with stacked layers. ``jo.jit`` and ``jo.pipelined`` set
        it themselves. It raises the peak of a model with unrolled layers.

    Returns:
      A dict, empty for a platform without such options.

    Raises:
      ValueError: ``platform`` is not one of these.

    Example:
      >>> import jax, jax_offload as jo
      >>> double = jax.jit(lambda x: 2 * x, compiler_options=jo.compiler_options(jax.default_backend()))
      >>> int(double(21))
      42
    """
    if platform not in ("cuda", "gpu", "tpu", "cpu"):
        raise ValueError(f"platform: expected 'cuda', 'gpu', 'tpu' or 'cpu', got {platform!r}.")
    found = {_COPIES: _MANY} | (_IN_SCAN if in_scan else {})
    return found if platform in ("cuda", "gpu") else {}
