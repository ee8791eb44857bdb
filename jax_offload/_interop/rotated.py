"""Cut a step at its update and put the parts together the other way round: the programs behind ``pipelined``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jax_offload._base.arrays import is_array
from jax_offload._base.jaxprs import MATMULS, Equation, Var, holds, values_of, variables
from jax_offload._base.memory import HOST_KIND, abstract, in_its_memory, is_host_aval, with_kind
from jax_offload._base.on_disk import is_on_disk
from jax_offload._base.shardings import constrained, typed_sharding
from jax_offload._emit.find import holds_update, is_update
from jax_offload._interop import pending
from jax_offload._interop.jit import Jitted
from jax_offload._ir.primitives import CHECKPOINT
from jax_offload._ir.program import flat
from jax_offload._ir.propagate import Mask, made_of, needed_for, union
from jax_offload._step.canonical import dereferenced
from jax_offload._step.cut import Cut, cut_step
from jax_offload._step.loaded import traced_step
from jax_offload._step.returned import UPDATED, origins_of, unreturned

Values = dict[str, Any]
Kept = tuple[Values, Values, Values]
"""The values that wait for the update: carried arguments, values made for it, and the step's other arguments.

The first two are donated. The last are the caller's, such as a learning rate, and may be given again.
"""


class Rotated:
    """A step, traced for arguments of some types.

    Attributes:
      carried: the carried arguments, as types.
      now, late: the numbers of the results that are not carried on and that need no update, and of those that do.
    """

    def __init__(
        self,
        step: Callable[[Mapping[str, Any]], Any],
        carried: Mapping[str, Any],
        rest: Mapping[str, Any],
        *,
        on_host: bool = False,
    ) -> None:
        """``step`` takes its arguments by name: ``carried``, and ``rest``, all of arrays.

        ``on_host``: whether its gradients wait for the update in host memory.
        """
        leaves, self._treedef = jax.tree.flatten(tuple(carried.values()))
        arrays, rest_tree = jax.tree.flatten(dict(rest))
        self.carried = jax.tree.unflatten(self._treedef, [_abstract(x) for x in leaves])

        def call(leaves: Sequence[Any], arrays: Sequence[Any]) -> Any:
            own = dict(zip(carried, jax.tree.unflatten(self._treedef, leaves), strict=True))
            return step(own | jax.tree.unflatten(rest_tree, arrays))

        closed, result_tree = traced_step(call, [in_its_memory(x) for x in leaves], arrays)
        program = dereferenced(flat(closed, any_jit=True), any_jit=True)
        inputs = program.inputs[len(program.consts) :]
        own, given = inputs[: len(leaves)], inputs[len(leaves) :]
        owners = [name for name, x in carried.items() for _ in jax.tree.leaves(x)]

        def origins(bits: Mapping[str, int]) -> list[int]:
            return origins_of(program, {v: bits.get(name, 0) for v, name in zip(own, owners, strict=True)})

        places, self._others = matched(carried, jax.tree.unflatten(result_tree, closed.out_avals), origins)
        program = pending.on_host(program, dict(zip(own, leaves, strict=True))) if on_host else program
        self._cut = cut = cut_step(program)
        if why := _model_in_update(cut, dict(zip(own, owners, strict=True)), given):
            raise ValueError(f"step: {why}.")
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
        self.late = [k for k in beside if {*variables([program.outputs[k]])} & after_gradients]
        self.now = [k for k in beside if k not in self.late]

        read = [v for part in (cut.update, cut.after) for v in part.inputs] + variables(self._results)
        known = {*program.inputs[: len(program.consts)]} | after_gradients
        kept = {v for v in read if v not in known}
        self._inputs = own
        names = names_of(carried)
        produced = [v for v in dict.fromkeys(read) if v in kept and v not in {*inputs}]
        self._keys = (
            {v: name for v, name in zip(own, names, strict=True) if v in kept},
            {v: f"{k:04d}" for k, v in enumerate(produced)},
            {v: f"{k:04d}" for k, v in enumerate(given) if v in kept},
        )
        homes = {v: pending.home_of(v, dict(zip(own, leaves, strict=True))) for v in produced}
        self._homes = {v: home for v, home in homes.items() if home is not None}
        self._places = [_place(x) for x in leaves]
        self._start = Jitted(self._before, {})
        self._finish = Jitted(self._after, {"donate_argnums": 0, "out_shardings": (self._places, None)})
        self._look = Jitted(self._current, {"static_argnums": (3, 4)})
        self._trains: dict[int, Jitted] = {}

    def start(self, leaves: Sequence[Any], rest: Mapping[str, Any]) -> tuple[Kept, list[Any]]:
        """Return the values kept for the update, and the results known now."""
        produced, given, now = self._start(leaves, jax.tree.leaves(dict(rest)))
        return (self._own(leaves), produced, given), now

    def train(self, following: Rotated, kept: Kept, rest: Mapping[str, Any]) -> tuple[Kept, list[Any], list[Any]]:
        """Run the late part of this step, then the first part of the next one, which is the same step if the types are.

        The values kept for the next update, the late results of this step, and the results of the next one known now.
        """
        return self.turned(following)(*kept, jax.tree.leaves(dict(rest)))

    def turned(self, following: Rotated) -> Jitted:
        """The step that ``train`` calls, a function of the kept values and of the other arguments' leaves."""
        if id(following) not in self._trains:
            places = (following._own(self._places), None, None), None, None
            how = {"donate_argnums": (0, 1), "out_shardings": places}
            self._trains[id(following)] = Jitted(self._train(following), how)
        return self._trains[id(following)]

    def _train(self, following: Rotated) -> Callable[..., Any]:
        def train(own: Values, produced: Values, given: Values, arrays: Sequence[Any]) -> Any:
            leaves, late = self._after(own, produced, given)
            produced, given, now = following._before(leaves, arrays)
            return (following._own(leaves), produced, given), late, now

        return train

    def _own(self, leaves: Sequence[Any]) -> Values:
        """The carried arguments that wait."""
        values = dict(zip(self._inputs, leaves, strict=True))
        return {name: values[v] for v, name in self._keys[0].items()}

    def kept(self, leaves: Sequence[Any], rest: Mapping[str, Any]) -> Kept:
        """The types of the values that a call keeps. Gradients are divided like their state, type or parameter."""
        arrays = jax.tree.leaves(dict(rest))
        values = dict(zip(self._cut.program.inputs[len(self._cut.program.consts) :], [*leaves, *arrays], strict=True))
        own, (produced, _, _) = self._own(leaves), jax.eval_shape(self._before, leaves, arrays)
        found = [(x, x.sharding) for x in reversed(leaves) if getattr(x, "sharding", None) is not None]
        places = {(x.shape, x.dtype): s for x, s in found if s.memory_kind != HOST_KIND}
        # where no sharding is given, like the arrays on the host, if those are on one device
        alone = next((s for _, s in found if s.memory_kind == HOST_KIND and s.num_devices == 1), None)
        hosts = {name for v, name in self._keys[1].items() if is_host_aval(v.aval)}
        homes = {name: self._homes[v] for v, name in self._keys[1].items() if v in self._homes}

        def placed(name: str, x: Any) -> Any:
            sharding = homes.get(name, places.get((x.shape, x.dtype), alone if name in hosts else None))
            if isinstance(sharding, NamedSharding) and (typed := typed_sharding(x)) is not None:
                sharding = sharding.update(spec=typed.spec)
            sharding = with_kind(sharding, HOST_KIND) if sharding is not None and name in hosts else sharding
            return abstract(x.shape, x.dtype, sharding, x.weak_type)

        given = {name: values[v] for v, name in self._keys[2].items()}
        return own, {name: placed(name, x) for name, x in produced.items()}, given

    def finish(self, kept: Kept) -> tuple[tuple[Any, ...], list[Any]]:
        """Return the carried arguments after the update, and the late results.

        The values kept for the update are not donated, because no next value could take their buffers.
        """
        leaves, late = self._finish(*kept)
        return jax.tree.unflatten(self._treedef, leaves), late

    def look(self, kept: Kept, place: int, attribute: str | None) -> Any:
        """Return a carried argument after the update, or an attribute of it. Nothing is donated."""
        return self._look(*kept, place, attribute)

    def aux(self, values: Sequence[Any], places: Sequence[int]) -> Any:
        """The results that are not carried on, with ``None`` for those not among ``places``."""
        return jax.tree.map(dict(zip(places, values, strict=True)).get, self._others)

    def _before(self, leaves: Sequence[Any], arrays: Sequence[Any]) -> tuple[Values, Values, list[Any]]:
        program = self._cut.program
        env = dict(zip(program.inputs, [*program.consts, *leaves, *arrays], strict=True))
        _run(self._cut, env, 0)
        env |= {v: constrained(env[v], home) for v, home in self._homes.items()}
        produced, given = ({name: env[v] for v, name in keys.items()} for keys in self._keys[1:])
        return produced, given, values_of(env, [program.outputs[k] for k in self.now])

    def _after(self, *kept: Values) -> tuple[list[Any], list[Any]]:
        program = self._cut.program
        env = dict(zip(program.inputs[: len(program.consts)], program.consts, strict=True))
        for keys, values in zip(self._keys, kept, strict=True):
            env |= {v: values[name] for v, name in keys.items()}
        _run(self._cut, env, 1)
        _run(self._cut, env, 2)
        return values_of(env, self._results), values_of(env, [program.outputs[k] for k in self.late])

    def _current(self, own: Values, produced: Values, given: Values, place: int, attribute: str | None) -> Any:
        leaves = map(constrained, self._after(own, produced, given)[0], self._places)
        result = jax.tree.unflatten(self._treedef, leaves)[place]
        return result if attribute is None else getattr(result, attribute)


