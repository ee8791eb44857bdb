"""Cut a step at its update and put the parts together the other way round: the programs behind ``pipelined``."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import DictKey, keystr, tree_flatten_with_path

from jax_offload._disk.leaves import Token, is_on_disk
from jax_offload._emit.region import Update, holds_update, is_update
from jax_offload._emit.run import prefetch, write_back
from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import (
    MATMULS,
    Equation,
    Var,
    located,
    typed_as,
    values_of,
    variables,
)
from jax_offload._program.memory import (
    DEVICE_KIND,
    HOST_KIND,
    abstract,
    constrained,
    in_its_memory,
    is_host_aval,
    same_sharding,
    sharding_of,
    shards_of,
    to_device,
    to_host,
    typed_sharding,
)
from jax_offload._program.primitives import ELEMENTWISE
from jax_offload._program.program import Builder, Program, flat, is_load
from jax_offload._program.propagate import Facts, Mask, forward, made_of, needed_for, union
from jax_offload._program.slices import Slice, is_summary
from jax_offload._rewrite.canonical import dereferenced, scanning_rows
from jax_offload._rewrite.inlined import UPDATED, consisting_of, equation_of, localised, origins_of, traced_step
from jax_offload._rewrite.parts import Cut, computed_again, cut_step
from jax_offload._rewrite.rewritten import check_program, tell, unreturned
from jax_offload._step.jit import Jitted

Values = dict[str, Any]
Kept = tuple[Values, Values, Values]
"""The values that wait for the update: carried arguments, values made for it, and the step's other arguments.

