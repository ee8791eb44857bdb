"""Cut a step at its update and put the parts together the other way round: the programs behind ``pipelined``."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, Sharding
from jax.tree_util import keystr, tree_flatten_with_path

from jax_offload._disk.leaves import is_on_disk
from jax_offload._emit.region import Update, holds_update, is_update
from jax_offload._emit.run import prefetch, write_back
from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import MATMULS, Equation, Var, holds, located, typed_as, values_of, variables
from jax_offload._program.memory import (
    DEVICE_KIND,
    HOST_KIND,
    HostStruct,
    abstract,
    constrained,
    is_host_aval,
    on_host,
    same_sharding,
    sharding_of,
    shards_of,
    to_device,
    to_host,
    typed_sharding,
    with_kind,
)
from jax_offload._program.primitives import ELEMENTWISE
from jax_offload._program.program import Builder, Program, flat, is_load
from jax_offload._program.propagate import Mask, forward, needed_for, union
from jax_offload._program.slices import is_summary
from jax_offload._rewrite.canonical import dereferenced, moving_whole_stacks
from jax_offload._rewrite.inlined import UPDATED, consisting_of, equation_of, localised, origins_of
from jax_offload._rewrite.parts import Cut, computed_again, cut_step
from jax_offload._rewrite.rewritten import check_program, tell, unreturned
from jax_offload._step.jit import Jitted

Values = dict[str, Any]
Kept = tuple[Values, Values, Values]
"""The values that wait for the update: carried arguments, values made for it, and the step's other arguments.