def _abstract(x: Any) -> Any:
    sharding, weak = getattr(x, "sharding", None), getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)


def _place(x: Any) -> NamedSharding | None:
    """The sharding of a carried value's next value: its own, or the next call would be another program.

    With Auto axes XLA may leave new parameters divided as the state that they were made with (ZeRO-1).
    """
    place = getattr(x, "sharding", None)
    return place if isinstance(place, NamedSharding) and place.num_devices > 1 else None


def _model_in_update(cut: Cut, own: Mapping[Var, str], given: Sequence[Var]) -> str:
    """Why the part of a step with its updates runs the model: it multiplies matrices, and with arrays that are made of
    the batch alone. Empty where it does not.

    Args:
      cut: the step.
      own: its carried leaves -> the argument that each belongs to.
      given: its other arguments.
    """
    batch, others = {*given}, {*own}
    for eqn in cut.program.eqns:
        ins = {*variables(eqn.invars)}
        (batch if ins & batch and not ins & others else others).update(eqn.outvars)
    found = {v for v in cut.update.inputs if v in batch and v.aval.ndim}
    for eqn in cut.update.jaxpr.eqns:
        if not found.isdisjoint(variables(eqn.invars)):
            if holds_update(eqn) and _multiplies(eqn, in_updates=False):
                name = _WORDS.get(eqn.primitive.name, f"a {eqn.primitive.name}")
                return (
                    f"its update runs in {name} together with the passes through the model, and is not cut there; "
                    "call the update outside of it, or use jax_offload.jit"
                )
            if _multiplies(eqn):
                return _LINE_SEARCH if holds_update(eqn) else _between_updates(cut.update.jaxpr.eqns, eqn, own)
            found.update(eqn.outvars)
    return ""


