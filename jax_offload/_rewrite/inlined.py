"""Inline a step's updates, so that each of their equations can run where its operands are made."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, TypeVar, cast

import jax

from jax_offload._emit.region import Update, holds_update, is_update
from jax_offload._program.arrays import nbytes
from jax_offload._program.jaxprs import (
    Atom,
    ClosedJaxpr,
    DropVar,
    Equation,
    Literal,
    Var,
    inner_of,
    jaxpr_like,
    jaxpr_of,
    variables,
)
from jax_offload._program.memory import is_host_aval, to_host
from jax_offload._program.primitives import CHECKPOINT, ELEMENTWISE, gate_equation
from jax_offload._program.private import manual_axes_of
from jax_offload._program.program import (
    Builder,
    Program,
    decomposed,
    flat,
    is_load,
    is_store,
    kept_apart,
    unguarded,
)
from jax_offload._program.propagate import Facts, Mask, Node, forward, needed_for, union
from jax_offload._schedule.after import FLOPS_PER_BYTE
from jax_offload._schedule.gates import gradients_in_turn, is_heavy_equation
from jax_offload._schedule.schedule import Gate, same_type
from jax_offload._state.arguments import is_state, load, loading

T = TypeVar("T")

# ---- checkpointed blocks, opened where gates are to stand between the gradients that one makes


def opened(program: Program) -> Program:
    """Inline the equations of each ``jax.checkpoint`` that makes several large gradients.

    Such a block is one equation, and all of its gradients come at once: no gate can hold one of them back, and beside
    copies XLA puts their matmuls off behind the same block's attention. Recomputed values stay behind their
    barrier. A block inside such a block is opened too.

    A block stays closed where the link needs more than half of the passes' time, as more transfers run beside the
    attention of a larger piece; where it has a single matrix, as there is nothing to put between; and where XLA may
    merge it with the forward pass (``prevent_cse=False``), which it does not do across gates. In one that stays closed
    the pass waits for each gradient, or all of a block's activations and cotangents would be alive at once.
    """
    updates = [eqn.params["update"] for eqn in program.eqns if is_update(eqn)]
    if not updates:
        return program
    if not all(map(_has_time, updates)):
        several = _making_several(program)
        return dataclasses.replace(
            program, eqns=[_taking_turns(eqn) if id(eqn) in several else eqn for eqn in program.eqns]
        )
    while several := _making_several(program):
        program = flat(program.closed, opens=lambda eqn, several=several: id(eqn) in several)
    return program


def _taking_turns(block: Equation) -> Equation:
    """A ``jax.checkpoint`` in which the pass goes on once the gradients so far exist."""
    written = block.params["jaxpr"]
    inside = flat(ClosedJaxpr(written, []))
    nodes = [Node(eqn, variables(eqn.invars), eqn.outvars) for eqn in inside.eqns]
    new, barrier = Builder().inside(inside, written.invars), gate_equation()
    for node in gradients_in_turn(nodes, variables(inside.outputs)):
        if isinstance(node.payload, Gate):
            put_gate(new, node.payload, barrier)
        else:
            new.put(node.payload)
    jaxpr = jaxpr_like(written, new.eqns, new.read(inside.outputs))
    return block.replace(params=block.params | {"jaxpr": jaxpr})


def put_gate(new: Builder, this: Gate, barrier: Equation) -> None:
    """Append ``gate`` as equations: values that vary over the same axes of a ``shard_map`` wait for each other."""
    for varying in {manual_axes_of(v.aval) for v in this.held}:
        waiting, first = ([v for v in vs if manual_axes_of(v.aval) == varying] for vs in (this.held, this.waits_for))
        if first:
            names = [*waiting, *first]
            results = [Var(v.aval) for v in names]
            new.put(barrier.replace(invars=names, outvars=results))
            new.names.update(zip(names, results, strict=True))


def _has_time(update: Update) -> bool:
    moved = sum(nbytes(v.aval) for v in update.program.inputs if is_host_aval(v.aval))
    return update.backward is not None and update.backward.flops > FLOPS_PER_BYTE * moved


def _making_several(program: Program) -> set[int]:
    """The identities of the blocks that make several gradients, none of them more than half of their bytes. Gradients
    are results that no pass through the network needs, but only an update, a norm, or the caller."""
    passes = [eqn for eqn in program.eqns if not is_update(eqn)]  # passes may read an update's results
    _, needed = needed_for(passes, (), kept=is_heavy_equation)
    found = set[int]()
    for eqn in passes:
        gradients = [nbytes(v.aval) for v in eqn.outvars if v not in needed and not isinstance(v, DropVar)]
        block = eqn.primitive.name in CHECKPOINT and all(kept_apart(eqn))  # apart from the forward pass
        if block and gradients and 2 * max(gradients) <= sum(gradients):
            found.add(id(eqn))
    return found


# ---- updates in the variables of the step around them


def localised(eqn: Equation) -> Update:
    """Return the update of an equation in the step's variables: its operands and its results are the equation's.

    Its equations come from the line of the user's call.
    """
    update, line = cast(Update, eqn.params["update"]), eqn.source_info.traceback
    recipe = update.program
    new = Builder(names=dict(zip(recipe.inputs, eqn.invars, strict=True)))
    results = zip(variables(recipe.outputs), eqn.outvars, strict=True)
    new.copy(*recipe.eqns, results={v: x for v, x in results if not isinstance(x, DropVar)}, line=line)
    inputs = list(dict.fromkeys(variables(new.read(recipe.inputs))))
    program = dataclasses.replace(recipe, inputs=inputs, outputs=new.read(recipe.outputs), eqns=new.eqns)
    return with_program(update, program, new.names)


def with_program(update: Update, program: Program, names: dict[Var, Atom]) -> Update:
    """Return an update with another program. ``names``: the values of it that stand for the update's own."""
    new = Builder(names=names)

    def local(leaves: Iterable[Var]) -> frozenset[Var]:
        return frozenset(variables(new.read(v for v in leaves if v in new.names)))

    def by_variable(known: Mapping[Var, T]) -> dict[Var, T]:
        return {x: fact for v, fact in known.items() if isinstance(x := new.names.get(v), Var)}

    gradients = dict.fromkeys(variables(new.read(update.gradients)))
    olds = by_variable({v: new.names.get(old) for v, old in update.next_values.items()})
    return dataclasses.replace(
        update,
        program=dataclasses.replace(program, shards=by_variable(update.program.shards)),
        gradients=tuple(gradients),
        names=by_variable(update.names),
        rank=by_variable(update.rank),
        next_values={v: old for v, old in olds.items() if isinstance(old, Var)},
        offload_of=by_variable(update.offload_of),
        on_cores=local(update.on_cores),
        on_disk=local(update.on_disk),
    )