The first two are donated. The last are the caller's, such as a learning rate, and may be given again.
"""


@jax.tree_util.register_static
class Rotated:
    """A step rotated for arguments of some types. jax carries it in the tree structure of a result.

    Attributes:
      of: the ``Pipelined`` step.
      carried, tree: the types of the carried arguments, and their structure.
      first: runs only the part before the update, on the carried leaves, the others by name, and static arguments.
      train: runs the late part of this step, then the first part of the next one, which is this object if the types are
        the same. It takes the kept values, the other arguments by name, and static arguments; it returns the values
        kept for the next update, the late results, the results of the next step known now, and that step.
      finish: runs only the late part, and returns the carried leaves and the late results. It does not donate values
        made for the update, because no next value could take their buffers.
      look: returns a carried argument after the update, by its place, or an attribute of it. It donates nothing.
    """

    def __init__(self, of: Any, shardings: Sequence[Any], carried: tuple[Any, ...], rest: Values, *static: Any) -> None:
        """Rotate a step.

        Args:
          of: the ``Pipelined`` step.
          shardings: the shardings of the carried leaves, which a trace does not show.
          carried, rest: the carried arguments in their order, and the others by name.
          *static: the static arguments.
        """
        closed, result = traced_step(of.called, carried, rest, *static, static=range(2, 2 + len(static)))
        self.of, self._types, self.tree = of, closed.out_avals, jax.tree.structure(carried)
        self.carried = dict(zip(of.names, jax.tree.map(_type_of, carried), strict=True))
        names, owners = names_of(self.carried), [k for k, x in enumerate(carried) for _ in jax.tree.leaves(x)]
        program = scanning_rows(dereferenced(flat(closed, any_jit=True), any_jit=True))
        inputs = program.inputs[len(program.consts) :]
        own, others = inputs[: len(names)], inputs[len(names) :]
        self._like = like = dict(zip(own, shardings, strict=True))
        origins = origins_of(program, {v: UPDATED << (k + 1) for v, k in zip(own, owners, strict=True)})
        results = jax.tree.unflatten(result, map(_type_of, self._types))
        numbers, self._others = matched(self.carried, results, origins)
        self._cut = cut = cut_step(waiting_on_host(program, like) if of.on_host else program)
        if (model := _model_in_update(cut, own, others)) is not None:
            raise ValueError(f"step: {located(_MODEL, model)}. {_TAKE_FIRST}")
        self._nexts = [cut.program.outputs[k] for k in numbers]
        self._late = {v for part in (cut.update, cut.after) for eqn in part.eqns for v in eqn.outvars}
        self._check(program, dict(zip(names, own, strict=True)))

        # a parameter waits in host memory, and not what the passes have loaded of it
        loads = {eqn.outvars[0]: eqn.invars[0] for eqn in cut.before.eqns if is_load(eqn)}
        reads = [v for v in [*cut.update.inputs, *cut.after.inputs, *variables(self._nexts)] if v not in self._late]
        self._loads = {v: x for v in dict.fromkeys(reads) if (x := loads.get(v)) in like}
        waiting, given = dict.fromkeys(self._loads.get(v, v) for v in reads), {*program.inputs}
        # An argument that nothing late reads keeps its place, so that places do not depend on the step.
        self._own = {name: v if v in waiting else None for name, v in zip(names, own, strict=True)}
        self._made = {f"{k:04d}": v for k, v in enumerate(v for v in waiting if v not in given)}
        self._given = {name: v for name, v in zip(names_of(rest), others, strict=True) if v in waiting}

        def train(carry: Values, produced: Values, given: Values, rest: Values, *static: Any) -> Any:
            leaves, late = self._after(carry, produced, given)
            step = of.program(shardings, jax.tree.unflatten(self.tree, leaves), rest, *static)
            *waiting, now = step.before(leaves, rest)
            return (step.own(leaves), *waiting), late, now, step

        self._places = [s if isinstance(s, NamedSharding) else None for s in shardings]
        kept = (dict(zip(names, self._places, strict=True)), None, None), None, None, None
        first, later = range(2, 2 + len(static)), range(4, 4 + len(static))
        self.first = Jitted(self.before, {"static_argnums": first})
        self.train = Jitted(train, {"static_argnums": later, "donate_argnums": (0, 1), "out_shardings": kept})
        self.finish = Jitted(self._after, {"donate_argnums": 0, "out_shardings": (self._places, None)})
        self.look = Jitted(self._current, {"static_argnums": (3, 4)})

    def _check(self, program: Program, own: Mapping[str, Var]) -> None:
        """Raise ``ValueError`` if the step does not return its update's results, or returns them in another memory."""
        names = ", ".join(self.carried)
        nexts = zip(own.items(), self._nexts, strict=True)
        moved = [name for (name, v), new in nexts if is_host_aval(new.aval) and not is_host_aval(v.aval)]
        if moved:
            raise ValueError(
                f"{moved[0]}: {len(moved)} carried arrays arrive in device memory, this one first, and the step "
                "returns them in host memory. Fix: move the state with jax_offload.to_host(tx, state), or restore or "
                "describe it with the shardings of jax_offload.abstract_state(tx, params)."
            )
        if self._late.isdisjoint(variables(self._nexts)):
            raise ValueError(f"step: returns {names} as they were, or without the update's results; return new ones.")
        if (lost := unreturned(program)) is not None:
            raise ValueError(f"step: cannot be turned round, as {lost.why}. Return new {names}.")

    def own(self, leaves: Sequence[Any]) -> Values:
        """The carried arguments that wait."""
        return {name: None if v is None else x for (name, v), x in zip(self._own.items(), leaves, strict=True)}

    def before(self, leaves: Sequence[Any], rest: Values, *_: Any) -> tuple[Values, Values, Any]:
        """Run the part before the update; return the other values that wait for it, and the results known now."""
        program = self._cut.program
        env = dict(zip(program.inputs, [*program.consts, *leaves, *jax.tree.leaves(rest)], strict=True))
        _run(self._cut.before, env)
        made = {name: constrained(env[v], home_of(v, self._like)) for name, v in self._made.items()}
        return made, {name: env[v] for name, v in self._given.items()}, self._aux(env, late=False)

    def _after(self, *kept: Values) -> tuple[list[Any], Any]:
        """Run the update and what follows; return the next values of the carried leaves, and the late results."""
        env: dict[Any, Any] = dict(zip(self._cut.program.inputs, self._cut.program.consts, strict=False))
        for names, values in zip((self._own, self._made, self._given), kept, strict=True):
            env |= {v: values[name] for name, v in names.items()}
        env |= {v: to_device(env[x]) for v, x in self._loads.items()}
        _run(self._cut.update, env)
        _run(self._cut.after, env)
        return values_of(env, self._nexts), self._aux(env, late=True)

    def _aux(self, env: Mapping[Var, Any], *, late: bool) -> Any:
        """Return the results of one part that are not carried, with ``None`` in place of the other part's."""
        outputs = self._cut.program.outputs
        here = [k for k in jax.tree.leaves(self._others) if late != self._late.isdisjoint(variables([outputs[k]]))]
        values = typed_as([self._types[k] for k in here], values_of(env, [outputs[k] for k in here]))
        return jax.tree.map(dict(zip(here, values, strict=True)).get, self._others)

    def _current(self, own: Values, made: Values, given: Values, place: int, attribute: str) -> Any:
        leaves = map(constrained, self._after(own, made, given)[0], self._places)
        found = jax.tree.unflatten(self.tree, leaves)[place]
        return getattr(found, attribute) if attribute else found

    def kept(self, leaves: Sequence[Any], rest: Values) -> Kept:
        """Return the types of the values that a call keeps. Gradients are divided like their state or parameter."""
        # host values that resemble no carried array take the sharding of a host array on one device, if there is one
        hosts = [s for x in leaves if (s := sharding_of(x)) is not None and s.memory_kind == HOST_KIND]
        alone = next((s for s in hosts if s.num_devices == 1), None)

        def placed(v: Var) -> Any:
            host, typed = is_host_aval(v.aval), typed_sharding(v.aval)
            sharding = like_state(v, self._like) or (alone if host else None)
            if isinstance(sharding, NamedSharding) and typed is not None:
                sharding = sharding.update(spec=typed.spec)
            place = sharding and sharding.with_memory_kind(HOST_KIND if host else DEVICE_KIND)
            return abstract(v.aval.shape, v.aval.dtype, place, v.aval.weak_type)

        given = dict(zip(names_of(rest), jax.tree.leaves(rest), strict=True))
        made = {name: placed(v) for name, v in self._made.items()}
        return self.own(leaves), made, {name: given[name] for name in self._given}