_LINE_SEARCH = (
    "its update calls the loss again, as a line search does, and would need the batch after its turn; use "
    "jax_offload.jit"
)


def _between_updates(eqns: Sequence[Equation], model: Equation, own: Mapping[Var, str]) -> str:
    """Why a step is not turned round whose ``model`` runs on what one update makes, for the gradients of another."""
    (ahead, _), behind = needed_for(eqns, variables(model.invars)), made_of(eqns, lambda eqn: eqn is model)
    after = [eqn for eqn in eqns if not behind.isdisjoint(variables(eqn.invars))]

    def owner(eqns: Sequence[Equation]) -> str:
        reads = (v for eqn in eqns if holds_update(eqn) for v in variables(eqn.invars) if v in own)
        return " and ".join(dict.fromkeys(repr(own[v]) for v in sorted(reads, key=lambda v: not is_host_aval(v.aval))))

    return (
        f"the gradients for the update of {owner(after)} are taken after the update of {owner(ahead)}, at the values "
        "that it makes, as for two networks in turn; pipelined runs all updates of a step together, in the next call, "
        "where this batch is gone. Fix: take all gradients before the first update; or jax_offload.jit, which runs the "
        "step as written"
    )


_WORDS = {"scan": "a lax.scan", "while": "a lax.while_loop", "cond": "a lax.cond", "shard_map": "a jax.shard_map"}
_WORDS |= dict.fromkeys(CHECKPOINT, "a jax.checkpoint")


def _multiplies(eqn: Equation, *, in_updates: bool = True) -> bool:
    def multiplies(each: Equation) -> bool:
        inside = is_update(each) and in_updates and any(map(_multiplies, each.params["update"].program.eqns))
        return inside or each.primitive.name in MATMULS

    return holds(eqn, multiplies)