def consisting_of(update: Update, eqns: Sequence[Equation], wanted: Set[Var]) -> Update:
    """Build an update from some equations that returns their ``wanted`` results."""
    recipe, defined = update.program, {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars) if v not in defined)
    inputs = list(dict.fromkeys([*(v for v in recipe.inputs if v in read), *read]))
    outputs: list[Atom] = [v for eqn in eqns for v in eqn.outvars if v in wanted]
    program = dataclasses.replace(recipe, inputs=inputs, outputs=outputs, eqns=list(eqns), consts=[])
    return update.with_fewer_inputs(program)


def equation_of(update: Update, like: Equation) -> Equation:
    """Return the equation of a localised update, which takes another one's place."""
    program = update.program
    results = variables(program.outputs)
    return like.replace(invars=update.operands, outvars=results, params=update.params, effects=program.effects)


@dataclasses.dataclass(frozen=True)
class Inlined:
    """A step with its updates inlined.

    Attributes:
      program: the step.
      updates: the updates in the order of the step, localised.
      own: the equations of the updates, by identity, each with the number of its update.
      next_of: result -> the variable of the step whose next value it is.
      waiting: the same of gradients that wait in host memory for the next step.
      like: the equation of the first update, or of a pass where there is none.
    """

    program: Program
    updates: tuple[Update, ...]
    own: Mapping[int, int]
    next_of: Mapping[Var, Var]
    waiting: Mapping[Var, Var]
    like: Equation

    @property
    def gradients(self) -> list[Var]:
        """The gradients of all updates."""
        return [v for update in self.updates for v in update.gradients]

    @property
    def names(self) -> dict[Var, str]:
        """The names of the states' leaves and of their next values."""
        return {v: name for update in self.updates for v, name in update.names.items()}