def _type_of(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _run(part: Slice, env: dict[Var, Any]) -> None:
    env.update(zip(part.outputs, part.run(*(env[v] for v in part.inputs)), strict=True))


_MODEL = (
    "its update runs the model again, in a line search, for gradients that are taken after another update, or in one "
    "loop, branch or jax.checkpoint with the first passes"
)
_TAKE_FIRST = (
    "pipelined runs all updates of a step together, in the next call, where this batch is gone. Fix: take all "
    "gradients before the first update, and outside of what holds it; or jax_offload.jit, which runs the step as "
    "written."
)


def _model_in_update(cut: Cut, own: Iterable[Var], given: Iterable[Var]) -> Equation | None:
    """Return an equation of the update part that runs the model, if there is one.

    Such an equation multiplies matrices and depends on an array that is made of the batch alone.

    Args:
      cut: the step.
      own: its carried leaves.
      given: its other arguments.
    """
    found = list[Equation]()

    def multiplies(eqn: Equation, of_batch: Sequence[bool]) -> Sequence[bool] | None:
        if is_update(eqn):
            return reads_batch.through(eqn.params["update"].program.jaxpr, of_batch)
        if eqn.primitive.name in MATMULS and any(of_batch):
            found.append(eqn)
        return None

    reads_batch = Facts[bool](False, any, rule=multiplies)
    batch, others = (made_of(cut.before.eqns, lambda _: False, start) for start in (given, own))
    env = {v: True for v in cut.update.inputs if v in batch - others and v.aval.shape}
    return next((eqn for eqn in cut.update.eqns if reads_batch.spread([eqn], env) and found), None)


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


@partial(jax.tree_util.register_dataclass, data_fields=("kept", "step"), meta_fields=("program",))
@dataclasses.dataclass(eq=False, repr=False)  # a repr would fetch the whole state
class Carry:
    """The pytree that one call of a pipelined step hands to the next: arguments with their pending update.

    Do not change it: its parameters are not the current ones. ``jax_offload.save_args(carry)`` saves it, and
    ``jax_offload.restore(manager, like)`` restores it, where ``like`` is a carry that another call of the same step
    returned. The results of ``finish`` do not depend on a step and make a better checkpoint.
    """

    kept: Kept
    step: Any
    program: Rotated

    def __getitem__(self, _: Any) -> Any:  # which Python calls for ``params, state = carry``, too
        raise TypeError("carry: holds a pending update. Fix: params, state = train.finish(carry), which completes it.")


# ---- match results with the carried arguments that they replace

_FIX = "Return a dict with the carried arguments' names as keys."


def matched(carried: Mapping[str, Any], result: Any, origins: Sequence[Mask]) -> tuple[list[int], Any]:
    """Match the results with the carried arguments that they replace.

    If the whole result has the type of a carried argument, it is a single result. A tuple or a list holds several
    results, and so does a tree with names, such as a dict's keys, if these include the names of all carried arguments;
    then the names decide. Otherwise, the next value of an argument is the only result of its type. Among several
    results of one type, origins decide: the next value comes from an update, and from no other carried argument of that
    type; or it is the last result left for the last argument left. These results must be in the order of the arguments,
    because in another order the step may let two networks take turns.

    Args:
      carried: the types of the carried arguments.
      result: the types of the result.
      origins: the origins of its leaves (``origins_of``), with a bit for each carried argument.

    Returns:
      The numbers of the result's leaves that are next values, and the tree of the other leaves' numbers.

    Raises:
      ValueError: an argument has no next value among the results, or it is not certain which one that is.
    """
    numbers = {id(leaf): k for k, leaf in enumerate(jax.tree.leaves(result))}
    alone = any(_kind(result) == _kind(x) for x in carried.values())
    children = [] if alone else tree_flatten_with_path(result, is_leaf=lambda x: x is not result)[0]
    named = {keystr(path, simple=True): x for path, x in children}
    if carried.keys() <= named.keys():
        if name := next((name for name, x in carried.items() if _kind(named[name]) != _kind(x)), ""):
            raise ValueError(f"step: its result {name!r} differs from the carried argument in tree, shapes or dtypes.")
        nexts = [named[name] for name in carried]
        others: Any = {name: x for name, x in named.items() if name not in carried}
    else:
        results = [*named.values()] if type(result) in (tuple, list) and not alone else [result]
        made_of = [union(origins[numbers[id(leaf)]] for leaf in jax.tree.leaves(x)) for x in results]
        alike, found = dict[Any, dict[str, Mask]](), dict[str, int]()
        for k, (name, x) in enumerate(carried.items()):
            alike.setdefault(_kind(x), {})[name] = UPDATED << (k + 1)
        for kind, bits in alike.items():
            found |= _told_apart(bits, {k: made_of[k] for k, x in enumerate(results) if _kind(x) == kind})
        nexts = [results[found[name]] for name in carried]
        others = tuple(x for k, x in enumerate(results) if k not in found.values())
        others = others[0] if len(others) == 1 else others
    return [numbers[id(leaf)] for leaf in jax.tree.leaves(nexts)], jax.tree.map(lambda x: numbers[id(x)], others)


def _kind(tree: Any) -> Any:
    """Return a tree's structure, shapes and dtypes; a leaf on disk counts with its own type, not with its token's."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_on_disk)
    return structure, tuple((x.shape, x.dtype) for x in leaves)


def _told_apart(bits: Mapping[str, Mask], results: Mapping[int, Mask]) -> dict[str, int]:
    """Find the next value of each of several carried arguments of the same type.

    Args:
      bits: the arguments and their bits.
      results: the numbers of the results of their type, and the origins of each.
    """
    names, what, kind = [*bits], " and ".join(map(repr, bits)), "the tree, shapes and dtypes of the carried argument"
    if len(results) < len(names):
        raise ValueError(
            f"step: {len(results) or 'no'} result{'s have' if len(results) > 1 else ' has'} {kind}"
            f"{'s' * (len(names) > 1)} {what}; return the next value of each."
        )
    of_these = union([UPDATED, *bits.values()])
    continuing = {x: [k for k, mask in results.items() if mask & of_these == UPDATED | bit] for x, bit in bits.items()}
    found = {name: those[0] for name, those in continuing.items() if len(those) == 1}
    unknown = [name for name in names if name not in found]
    left = [k for k in results if k not in found.values()]
    if len(unknown) == len(left) == 1:
        found[unknown[0]] = left[0]
    elif unknown:
        raise ValueError(
            f"step: {len(left)} results have {kind}{'s' * (len(unknown) > 1)} {' and '.join(map(repr, unknown))}, and "
            f"the update does not tell which argument each result replaces. {_FIX}"
        )
    returned = sorted(names, key=found.__getitem__)
    if returned != names:  # perhaps two networks take turns
        raise ValueError(
            f"step: the carried arguments {what} have the same tree, shapes and dtypes, and by the update the step "
            f"returns them as {' and '.join(map(repr, returned))}. {_FIX} Or return them in the order of the arguments."
        )
    return found


def array_of(x: Any) -> Any:
    """Return a leaf as an array with a type; convert a Python number."""
    return in_its_memory(x) if isinstance(x, jax.Array | Token | jax.ShapeDtypeStruct) else jnp.asarray(x)


def names_of(trees: Mapping[str, Any]) -> list[str]:
    """Return a unique name for each leaf of some trees."""
    paths = [(DictKey(name), *path) for name, x in trees.items() for path, _ in tree_flatten_with_path(x)[0]]
    names = [keystr(path, simple=True, separator="/") for path in paths]
    return [name if names.index(name) == k else f"{name} #{k}" for k, name in enumerate(names)]


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


def like_state(v: Var, carried: Mapping[Var, Sharding | None]) -> Sharding | None:
    """The sharding of a value's state: of the carried array of its shape in the most parts. ``None`` if nothing tells,
    or if two arrays of that shape are divided in different ways."""
    alike = [s for x, s in carried.items() if x.aval.shape == v.aval.shape and s is not None]
    parts = [math.prod(shards_of(s, v.aval.shape)) for s in alike]
    most = [s for s, n in zip(alike, parts, strict=True) if n == max(parts)]
    return most[0] if most and all(same_sharding(s, most[0]) for s in most) else None


def home_of(v: Var, carried: Mapping[Var, Sharding | None]) -> NamedSharding | None:
    """Return the sharding of a waiting value, which is like its state's.

    XLA by itself would keep the gradients of divided parameters whole on every device. Return ``None`` if the type
    gives the sharding, or if the value is small or undivided.
    """
    like = like_state(v, carried)
    if not _is_large(v) or typed_sharding(v.aval) is not None or not isinstance(like, NamedSharding):
        return None
    return like.with_memory_kind(DEVICE_KIND) if math.prod(shards_of(like, v.aval.shape)) > 1 else None


def waiting_on_host(program: Program, carried: Mapping[Var, Sharding | None]) -> Program:
    """Return a step's program in which gradients of 64 KiB or more wait in host memory for their update.

    Args:
      program: a step's program, with every ``jit`` inlined.
      carried: the inputs that wait anyway -> their shardings.

    Raises:
      CannotWait: the step's update cannot load them.
    """
    inside = [eqn.primitive.name for eqn in program.eqns if holds_update(eqn) and not is_update(eqn)]
    if inside:
        raise CannotWait(
            f"gradients='host': the step's update runs in a {inside[0]}, where it cannot load them. Use "
            "gradients='device'."
        )
    found = program
    try:
        for number in range(sum(map(is_update, program.eqns))):
            found = _of_update(found, number, carried)
        check_program(found)
    except CannotWait:
        raise
    except Exception as fault:  # the step still runs as written
        tell("gradients wait on the device", fault)
        return program
    return found


def _of_update(program: Program, number: int, carried: Mapping[Var, Sharding | None]) -> Program:
    """Let the gradients of one update wait in host memory. ``number``: its place among the program's updates."""
    at = [k for k, eqn in enumerate(program.eqns) if is_update(eqn)][number]
    before, eqn = program.eqns[:at], program.eqns[at]
    update = localised(eqn)
    made = [v for each in before for v in each.outvars]
    gradients, arithmetic = {*update.gradients}, [each for each in before if each.primitive.name in _LATE]
    late, sources = computed_again(gradients & {*filter(_is_large, made)}, {*carried}, arithmetic)
    waiting = [v for v in made if v in sources and _is_large(v)]
    if not waiting:
        raise CannotWait(
            f"gradients='host': none that the update reads is a float array of {LEAST >> 10} KiB or more. Use "
            "gradients='device'."
        )
    ahead, numbers = _ahead(update, gradients)
    front, inside = Builder([*before]), Builder()
    front.copy(*ahead, results={v: v for v in numbers})  # the update repeats the equations
    names, rank, shards = {**update.names}, {**update.rank}, {**update.program.shards}
    last = 1 + max(rank.values(), default=0)
    for k, v in enumerate(waiting):
        name, home = f"gradients/{k}", home_of(v, carried)
        with write_back(v, {v: name}):
            (host,) = variables(front.run(lambda x, home=home: to_host(constrained(x, home)), v))
        with prefetch(v, {v: name}):
            (inside.names[v],) = inside.run(to_device, host)
        names[host], rank[host] = name, last + k  # the state decides the order
        shards[host] = shards_of(home or typed_sharding(v.aval), v.aval.shape)
    for each in (*late, *(each for each in update.program.eqns if numbers.isdisjoint(each.outvars))):
        inside.put(each)
    update = consisting_of(update, inside.eqns, {*variables(update.program.outputs)} - numbers)
    recipe = dataclasses.replace(update.program, shards=shards)
    update = dataclasses.replace(update, program=recipe, names=names, rank=rank, backward=None)  # no pass precedes it
    return dataclasses.replace(program, eqns=[*front.eqns, equation_of(update, eqn), *program.eqns[at + 1 :]])


def _is_large(v: Var) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.floating) and nbytes(v.aval) >= LEAST and not is_host_aval(v.aval)


def _ahead(update: Update, gradients: Set[Var]) -> tuple[list[Equation], set[Var]]:
    """The equations of a localised update that make numbers from gradients and no state, and these numbers."""
    needs = {v: _HOST for v in update.operands if is_host_aval(v.aval)} | dict.fromkeys(gradients, _GRADIENT)
    numbers, summaries = set[Var](), set[Var]()
    for eqn in update.program.eqns:
        masks = [mask | (_HOST if eqn.effects else 0) for mask in forward(eqn, needs)]  # an effect does not repeat
        needs.update(zip(eqn.outvars, masks, strict=True))
        summaries.update(eqn.outvars if is_summary(eqn, summaries) else ())
        if {*masks} == {_GRADIENT} and all(not v.aval.shape or v in summaries for v in eqn.outvars):
            numbers.update(eqn.outvars)
    return needed_for(update.program.eqns, numbers)[0], numbers