The first two are donated. The last are the caller's, such as a learning rate, and may be given again.
"""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Types:
    """The types of the carried arguments, with shardings, which a trace does not tell."""

    tree: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, carried: Any) -> Types:
        leaves, tree = jax.tree.flatten(carried)
        return cls(tree, tuple(map(_abstract, leaves)))

    @property
    def carried(self) -> Any:
        return jax.tree.unflatten(self.tree, self.leaves)

    @property
    def places(self) -> list[NamedSharding | None]:
        """The shardings of their next values: their own, or the next call would be another program. With Auto axes XLA
        may leave new parameters divided as the state that they were made with (ZeRO-1)."""
        found = (x.sharding for x in self.leaves)
        return [s if isinstance(s, NamedSharding) and s.num_devices > 1 else None for s in found]


@jax.tree_util.register_static
class Rotated:
    """A step, turned around for arguments of some types. jax hands it on as a part of a result's structure.

    Attributes:
      types: of the carried arguments.
      train: the late part of this step, then the first part of the next one, which is the same step if the types are.
        It takes the kept values, the leaves of the other arguments by name, and static arguments; it returns the values
        kept for the next update, the late results, the results of the next step known now, and that step.
      finish: the late part alone: the leaves of the carried arguments, and the late results. The values kept for the
        update are not donated, because no next value could take their buffers.
      look: a carried argument after the update, by its place, or an attribute of it. Nothing is donated.
    """

    def __init__(
        self,
        traced: jax.stages.Traced,
        types: Types,
        names: Sequence[str],
        following: Callable[..., Rotated],
        *,
        statics: int,
        gradients_on_host: bool,
    ) -> None:
        """Turn a step around.

        Args:
          traced: the step, of its carried arguments and of the others by name.
          types: of its carried arguments.
          names: of its carried arguments.
          following: the step for carried arguments of these types, for others by name, and for static arguments.
          statics: how many static arguments it has.
          gradients_on_host: whether its gradients wait for the update in host memory.
        """
        self._types = traced.jaxpr.out_avals
        self.types, leaves, carried = types, types.leaves, dict(zip(names, types.carried, strict=True))
        program = moving_whole_stacks(dereferenced(flat(traced.jaxpr, any_jit=True), any_jit=True))
        inputs = program.inputs[len(program.consts) :]
        own, given = inputs[: len(leaves)], inputs[len(leaves) :]
        owners = [name for name, x in carried.items() for _ in jax.tree.leaves(x)]

        def origins(bits: Mapping[str, int]) -> list[int]:
            return origins_of(program, {v: bits.get(name, 0) for v, name in zip(own, owners, strict=True)})

        places, self._others = matched(carried, traced.out_info, origins)
        arrays = dict(zip(own, leaves, strict=True))
        program = waiting_on_host(program, arrays) if gradients_on_host else program
        self._cut = cut = cut_step(program)
        if (model := _model_in_update(cut, own, given)) is not None:
            raise ValueError(f"step: {located(_MODEL, model)}. {_TAKE_FIRST}")
        self._results = [program.outputs[k] for k in places]
        moved = [k for k, v in enumerate(own) if is_host_aval(self._results[k].aval) and not is_host_aval(v.aval)]
        if moved:
            raise ValueError(
                f"{names_of(carried)[moved[0]]}: {len(moved)} carried arrays arrive in device memory, this one first, "
                "and the step returns them in host memory. Fix: move the state with jax_offload.to_host(tx, state), or "
                "restore or describe it with the shardings of jax_offload.abstract_state(tx, params)."
            )
        after_gradients = {v for part in (cut.update, cut.after) for v in part.outputs}
        if after_gradients.isdisjoint(variables(self._results)):
            raise ValueError(
                f"step: returns {', '.join(carried)} as they were, or without the update's results; return new ones."
            )
        if (lost := unreturned(program)) is not None:
            raise ValueError(f"step: cannot be turned round, as {lost.why}. Return new {', '.join(carried)}.")
        beside = [k for k in range(len(program.outputs)) if k not in {*places}]
        self._late = [k for k in beside if {*variables([program.outputs[k]])} & after_gradients]
        self._now = [k for k in beside if k not in self._late]

        read = [v for part in (cut.update, cut.after) for v in part.inputs] + variables(self._results)
        known = {*program.inputs[: len(program.consts)]} | after_gradients
        kept = {v for v in read if v not in known}
        # a parameter waits in host memory, and not what the passes have loaded of it
        loads = {eqn.outvars[0]: eqn.invars[0] for eqn in cut.program.eqns if is_load(eqn)}
        self._loads = {v: x for v in kept if (x := loads.get(v)) in own}
        kept = (kept | {*self._loads.values()}) - self._loads.keys()
        produced = [v for v in dict.fromkeys(read) if v in kept and v not in {*inputs}]
        # An argument that nothing late reads keeps its place, so that places do not depend on the step.
        self._own = dict(zip(names_of(carried), own, strict=True))
        self._keys = (
            {v: name for name, v in self._own.items() if v in kept},
            {v: f"{k:04d}" for k, v in enumerate(produced)},
            {v: f"{k:04d}" for k, v in enumerate(given) if v in kept},
        )
        self._like = {v: like_state(v, arrays) for v in produced}

        def train(carry: Values, produced: Values, given: Values, rest: Values, *static: Any) -> Any:
            leaves, late = self._after(carry, produced, given)
            next_step = following(types, rest, static)
            produced, given, now = next_step.before(leaves, jax.tree.leaves(rest))
            return (next_step.own(leaves), produced, given), late, now, next_step

        after = dict(zip(self._own, types.places, strict=True))
        where = {"donate_argnums": (0, 1), "out_shardings": ((after, None, None), None, None, None)}
        self.train = Jitted(train, {"static_argnums": range(4, 4 + statics), **where})
        self.finish = Jitted(self._after, {"donate_argnums": 0, "out_shardings": (types.places, None)})
        self.look = Jitted(self._current, {"static_argnums": (3, 4)})

    def own(self, leaves: Sequence[Any]) -> Values:
        """The carried arguments that wait."""
        return {name: x if v in self._keys[0] else None for (name, v), x in zip(self._own.items(), leaves, strict=True)}

    def before(self, leaves: Sequence[Any], arrays: Sequence[Any]) -> tuple[Values, Values, Any]:
        """Run the part before the update; return the other values that wait for it, and the results known now."""
        program = self._cut.program
        env = dict(zip(program.inputs, [*program.consts, *leaves, *arrays], strict=True))
        _run(self._cut.before, env)
        env |= {v: constrained(env[v], home_of(v, like)) for v, like in self._like.items()}
        produced, given = ({name: env[v] for v, name in keys.items()} for keys in self._keys[1:])
        return produced, given, self._aux(env, self._now)

    def kept(self, leaves: Sequence[Any], arrays: Sequence[Any]) -> Kept:
        """The types of the values that a call keeps. Gradients are divided like their state or parameter."""
        produced, _, _ = jax.eval_shape(self.before, leaves, arrays)
        given = dict(zip(self._cut.program.inputs[len(self._cut.program.inputs) - len(arrays) :], arrays, strict=True))
        # otherwise like the arrays on the host, if those are on one device
        alone = (s for x in leaves if (s := getattr(x, "sharding", None)) and s.memory_kind == HOST_KIND)
        alone = next((s for s in alone if s.num_devices == 1), None)

        def placed(v: Var, x: Any) -> Any:
            sharding = self._like[v] or (alone if is_host_aval(v.aval) else None)
            if isinstance(sharding, NamedSharding) and (typed := typed_sharding(x)) is not None:
                sharding = sharding.update(spec=typed.spec)
            kind = HOST_KIND if is_host_aval(v.aval) else DEVICE_KIND
            return abstract(x.shape, x.dtype, sharding and with_kind(sharding, kind), x.weak_type)

        produced = {name: placed(v, produced[name]) for v, name in self._keys[1].items()}
        return self.own(leaves), produced, {name: given[v] for v, name in self._keys[2].items()}

    def _aux(self, env: Mapping[Var, Any], places: Sequence[int]) -> Any:
        """The results that are not carried on, with ``None`` for those not among ``places``."""
        values = values_of(env, [self._cut.program.outputs[k] for k in places])
        values = typed_as([self._types[k] for k in places], values)
        return jax.tree.map(dict(zip(places, values, strict=True)).get, self._others)

    def _after(self, *kept: Values) -> tuple[list[Any], Any]:
        program = self._cut.program
        env = dict(zip(program.inputs[: len(program.consts)], program.consts, strict=True))
        for keys, values in zip(self._keys, kept, strict=True):
            env |= {v: values[name] for v, name in keys.items()}
        env |= {v: jax.device_put(env[x], jax.memory.Space.Device) for v, x in self._loads.items()}
        _run(self._cut.update, env)
        _run(self._cut.after, env)
        return values_of(env, self._results), self._aux(env, self._late)

    def _current(self, own: Values, produced: Values, given: Values, place: int, attribute: str | None) -> Any:
        leaves = map(constrained, self._after(own, produced, given)[0], self.types.places)
        result = jax.tree.unflatten(self.types.tree, leaves)[place]
        return result if attribute is None else getattr(result, attribute)


def _abstract(x: Any) -> Any:
    """The type of a carried value in a trace, with its memory, although a tracer tells no sharding."""
    aval, sharding, weak = jax.typeof(x), sharding_of(x), getattr(x, "weak_type", False)
    if on_host(x) or isinstance(x, HostStruct):
        return HostStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)
    return abstract(aval.shape, aval.dtype, sharding, weak)


def _model_in_update(cut: Cut, own: Sequence[Var], given: Sequence[Var]) -> Equation | None:
    """Return an equation of the updates' part that runs the model, if there is one: it multiplies matrices, with arrays
    that are made of the batch alone.

    Args:
      cut: the step.
      own: its carried leaves.
      given: its other arguments.
    """
    batch, others = {*given}, {*own}
    for eqn in cut.program.eqns:
        ins = {*variables(eqn.invars)}
        (batch if ins & batch and not ins & others else others).update(eqn.outvars)
    found = {v for v in cut.update.inputs if v in batch and v.aval.ndim}
    for eqn in cut.update.jaxpr.eqns:
        if not found.isdisjoint(variables(eqn.invars)):
            if _multiplies(eqn):
                return eqn
            found.update(eqn.outvars)
    return None


_MODEL = (
    "its update runs the model again, in a line search, for gradients that are taken after another update, or in one "
    "loop, branch or jax.checkpoint with the first passes"
)
_TAKE_FIRST = (
    "pipelined runs all updates of a step together, in the next call, where this batch is gone. Fix: take all "
    "gradients before the first update, and outside of what holds it; or jax_offload.jit, which runs the step as "
    "written."
)


def _multiplies(eqn: Equation) -> bool:
    def multiplies(each: Equation) -> bool:
        inside = is_update(each) and any(map(_multiplies, each.params["update"].program.eqns))
        return inside or each.primitive.name in MATMULS

    return holds(eqn, multiplies)


def _run(part: Any, env: dict[Var, Any]) -> None:
    env.update(zip(part.outputs, part.run(*(env[v] for v in part.inputs)), strict=True))


class Aux(NamedTuple):
    """The results of a pipelined step besides the carried values.

    Attributes:
      now: the results for this call's batch, such as a loss, with ``None`` in place of those that need the new
        parameters.
      late: the results that need the new parameters, for the batch of the call before, with ``None`` in place of the
        others; ``None`` from the first call.
      step: the number of this call's batch, from 0. ``late`` belongs to ``step - 1``.
    """

    now: Any
    late: Any
    step: int


class Carry:
    """The pytree that one call of a pipelined step hands to the next: arguments with their pending update.

    Do not change it: its parameters are not the current ones. ``jax_offload.save_args(carry)`` saves it, and
    ``jax_offload.restore(manager, like)`` restores it, where ``like`` is a carry that another call of the same step
    returned. The results of ``finish`` do not depend on a step and make a better checkpoint.
    """

    def __init__(self, kept: Kept, step: Any, program: Rotated) -> None:
        self.kept, self.step, self.program, self.used = kept, step, program, False

    def __getitem__(self, _: Any) -> Any:  # which Python calls for ``params, state = carry``, too
        raise TypeError("carry: holds a pending update. Fix: params, state = train.finish(carry), which completes it.")


_ATTRIBUTES = jax.tree_util.GetAttrKey("kept"), jax.tree_util.GetAttrKey("step")
jax.tree_util.register_pytree_with_keys(
    Carry,
    lambda carry: (tuple(zip(_ATTRIBUTES, (carry.kept, carry.step), strict=True)), carry.program),
    lambda program, children: Carry(*children, program),  # pyright: ignore[reportCallIssue, reportArgumentType]
)


# ---- match results with the carried arguments that they replace

Origins = Callable[[Mapping[str, Mask]], Sequence[Mask]]
"""Map bits for the carried arguments to the bits on which each leaf of the result depends (``origins_of``)."""

_FIX = "Return a dict with the carried arguments' names as keys."


def matched(carried: Mapping[str, Any], result: Any, origins: Origins) -> tuple[list[int], Any]:
    """Return the numbers of the result's leaves that are next values of carried ones, and the tree of the others.

    A result is one of several if they are returned as a tuple or list, or as a dict or named tuple whose keys include
    the names of all carried arguments. These names decide. Else the next value of an argument is the only result of its
    type. Several results of one type are told apart by their origins: the next value is made by an update, and of
    no other carried argument of that type; or it is the last result for the last argument. They must be in the
    arguments' order: in another order, a step may also let two networks take turns.

    Raises:
      ValueError: an argument has no next value among the results, or it is not certain which one that is.
    """
    types = {name: types_of(x) for name, x in carried.items()}
    children = tree_flatten_with_path(result, is_leaf=lambda x: x is not result)[0]
    names = [keystr(path, simple=True) for path, _ in children]
    alone, named = types_of(result) in types.values(), {*names} >= carried.keys()
    results = [x for _, x in children] if not alone and (named or type(result) in (tuple, list)) else [result]
    ends = [0, *itertools.accumulate(len(jax.tree.leaves(x)) for x in results)]
    numbers = [range(*each) for each in itertools.pairwise(ends)]
    place_of: dict[str, int] = {}
    for name, want in types.items():
        if named and not alone:
            place_of[name] = names.index(name)
            if types_of(results[place_of[name]]) != want:
                raise ValueError(
                    f"step: its result {name!r} differs from the carried argument in tree, shapes or dtypes."
                )
        elif name not in place_of:
            alike = [other for other, each in types.items() if each == want]
            place_of |= _told_apart(
                alike, {k: numbers[k] for k, x in enumerate(results) if types_of(x) == want}, origins
            )
    places = [n for name in carried for n in numbers[place_of[name]]]
    left = {k: jax.tree.unflatten(jax.tree.structure(x), numbers[k]) for k, x in enumerate(results)}
    left = {k: x for k, x in left.items() if k not in place_of.values()}
    if named and not alone:
        return places, {names[k]: x for k, x in left.items()}
    return places, next(iter(left.values())) if len(left) == 1 else tuple(left.values())


def _told_apart(names: Sequence[str], results: Mapping[int, range], origins: Origins) -> dict[str, int]:
    """The result that is the next value of each of some carried arguments that are alike.

    Args:
      names: the arguments.
      results: the results of their type, each with the numbers of its leaves.
    """
    what = " and ".join(map(repr, names))
    if len(results) < len(names):
        raise ValueError(
            f"step: {len(results) or 'no'} result{'s have' if len(results) > 1 else ' has'} the tree, shapes and "
            f"dtypes of the carried argument{'s' * (len(names) > 1)} {what}; return the next value of each."
        )
    left, found = {*results}, dict[str, int]()
    if len(results) > 1:
        bits = {name: UPDATED << (k + 1) for k, name in enumerate(names)}
        made, any_of_them = origins(bits), union(bits.values())
        masks = {k: [made[n] for n in numbers] for k, numbers in results.items()}
        for name, bit in bits.items():
            continued = {k: any(mask & UPDATED and mask & bit for mask in each) for k, each in masks.items()}
            own = [k for k, each in masks.items() if continued[k] and union(each) & any_of_them == bit]
            if len(own) == 1:
                found[name] = own[0]
                left -= {*own}
    unknown = [name for name in names if name not in found]
    if len(unknown) == len(left) == 1:
        found, unknown = found | {unknown[0]: next(iter(left))}, []
    if unknown:
        raise ValueError(
            f"step: {len(left)} results have the tree, shapes and dtypes of the carried argument"
            f"{'s' * (len(unknown) > 1)} {' and '.join(map(repr, unknown))}, and the update does not tell which "
            f"argument each result replaces. {_FIX}"
        )
    if (returned := sorted(names, key=found.__getitem__)) != [*names]:  # perhaps two networks take turns
        raise ValueError(
            f"step: the carried arguments {what} have the same tree, shapes and dtypes, and by the update the step "
            f"returns them as {' and '.join(map(repr, returned))}. {_FIX} Or return them in the order of the arguments."
        )
    return found


def types_of(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_on_disk)  # which has the leaf's type, and not its token's
    return treedef, [(tuple(x.shape), x.dtype) for x in map(array_of, leaves)]


def array_of(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def names_of(tree: Mapping[str, Any]) -> list[str]:
    """A name for each leaf, no two alike."""
    names = [
        "/".join([name, *([inner] if (inner := jax.tree_util.keystr(path, simple=True, separator="/")) else [])])
        for name, x in tree.items()
        for path, _ in jax.tree_util.tree_flatten_with_path(x)[0]
    ]
    return [name if names.index(name) == k else f"{name} {k}" for k, name in enumerate(names)]


# ---- gradients that wait in host memory for their update: ``pipelined(..., gradients="host")``
#
# The gradients of a step that is turned round live from one call to the next. In host memory they take no device
# memory meanwhile: the backward pass stores them as it makes them, and the update loads each beside its state. So
# numbers that need all of them (their norm) are computed before they leave, and arithmetic with such numbers
# (clipping) moves into the update.


class CannotWait(ValueError):
    """Gradients cannot wait in host memory for their update."""


_HOST, _GRADIENT = 1, 2  # bits for the needs of an update's equations
LEAST = 2**16  # bytes, as of a leaf of the state
_LATE = (ELEMENTWISE | {"broadcast_in_dim"}) - {"sharding_constraint", "reshard", "optimization_barrier", "device_put"}


def like_state(v: Var, carried: Mapping[Var, Any]) -> Sharding | None:
    """The sharding of a value's state: of the carried array of its shape in the most parts. ``None`` if nothing tells,
    or if two arrays of that shape are divided in different ways."""
    alike = [x.sharding for x in carried.values() if x.shape == v.aval.shape and x.sharding is not None]
    parts = [math.prod(shards_of(s, v.aval.shape)) for s in alike]
    most = [s for s, n in zip(alike, parts, strict=True) if n == max(parts)]
    return most[0] if most and all(same_sharding(s, most[0]) for s in most) else None


def home_of(v: Var, like: Sharding | None) -> NamedSharding | None:
    """How a waiting value is to be divided between devices: ``like`` its state.

    XLA by itself would let the gradients of divided parameters wait whole on every device. ``None`` if the type tells
    the sharding, or if nothing is divided.
    """
    if not _is_large(v) or typed_sharding(v.aval) is not None or not isinstance(like, NamedSharding):
        return None
    if {*like.mesh.axis_types} != {AxisType.Auto} or math.prod(shards_of(like, v.aval.shape)) == 1:
        return None
    return like.with_memory_kind(DEVICE_KIND)


def waiting_on_host(program: Program, carried: Mapping[Var, Any]) -> Program:
    """Return a step's program with gradients of 64 KiB and more waiting for their update in host memory.

    Args:
      program: a step's program, with every ``jit`` inlined.
      carried: the inputs that wait anyway -> their types.

    Raises:
      CannotWait: the step's update cannot load them.
    """
    try:
        found = _on_host(program, carried)
        check_program(found)
    except CannotWait:
        raise
    except Exception as fault:
        tell("gradients wait on the device", fault)
        return program
    return found


def _on_host(program: Program, carried: Mapping[Var, Any]) -> Program:
    inside = [eqn.primitive.name for eqn in program.eqns if not is_update(eqn) and holds_update(eqn)]
    if inside:
        raise CannotWait(
            f"gradients='host': the step's update runs in a {inside[0]}, where it cannot load them. Use "
            "gradients='device'."
        )
    for number in range(sum(map(is_update, program.eqns))):
        program = _of_update(program, number, carried)
    return program


def _of_update(program: Program, number: int, carried: Mapping[Var, Any]) -> Program:
    """Let the gradients of one update wait in host memory. ``number``: its place among the program's updates."""
    at = [k for k, eqn in enumerate(program.eqns) if is_update(eqn)][number]
    before = program.eqns[:at]
    update = localised(program.eqns[at])
    gradients = {*update.gradients}
    defined = [v for each in before for v in each.outvars]
    arithmetic = [each for each in before if each.primitive.name in _LATE]
    late, sources = computed_again(gradients & {*filter(_is_large, defined)}, {*carried}, arithmetic)
    moved = [v for v in defined if v in sources and _is_large(v)]
    if not moved:
        raise CannotWait(
            f"gradients='host': none that the update reads is a float array of {LEAST >> 10} KiB or more. "
            "Use gradients='device'."
        )
    ahead, scalars = _ahead(update, gradients)
    storing, inside, stored = Builder(), Builder(), dict[Var, Var]()
    for k, v in enumerate(moved):
        name, home = f"gradients/{k}", home_of(v, like_state(v, carried))
        with write_back(v, {v: name}):
            (x,) = variables(storing.run(lambda x, home=home: to_host(constrained(x, home)), v))
        with prefetch(x, {x: name}):
            (inside.names[v],) = inside.run(to_device, x)
        stored[v] = x
    for each in (*late, *(each for each in update.program.eqns if scalars.isdisjoint(each.outvars))):
        inside.put(each)
    made = {*variables(update.program.outputs)} - scalars
    rest, last = consisting_of(update, inside.eqns, made), 1 + max(update.rank.values(), default=0)
    divided = {x: update.program.shards[v] for v, x in stored.items() if v in update.program.shards}
    rest = dataclasses.replace(
        rest,
        program=dataclasses.replace(rest.program, shards={**rest.program.shards, **divided}),
        backward=None,  # they are no longer in front of it
        names={**update.names, **{x: f"gradients/{k}" for k, x in enumerate(stored.values())}},
        rank={**update.rank, **{x: last + k for k, x in enumerate(stored.values())}},  # the state decides the order
    )
    eqns = [*before, *ahead, *storing.eqns, equation_of(rest, program.eqns[at]), *program.eqns[at + 1 :]]
    return dataclasses.replace(program, eqns=eqns)


def _is_large(v: Var) -> bool:
    return nbytes(v.aval) >= LEAST and jnp.issubdtype(v.aval.dtype, jnp.floating) and not is_host_aval(v.aval)


def _ahead(update: Update, gradients: Set[Var]) -> tuple[list[Equation], set[Var]]:
    """The equations of a localised update that make numbers from gradients and no state, and these numbers."""
    needs: dict[Var, Mask] = {v: _HOST for v in update.operands if is_host_aval(v.aval)}
    needs |= dict.fromkeys(gradients, _GRADIENT)
    summaries, scalars = set[Var](), set[Var]()
    for eqn in update.program.eqns:
        if is_summary(eqn, summaries):
            summaries.update(eqn.outvars)
        needs.update(zip(eqn.outvars, forward(eqn, needs), strict=True))
        if all(needs[v] == _GRADIENT and (not v.aval.shape or v in summaries) for v in eqn.outvars):
            scalars.update(eqn.outvars)
    taken, _ = needed_for(update.program.eqns, scalars)
    if any(eqn.effects for eqn in taken):
        return [], set()
    # under new names, because the update makes the numbers in between again
    return Builder().copy(*taken, results={v: v for v in scalars}), scalars