def inlined(program: Program) -> Inlined | None:
    """Return the program with its updates inlined; ``None`` where it has none, and no pass that could load layers."""
    like = next(filter(is_update, program.eqns), None)
    if like is None and not any(map(holds_update, program.eqns)):  # an evaluation
        like = next(filter(is_heavy_equation, program.eqns), None)
    if like is None:
        return None
    eqns, updates, own = list[Equation](), list[Update](), dict[int, int]()
    next_of, shards = dict[Var, Var](), dict(program.shards)
    new, stored = Builder(eqns), dict[Atom, Atom]()  # value moved to the host -> the same on the device
    earlier = set[Atom]()  # values that it has moved there before the last pass: an update loads these again
    leaves = {v for v in program.inputs if v.aval.shape}  # a count that all pieces load would keep them together
    loads = {eqn.outvars[0]: eqn for eqn in program.eqns if is_load(eqn) and eqn.invars[0] in leaves}

    def put(eqn: Equation, results: Set[Var] = frozenset(), again: Set[Atom] = frozenset()) -> bool:
        """Append an equation, unless it loads a value that is still on the device, none of those to load ``again``, and
        makes none of the ``results`` that have to stay."""
        operands = new.read(eqn.invars)
        if is_load(eqn) and eqn.outvars[0] not in results and operands[0] not in again:
            origin = stored.get(operands[0])
            if origin is not None and origin.aval == eqn.outvars[0].aval:
                new.names[eqn.outvars[0]] = origin
                return False
        new.put(eqn, operands)
        stored.update({eqn.outvars[0]: operands[0]} if is_store(eqn) else {})
        return True

    for eqn in program.eqns:
        if not is_update(eqn):
            if len(earlier) < len(stored) and is_heavy_equation(eqn):
                earlier.update(stored)
            put(eqn)
            continue
        operands, again = new.read(eqn.invars), Builder()  # an update loads leaves by itself, beside a pass
        again.copy(*(loads[v] for v in dict.fromkeys(variables(operands)) if v in loads))
        update, results = localised(eqn.replace(invars=again.read(operands))), {*eqn.outvars}
        leaf_of = {each.outvars[0]: each.invars[0] for each in again.eqns}
        olds = {v: leaf_of.get(old, old) for v, old in update.next_values.items()}
        update = dataclasses.replace(update, next_values=olds)
        for each in [*again.eqns, *decomposed(update.program.eqns)]:
            if put(each, results, earlier):
                own[id(eqns[-1])] = len(updates)
        updates.append(update)
        # An update that is the rest of one does not make all of its results.
        pairs = {v: update.next_values[v] for v in eqn.outvars if v in update.next_values}
        shards |= update.program.shards
        shards |= {v: shards[x] for v, x in pairs.items() if x in shards and v.aval.shape == x.aval.shape}
        next_of |= pairs
    step = dataclasses.replace(program, eqns=eqns, outputs=new.read(program.outputs), shards=shards)
    found = _with_arithmetic(Inlined(step, tuple(updates), own, next_of, {}, like))
    return dataclasses.replace(found, waiting=_waiting(found.program, found.next_of))


