"""What comes to ``init`` and ``update``: their arguments, which are checked here, and facts that no argument shows."""

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from numbers import Number
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Sharding
from jax.tree_util import keystr, tree_flatten_with_path

from jax_offload._disk.leaves import is_on_disk
from jax_offload._program import memory
from jax_offload._program.arrays import Offloaded, by_key, is_array, leaves_with_paths, names_of
from jax_offload._program.memory import Shardings, on_host, same_sharding
from jax_offload._program.primitives import Home
from jax_offload._program.private import traces
from jax_offload._schedule.after import was_on_host
from jax_offload._state.placement import Leaf


@dataclasses.dataclass(frozen=True)
class Around:
    """Facts about a trace that its arguments do not show."""

    # The parameters' shardings by path; None: only their types tell them. With Auto axes no type tells them, and a
    # constraint would be lost at the next branch, whose operands are new variables.
    shardings: Shardings | None = None
    runs: bool = True  # the traced function will run, as far as an offload knows; a description must not warn
    remembers: bool = True  # the parameters' shardings are remembered
    within_offload: bool = False  # an offload traces its inner optimizer, which must not hold another one
    # The options of each offload whose divided updates a recipe around it gathers; None: each gathers its own.
    gathered: list[Any] | None = None
    # The values on the device that the step has loaded, each with its origin in host memory; None: it loads what it
    # needs by itself.
    loaded: list[tuple[Any, Any]] | None = None
    states: list[Any] = dataclasses.field(default_factory=list[Any])  # the origins received as an update's state


_AROUND: contextvars.ContextVar[Around] = contextvars.ContextVar("jax_offload_around", default=Around())  # noqa: B039
facts = _AROUND.get


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Inside, these facts replace the current ones."""
    token = _AROUND.set(dataclasses.replace(facts(), **changes))
    try:
        yield
    finally:
        _AROUND.reset(token)


def described(params: Any = None, *, remember: bool = False) -> contextlib.AbstractContextManager[None]:
    """Inside, a function is traced only to be read, with the shardings of ``params`` unless its arguments have them."""
    told = {} if params is None else {"shardings": _shardings_in(params)}
    return within(runs=False, remembers=remember, **told)


def loading(states: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Inside, a step computes with what ``load`` returns, and an update streams the origins of these values. Those of
    a state are appended to ``states``."""
    return within(loaded=list[tuple[Any, Any]](), states=states)


def load(x: Any) -> Any:
    """Return ``x`` on the device; ``from_host`` returns it again."""
    loaded = facts().loaded
    if loaded is None or not on_host(x):
        return x
    loaded.append((memory.to_device(x), x))
    return loaded[-1][0]


def from_host(state: Any, params: Any) -> tuple[Any, Any]:
    """Return both trees with the values that ``load`` has loaded where they were, in host memory."""
    origins = {id(x): origin for x, origin in facts().loaded or ()}
    facts().states.extend(origins[id(x)] for x in jax.tree.leaves(state) if id(x) in origins)
    return jax.tree.map(lambda x: origins.get(id(x), x), (state, params)) if origins else (state, params)


# ---- the parameters' shardings, which a trace with Auto axes does not tell


def shardings_of(params: Any) -> Shardings:
    """The known shardings of parameters, by path."""
    return _shardings_in(params) if (given := facts().shardings) is None else given


def _shardings_in(params: Any) -> Shardings:
    found = {path: s for path, x in by_key(params).items() if (s := memory.sharding_of(x)) is not None}
    hosted = {path: s for path, s in found.items() if s.memory_kind == memory.HOST_KIND}
    return found | {path: s.with_memory_kind(memory.DEVICE_KIND) for path, s in hosted.items()}


def without_sharding(params: Any, shardings: Shardings) -> frozenset[str]:
    """The paths of parameters that have no entry in ``shardings`` and might be divided: a description gives them no
    sharding, or a trace tells only that their mesh has several devices."""
    missing = [(path, x) for path, x in by_key(params).items() if path not in shardings and is_array(x)]
    return frozenset(path for path, x in missing if facts().shardings is not None or memory.devices_of(x) > 1)