def _run(cut: Cut, env: dict[Var, Any], part: int) -> None:
    s = cut.parts[part]
    env.update(zip(s.outputs, s.run(*(env[v] for v in s.inputs)), strict=True))


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
    the names of all that is carried. These names decide. Else the next value of an argument is the only result of its
    tree, shapes and dtypes. Of several, it is the one that the step's update makes of this argument and of no other
    that is like it; where all but one are known by that, the last one belongs to the last argument.

    Raises:
      ValueError: an argument has no next value among the results, or it is not certain which one that is.
    """
    types = {name: types_of(x) for name, x in carried.items()}
    leaves, treedef = jax.tree.flatten(result)
    numbered = jax.tree.unflatten(treedef, map(Number, range(len(leaves))))
    if types_of(result) not in types.values() and (named := _by_name(result, numbered)).keys() >= carried.keys():
        for name, (x, _) in named.items():
            if name in types and types_of(x) != types[name]:
                raise ValueError(
                    f"step: its result {name!r} differs from the carried argument in tree, shapes or dtypes."
                )
        places = [leaf.number for name in carried for leaf in jax.tree.leaves(named[name][1])]
        return places, _plain({name: numbers for name, (_, numbers) in named.items() if name not in carried})
    several = type(result) in (tuple, list) and types_of(result) not in types.values()
    results = list(zip(result, numbered, strict=True)) if several else [(result, numbered)]
    kinds = [types_of(x) for x, _ in results]
    place_of: dict[str, int] = {}
    for name, want in types.items():
        if name not in place_of:
            alike = [other for other, each in types.items() if each == want]
            place_of |= _told_apart(alike, {k: results[k][1] for k, each in enumerate(kinds) if each == want}, origins)
    places = [leaf.number for name in carried for leaf in jax.tree.leaves(results[place_of[name]][1])]
    others = tuple(numbers for k, (_, numbers) in enumerate(results) if k not in place_of.values())
    return places, _plain(others[0] if len(others) == 1 else others)


@dataclasses.dataclass(frozen=True)
class Number:
    """Stands for a leaf of a result: its number. A plain number would be the version of a leaf on disk."""

    number: int


def _plain(numbered: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.number, numbered)


def _by_name(result: Any, numbered: Any) -> dict[str, tuple[Any, Any]]:
    """The results of a step by the names that it gives them, each with the numbers of its leaves."""
    if isinstance(result, Mapping):
        return {str(name): (x, numbered[name]) for name, x in result.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    fields = getattr(result, "_fields", ())
    return {name: (getattr(result, name), getattr(numbered, name)) for name in fields}


def _told_apart(names: Sequence[str], results: Mapping[int, Any], origins: Origins) -> dict[str, int]:
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
    left, found = dict(results), dict[str, int]()
    if len(results) > 1:
        bits = {name: UPDATED << (k + 1) for k, name in enumerate(names)}
        made, any_of_them = origins(bits), union(bits.values())
        for name, bit in bits.items():
            masks = {k: [made[leaf.number] for leaf in jax.tree.leaves(numbers)] for k, numbers in results.items()}
            own = [
                k
                for k, each in masks.items()
                if union(each) & any_of_them == bit and any(mask & UPDATED and mask & bit for mask in each)
            ]
            if len(own) == 1:
                found[name] = own[0]
                del left[own[0]]
    unknown = [name for name in names if name not in found]
    if len(unknown) == len(left) == 1:
        return found | {unknown[0]: next(iter(left))}
    if unknown:
        raise ValueError(
            f"step: {len(left)} results have the tree, shapes and dtypes of the carried argument"
            f"{'s' * (len(unknown) > 1)} {' and '.join(map(repr, unknown))}, and the update does not tell which "
            f"argument each result replaces. {_FIX}"
        )
    return found


def types_of(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_on_disk)  # which has the leaf's type, and not its token's
    return treedef, [(tuple(x.shape), x.dtype) for x in map(array_of, leaves)]


def array_of(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def is_traced(x: Any) -> bool:
    """Whether ``jit`` would trace ``x``: arrays and numbers."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct | bool | int | float | complex)


def names_of(tree: Mapping[str, Any]) -> list[str]:
    """A name for each leaf, no two alike."""
    names = [
        "/".join([name, *([inner] if (inner := jax.tree_util.keystr(path, simple=True, separator="/")) else [])])
        for name, x in tree.items()
        for path, _ in jax.tree_util.tree_flatten_with_path(x)[0]
    ]
    return [name if names.index(name) == k else f"{name} {k}" for k, name in enumerate(names)]