def _with_arithmetic(step: Inlined) -> Inlined:
    """Let an update also run the arithmetic behind it that makes next values of its results: their sum with parameters
    in host memory, and the choice between new and old values. These then stream with its state.

    In the step this arithmetic would load them as a whole.
    """
    program, own, next_of, updates = step.program, {**step.own}, {**step.next_of}, [*step.updates]
    choices = any(eqn.primitive.name == "select_n" and id(eqn) not in own for eqn in program.eqns)
    if not choices and not any(is_host_aval(v.aval) for v in variables(program.outputs) if v not in next_of):
        return step
    old_of = {v: v for v in program.inputs}  # also of copies, sums and choices
    old_of |= {v: old for v, old in next_of.items() if old in old_of}
    number_of = {v: own[id(eqn)] for eqn in program.eqns if id(eqn) in own for v in eqn.outvars}
    behind: dict[Var, dict[int, Equation]] = {}  # a value -> the equations behind the update that make it
    made_of = dict[Var, Mask]()  # a value -> the numbers of the updates that it needs
    for eqn in program.eqns:
        arrays, (out, *_) = [v for v in variables(eqn.invars) if v.aval.shape], (*eqn.outvars, None)
        made_of.update(zip(eqn.outvars, forward(eqn, made_of), strict=True))
        if id(eqn) in own or out is None:
            made_of |= {v: made_of[v] | 1 << own[id(eqn)] for v in eqn.outvars if id(eqn) in own}
            old_of |= {v: old_of[out] for v in arrays if is_store(eqn) and out in old_of}
            continue
        olds = {old_of[v] for v in arrays if v in old_of}
        numbers = {number_of[v] for v in arrays or variables(eqn.invars) if v in number_of}
        known = all(v in old_of or v in number_of or v in behind for v in arrays)
        continues = len(olds) == 1 and bool(numbers or any(is_host_aval(old.aval) for old in olds))
        continues = eqn.primitive.name in ELEMENTWISE and (continues if arrays else bool(numbers))
        # what it also reads, such as a norm of all results, must not need the update to be over
        others = union(made_of.get(v, 0) for v in variables(eqn.invars) if number_of.get(v) not in numbers)
        apart = len(numbers) <= 1 and known and all(others < 1 << number for number in numbers)
        if apart and (continues or (eqn.primitive.name == "broadcast_in_dim" and not arrays)):
            behind[out] = {k: x for v in variables(eqn.invars) for k, x in behind.get(v, {}).items()} | {id(eqn): eqn}
            old_of |= dict.fromkeys([out], *olds) if olds else {}
            number_of |= dict.fromkeys([out], *numbers) if numbers else {}
    taken, outputs = dict[int, int](), dict.fromkeys(variables(program.outputs))
    returned = {old for v, old in next_of.items() if v in outputs}
    replaced = set[Var]()  # the leaves whose next value is a choice
    for v in (v for v in outputs if v in behind and v in number_of and v in old_of):
        old, update = old_of[v], updates[number_of[v]]
        chosen = any(eqn.primitive.name == "select_n" for eqn in behind[v].values())
        if not same_type(v.aval, old.aval) or old in (replaced if chosen else returned):
            continue  # it is another array, or the leaf has a next value
        if not (chosen or is_host_aval(v.aval)):
            continue
        returned.add(old)
        replaced |= {old} if chosen else set()
        taken |= dict.fromkeys(behind[v], number_of[v])
        next_of, nexts = (
            {w: x for w, x in each.items() if x is not old} | {v: old} for each in (next_of, update.next_values)
        )
        names = dict(update.names) | ({v: update.names[old]} if old in update.names else {})
        offload_of = {old: 0, **update.offload_of} if update.options and is_host_aval(old.aval) else update.offload_of
        updates[number_of[v]] = dataclasses.replace(update, next_values=nexts, names=names, offload_of=offload_of)
    if not taken:
        return step
    eqns = list[Equation]()
    new = [Builder(eqns) for _ in updates]
    for eqn in program.eqns:
        number = own.get(id(eqn), taken.get(id(eqn)))
        if number is None or (id(eqn) in taken and eqn.outvars[0] not in number_of):
            eqns.append(eqn)
            continue
        # a pass may read the same value of a leaf alone, and another update the same mask: each makes its own
        at, names = len(eqns), new[number].names
        alone = {x: each for v in variables(eqn.invars) for each in behind.get(v, {}).values() for x in each.outvars}
        alone = (each for x, each in alone.items() if id(each) in taken and x not in number_of and x not in names)
        new[number].copy(*alone)
        new[number].put(eqn)
        own.update((id(each), number) for each in eqns[at:])
    program = dataclasses.replace(program, eqns=eqns)
    return dataclasses.replace(step, program=program, updates=tuple(updates), own=own, next_of=next_of)