class Remembered(dict[str, list[Sharding]]):
    """The shardings that one ``offload`` has seen its parameters in, in eager ``init`` and descriptions, by path."""

    def remember(self, shardings: Shardings) -> None:
        for path, sharding in shardings.items() if facts().remembers else ():
            known = self.setdefault(path, [])
            if not any(same_sharding(sharding, other) for other in known):
                known.append(sharding)

    def unambiguous(self, params: Any) -> Shardings:
        """The shardings of the parameters that have had only one; with several, a trace may be about any of them."""
        return {path: found[0] for path in by_key(params) if len(found := self.get(path, ())) == 1}


def compiled_where_eager(like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function so that it is jitted outside a trace; with an argument that has no hash, it runs unchanged.

    Run equation by equation, an update would be traced anew, and each loop over chunks compiled, at every step.
    ``like`` maps the arguments to the parameters, or to values sharded like them: only concrete ones tell how.
    """

    def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
        like.__qualname__ = fun.__qualname__  # it is called first, and named in the error of a missing argument

        @functools.partial(jax.jit, static_argnums=(0, 1, 2))
        def run(treedef: Any, given: tuple[Any, ...], shardings: tuple[Any, ...], operands: list[Any]) -> Any:
            values = iter(operands)
            args, kwargs = jax.tree.unflatten(treedef, [next(values) if x is None else x[1] for x in given])
            with within(shardings=dict(shardings), runs=True, remembers=True):
                return fun(*args, **kwargs)

        @functools.wraps(fun)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            leaves, treedef = jax.tree.flatten((args, kwargs))
            # An operand may change at every step, as an array or a float does. An int may be a flag.
            operands = [x for x in leaves if isinstance(x, (jax.Array, np.ndarray, np.generic, float, complex))]
            numbers = {id(x) for x in operands}
            given = tuple(None if id(x) in numbers else (type(x), x) for x in leaves)  # True == 1 == 1.0
            hashable = all(x is None or isinstance(x[1], Hashable) for x in given)
            if not hashable or traces() or any(isinstance(x, Tracer) for x in leaves):
                return fun(*args, **kwargs)
            return run(treedef, given, tuple(_shardings_in(like(*args, **kwargs)).items()), operands)

        return wrapper

    return decorate


# ---- checks of the transformation


def check_not_nested(inner: Any = None) -> None:
    """Raise ``TypeError`` if one ``offload`` stands somewhere inside another."""
    if isinstance(inner, Offloaded) or facts().within_offload:
        raise TypeError(
            "inner: there is an offload(...) inside the optimizer that offload wraps. Wrap once: the whole chain, "
            "jo.offload(optax.chain(clip, adamw)), or the part that has a state, optax.chain(clip, jo.offload(adamw))."
        )


def check_inner(inner: Any, argument: str = "inner") -> None:
    """Raise ``TypeError`` if ``inner`` is not a transformation but, for example, the function that makes one."""
    if not isinstance(inner, optax.GradientTransformation):
        name = callable(inner) and getattr(inner, "__name__", "")
        fix = f"Call it first: {name}(learning_rate)." if name else "For example optax.adamw(1e-3)."
        raise TypeError(f"{argument}: expected an optax.GradientTransformation, got {inner!r}. {fix}")


def check_transformation(tx: Any, call: str) -> None:
    """Raise ``TypeError`` if ``tx`` is not a transformation but, for example, the parameters."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        what = f"got a {type(tx).__name__}. The order of arguments is {call}."
        raise TypeError(f"tx: expected an optax.GradientTransformation, {what}")


AROUND = (
    "tx: optax.MultiSteps is around an offload(...). It chooses between the old and the new state in every call, so "
    "the whole state would be copied between memories at once. Fix: jo.offload(optax.MultiSteps(optimizer, k))."
)


def check_not_in_multi_steps(tx: Any, state: Any) -> None:
    """Raise ``ValueError`` if an ``offload`` inside a ``MultiSteps`` keeps the state on the host."""
    around = isinstance(getattr(tx.update, "__self__", None), optax.MultiSteps)
    if around and any(on_host(x) or is_on_disk(x) for x in jax.tree.leaves(state, is_leaf=is_on_disk)):
        raise ValueError(AROUND)


# ---- checks of parameters, gradients and states: each is the tree that was expected, or an error says how it differs


def check_params(params: Any) -> None:
    """Raise ``ValueError`` for a state in the parameters' place, and ``TypeError`` for a leaf that is not an array."""
    check_no_state("params", params, "Give the tree that the model computes with, as in tx.init(params).")
    for path, x in leaves_with_paths(params):
        if not isinstance(x, Number) and not any(hasattr(x, name) for name in ("shape", "__jax_array__")):
            what = f"{keystr(path)} is a {type(x).__name__}" if path else f"got {x!r}"
            raise TypeError(
                f"params: expected arrays, or values with shape and dtype; {what}. Leave out the leaves that receive "
                "no gradient."
            )


def check_no_state(argument: str, tree: Any, fix: str = "") -> None:
    """Raise ``ValueError`` for an optimizer's state in the place of the parameters, or of gradients like them."""
    order = "The order is tx.update(updates, state, params), and jo.update_params(tx, grads, state, params)."
    for path, x in tree_flatten_with_path(tree, is_leaf=is_state)[0]:
        if is_state(x):
            where = f" in {keystr(path)}" if path else ""
            raise ValueError(
                f"{argument}: expected the parameters, or a tree like them, and there is an optimizer's state{where}, "
                f"a {type(x).__name__}. {fix or order}"
            )


def is_state(x: Any) -> bool:
    """Return whether ``x`` is a state of optax or of this package; optax names its trees of parameters otherwise."""
    kind = type(x)
    known = kind.__module__.partition(".")[0] in ("optax", "jax_offload")
    return known and isinstance(x, tuple) and kind.__name__.endswith(("State", "ApplyEvery", "WeightDecaySchedule"))


def check_gradients(updates: Any, params: Any, cause: Exception | None = None) -> None:
    """Raise ``ValueError`` for a gradient of another shape than its parameter; after a failure also for other trees."""
    if params is None:
        return
    names, given = (names_of([path for path, _ in leaves_with_paths(tree)]) for tree in (params, updates))
    if jax.tree.structure(updates) == jax.tree.structure(params):
        for name, p, g in zip(names, jax.tree.leaves(params), jax.tree.leaves(updates), strict=True):
            # one with more axes belongs to single examples, which optax.contrib.dpsgd takes
            if np.shape(g) != np.shape(p) and np.ndim(g) <= np.ndim(p):
                raise ValueError(
                    f"updates: the gradient of {name or 'params'} has the shape {np.shape(g)}, and the parameter "
                    f"{np.shape(p)}. Give gradients of the parameters that are given: jax.grad of a function of params."
                )
    elif cause is not None and {*given} != {*names}:
        missing, more = (", ".join(sorted(x)[:5]) or "none" for x in ({*names} - {*given}, {*given} - {*names}))
        raise ValueError(
            f"updates: their tree differs from the parameters'; without a gradient: {missing}; without a parameter: "
            f"{more}. Give the gradients of these parameters: jax.grad of a function of params."
        ) from cause


def check_on_device(updates: Any, params: Any, why: str, state: Any = None) -> None:
    """Raise ``ValueError`` if parameters, gradients or a state are in host memory; ``why`` says why they cannot be."""
    for argument, tree in (("params", params), ("updates", updates), ("state", state)):
        if hosted := _hosted(tree):
            raise ValueError(
                f"{argument}: {hosted[0] or 'the array'} is in pinned host memory, and {why}. Fix: move them "
                f"inside the step, {argument} = jo.to_device({argument}), or keep them on the device."
            )


def check_managed(state: Any, cause: Exception) -> None:
    """Raise ``ValueError`` if an update failed because no ``offload`` loads a state leaf from host memory."""
    if "memory_space" in str(cause) and (hosted := _hosted(state)):
        raise ValueError(
            f"state: {len(hosted)} leaves are in pinned host memory, the first is {hosted[0]}, and no offload(...) in "
            "tx loads all of them. Fix: state = jo.to_host(tx, state), which moves each leaf to where tx keeps it."
        ) from cause


def _hosted(tree: Any) -> list[str]:
    return [keystr(path) for path, x in leaves_with_paths(tree) if on_host(x)]


def check_state(init: Callable[[Any], Any], state: Any, like: Any, cause: Exception | None = None) -> None:
    """Raise ``ValueError`` if the state's tree or a leaf's shape is not the one that ``init`` gives."""
    try:
        expected = jax.eval_shape(lambda like: init(memory.loaded(like)), like)
    except Exception:  # init cannot run on these parameters: the original error says more
        return
    check_like(state, expected, "state = tx.init(params) makes one for these.", cause)


def check_shapes(init: Callable[[Any], Any], state: Any, like: Any, new: Any, updates: Any) -> None:
    """Raise ``ValueError`` if an update changes shapes because its state is not the one that ``init`` gives."""

    def shapes(tree: Any) -> tuple[Any, list[Any]]:
        return jax.tree.structure(tree), [*map(np.shape, jax.tree.leaves(tree))]

    same_tree = jax.tree.structure(updates) == jax.tree.structure(like)  # without gradients the updates may be None
    if shapes(new) != shapes(state) or (same_tree and shapes(updates) != shapes(like)):
        check_state(init, state, like)


def check_like(state: Any, expected: Any, fix: str, cause: Exception | None = None, *, dtypes: bool = False) -> None:
    """Raise ``ValueError`` if a state has another tree, or a leaf of another shape or dtype, than is expected."""
    flat, tree = tree_flatten_with_path(state, is_leaf=is_on_disk)
    if tree != jax.tree.structure(expected):
        raise ValueError(
            "state: its tree is not the one that this optimizer's init gives; was it made by another optimizer, or "
            f"for other parameters? {fix}\n  got      {tree}\n  expected {jax.tree.structure(expected)}"
        ) from cause

    def type_of(x: Any) -> str:
        return f"{np.shape(x)}" + (f" and dtype {getattr(x, 'dtype', None)}" if dtypes else "")

    for (path, x), wanted in zip(flat, jax.tree.leaves(expected), strict=True):
        if type_of(x) != type_of(wanted):
            raise ValueError(
                f"state: {keystr(path)} has the shape {type_of(x)}, and this optimizer's init gives {type_of(wanted)}; "
                f"was it made for other parameters? {fix}"
            ) from cause


def arrived(home: Home, leaves: Sequence[Any], plan: Sequence[Leaf]) -> None:
    """Warn if a state arrives at an ``update`` in device memory, unless it is resident and was never on the host."""
    home.updates()
    at_home = [(x, leaf) for x, leaf in zip(leaves, plan, strict=True) if leaf.host and isinstance(x, jax.Array)]
    away = [(x, leaf) for x, leaf in at_home if not on_host(x)]
    if facts().runs and at_home and not away:
        home.reached = True
    elif facts().runs and away and (home.reached or any(was_on_host(x) for x, _ in away)):
        home.tell(
            f"offload(): {len(away)} leaves of the optimizer state ({sum(leaf.nbytes for _, leaf in away)} bytes, the "
            f"first is {away[0][1].path}) were in host memory and arrive at update in device memory: something between "
            "has moved them. Trainers do with jax.lax.with_sharding_constraint or jax.device_put and shardings that "
            "name no memory (Tunix's PeftTrainer before its first step under `with mesh:`; MaxText in the step itself),"
            " restores without a target do, pickle and NumPy do. This update puts them back, but until it has, all of "
            "them are on the device; if they are moved at every step, nothing is gained. Fix: leave out the move, or "
            "jax_offload.to_host(tx, state) after it, or move with the shardings of jax_offload.abstract_state(tx, "
            "params). See docs/trainers.md."
        )


def check_eager(params: Any, rows: Sequence[Leaf], leaves: Sequence[Any]) -> None:
    """Check what only concrete parameters tell: whether the platform can hold the state, and if they are committed."""
    state = [x for leaf, x in zip(rows, leaves, strict=True) if leaf.host]
    if not state and not any(leaf.disk for leaf in rows):
        return
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    devices = {d for x in arrays for d in x.sharding.addressable_devices}
    memory.check_platform(devices)
    memory.check_host_pool(state, next(iter(devices)).platform if devices else jax.default_backend())
    if any(x.dtype.itemsize == 1 for x in state) and any(d.platform == "tpu" for d in devices):
        warnings.warn(
            "storage: on a TPU XLA copies an 8-bit leaf that streams in chunks as a whole, at every chunk. "
            "bfloat16 and float16 stream as they should (docs/precision.md).",
            stacklevel=3,
        )
    loose = [(path, x) for path, x in leaves_with_paths(params) if not getattr(x, "committed", False)]
    if loose and not memory.mesh_is_set():
        path, first = loose[0]
        what = "" if isinstance(first, jax.Array) else ", a NumPy array"
        warnings.warn(
            "offload(): the parameters are not committed to a device (the first is "
            f"{keystr(path) or 'params itself'}{what}). jax commits whatever a step with host memory returns, so the "
            "second step would compile again. Fix: params = jax.device_put(params, jax.devices()[0]) (or a "
            "NamedSharding) before init, or jax.set_mesh.",
            stacklevel=3,
        )