def _waiting(program: Program, next_of: Mapping[Var, Var]) -> dict[Var, Var]:
    """Map each result that a step sends to the host to the argument there that it may overwrite: one of its type that
    is no other result's old value. Results and arguments have one order."""
    outputs = dict.fromkeys(variables(program.outputs))
    moved = {eqn.outvars[0] for eqn in program.eqns if eqn.primitive.name == "device_put"}
    free = [v for v in program.inputs if is_host_aval(v.aval) and v not in next_of.values() and v not in outputs]
    found: dict[Var, Var] = {}
    for v in outputs:
        if v in moved and is_host_aval(v.aval) and v not in next_of:
            old = next((x for x in free if same_type(x.aval, v.aval)), None)
            if old is not None:
                found[v] = old
                free.remove(old)
    return found


# ---- which arguments of a step its results continue

UPDATED: Mask = 1
"""The bit for an update's results; callers number the arguments with the other bits."""

_ROWS = ELEMENTWISE | {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev"}


def origins_of(program: Program, arguments: Mapping[Var, Mask]) -> list[Mask]:
    """For each result, the bits of the arguments from which elementwise arithmetic makes it, and ``UPDATED`` if an
    update's result is among its operands.

    A result of an update has the bits of the argument whose next value it is, and no bits of the update's other
    operands: a gradient changes parameters, but the new parameters do not continue it.
    """
    program = unguarded(program)
    env = {v: arguments.get(v, 0) for v in program.inputs}
    return _CARRIED_ON.read(_CARRIED_ON.spread(program.eqns, env), program.outputs)


def _of_rows(eqn: Equation, masks: Sequence[Mask]) -> Sequence[Mask] | None:
    """The bits of an equation's results: of elementwise arithmetic, the union of its operands' bits."""
    if is_update(eqn):
        update: Update = eqn.params["update"]
        given = dict(zip(update.operands, masks, strict=True)) | dict.fromkeys(update.gradients, 0)
        olds = [None if isinstance(v, Literal) else update.next_values.get(v) for v in update.program.outputs]
        return [UPDATED | (0 if old is None else given.get(old, 0)) for old in olds]
    if eqn.primitive.name in _ROWS:
        return masks if len(masks) == len(eqn.outvars) else [union(masks)] * len(eqn.outvars)
    return None if inner_of(eqn) else [0] * len(eqn.outvars)


_CARRIED_ON = Facts[Mask](0, union, rule=_of_rows, choice_counts=False)


# ---- a step whose model computes with parameters in host memory
#
# jax refuses arithmetic between memories. If the model does not load such parameters itself, the step is traced with
# a load of each parameter at its start, and stores the new parameters in host memory at its end. As written, it would
# load whole parameters. A plan then loads them by rows, where a scan reads them.


def traced_step(
    fun: Callable[..., Any], *args: Any, static: Sequence[int] = (), named: Mapping[str, Any] = MappingProxyType({})
) -> tuple[ClosedJaxpr, Any]:
    """Trace a step: its jaxpr, and the structure of its result.

    Args:
      fun: the step.
      args: its arguments, traced or abstract.
      static: the numbers of the arguments that are no operands.
      named: keyword arguments.
    """
    with explained():
        try:
            return jaxpr_of(fun, *args, static=static, named=named)
        except (TypeError, ValueError) as error:
            if not _is_of_memories(error):
                raise
        return _with_loads(fun, args, static, named)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Say how to mend arithmetic between memories that remains in a step of ``jax_offload.jit``."""
    try:
        yield
    except ValueError as error:
        if not _is_of_memories(error):
            raise
        raise ValueError(
            f"jo.jit: {error}. It loads parameters in host memory, unless jit is disabled, and no state of an "
            "optimizer, which update loads. Fix: jax_offload.to_device(x) of the array in host memory."
        ) from error


def _is_of_memories(error: Exception) -> bool:
    """Whether jax refuses arithmetic between memories: it names the types, such as ``float32<host>[4]``."""
    return "memory_space" in str(error) or "<host>" in str(error)


def _with_loads(
    fun: Callable[..., Any], args: Sequence[Any], static: Sequence[int], named: Mapping[str, Any]
) -> tuple[ClosedJaxpr, Any]:
    """Trace a step that first loads all host arguments, except the states of optimizers.

    A state without optax's types, such as a dict, is recognized by the update that takes it. If the trace then fails,
    the step is traced again with these leaves kept in host memory.
    """
    numbers, states, given, kept = dict[int, int](), list[Any](), list[bool](), set[int]()

    def run(*args: Any, **kwargs: Any) -> Any:
        numbers.clear()
        given[:] = _in_states(([x for k, x in enumerate(args) if k not in static], kwargs))

        def of_leaf(x: Any) -> Any:
            number = numbers.setdefault(id(x), len(numbers))
            return x if number in kept or is_state(x) else load(x)

        def loaded(x: Any) -> Any:
            return jax.tree.map(of_leaf, x, is_leaf=is_state)

        with loading(states):
            return fun(*(x if k in static else loaded(x) for k, x in enumerate(args)), **loaded(kwargs))

    while True:
        states.clear()
        try:
            closed, result = jaxpr_of(run, *args, static=static, named=named)
            break
        except TypeError:
            of_states = {numbers[id(x)] for x in states}
            if of_states <= kept:
                raise
            kept |= of_states
    results = jax.tree.unflatten(result, closed.jaxpr.outvars)
    return _returned_to_host(closed, given, _in_states(results)), result


def _in_states(tree: Any) -> list[bool]:
    """Say for each leaf whether it belongs to the state of an optimizer."""
    return [is_state(x) for x in jax.tree.leaves(tree, is_leaf=is_state) for _ in jax.tree.leaves(x)]


def _returned_to_host(closed: ClosedJaxpr, given: Sequence[bool], returned: Sequence[bool]) -> ClosedJaxpr:
    """Let a step return to host memory the next value of each argument that it loads.

    The next value is a result of the argument's type that elementwise arithmetic makes of the argument. Of several, it
    is one that an update makes or that depends on a state; then the one of the fewest other arguments of its type; then
    a computed one; and then the first: the new parameters rather than a gradient, an average or a copy of them, or the
    old ones.

    Args:
      closed: the step.
      given: which arguments belong to an optimizer's state.
      returned: which results belong to one; such a state knows its own memory.
    """
    program = flat(closed)
    loads = {eqn.outvars[0]: eqn.invars[0] for eqn in program.eqns if is_load(eqn)}
    bits = {x: UPDATED << (k + 1) for k, x in enumerate(program.inputs)}
    updated = union([UPDATED, *(bits[x] for x, of_state in zip(closed.jaxpr.invars, given, strict=True) if of_state)])
    made_of = zip(program.outputs, origins_of(program, bits), returned, strict=True)
    masks = {v: m for v, m, of_state in made_of if isinstance(v, Var) and not of_state}
    made = {v: k for k, eqn in enumerate(program.eqns) for v in eqn.outvars}
    new, outputs = Builder([*program.eqns]), dict[Atom, Atom]()
    left = dict.fromkeys(x for x in loads.values() if x in bits)
    alike: dict[tuple[Any, ...], Mask] = {}
    for x, bit in bits.items():
        alike[_type(x)] = alike.get(_type(x), 0) | bit

    def order(v: Var) -> tuple[Any, ...]:
        others = masks[v] & alike.get(_type(v), 0)
        return not masks[v] & updated, others.bit_count(), loads.get(v) in bits, made.get(v, -1)

    for v in sorted(masks, key=order):
        if (same := loads.get(v)) in bits:
            outputs[v] = same
            left.pop(same, None)
        elif not is_host_aval(v.aval):
            old = next((x for x in left if masks[v] & bits[x] and _type(x) == _type(v)), None)
            if old is not None:
                del left[old]
                outputs[v] = same or new.run(to_host, v)[0]
    results = [v if isinstance(v, Literal) else outputs.get(v, v) for v in program.outputs]
    return dataclasses.replace(program, eqns=new.eqns, outputs=results).closed


def _type(v: Var) -> tuple[Any, ...]:
    return v.aval.shape, v.aval.dtype
