"""The training loop, software-pipelined: the update for a batch's gradients runs in the forward pass of the next one.

What needs all gradients, clipping by their norm say, cannot run while the backward pass makes them. But the next step
can begin with it: the norm is known by then, and each layer's update can run when the forward pass comes to it, while
the state of its neighbours moves. It is exact: every forward pass sees the parameters that it would see in the plain
loop. The price is that the gradients live from one call to the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_offload._base.arrays import is_array
from jax_offload._base.jaxprs import Literal, Var, jaxpr_of
from jax_offload._base.memory import on_a_mesh
from jax_offload._emit.run import as_array
from jax_offload._interop.jit import Jitted
from jax_offload._step import Cut, cut_step

_PENDING = "pending/"


class Aux(NamedTuple):
    """What a step returns beside what it carries, as far as it is known.

    Attributes:
      now: of this call's batch: a loss, a norm of gradients. ``None`` in the place of what needs the new parameters.
      late: that, of the batch of the call before; ``None`` in the place of the rest. ``None`` from ``start``.
      step: the number of this call's batch since ``start``, which has number 0; ``late`` is of ``step - 1``.
    """

    now: Any
    late: Any
    step: int


class Carry:
    """What one call of a pipelined step hands to the next: parameters and state that wait for an update, and what the
    update needs. A pytree of arrays, to be saved; its parameters are not the current ones."""

    def __init__(self, values: dict[str, Any], step: Any, program: Any) -> None:
        self.values, self.step, self.program, self.used = values, step, program, False


_ATTRIBUTES = jax.tree_util.GetAttrKey("values"), jax.tree_util.GetAttrKey("step")
jax.tree_util.register_pytree_with_keys(
    Carry,
    lambda carry: (tuple(zip(_ATTRIBUTES, (carry.values, carry.step), strict=True)), carry.program),
    lambda program, children: Carry(children[0], children[1], program),  # pyright: ignore[reportIndexIssue]
)


def pipelined(step: Callable[..., Any], *, donate_argnames: str | Sequence[str]) -> Pipelined:
    """A training step that runs each batch's update in the forward pass of the next batch, where transfers hide.

    For optimizers that need all gradients before they can update any parameter (clipping by the global norm); without
    such, ``jax_offload.jit`` hides transfers in the backward pass. The step is an ordinary one, unchanged::

        train = jo.pipelined(step, donate_argnames=("params", "state"))
        carry, aux = train.start(params, state, batch)  # gradients only
        carry, aux = train(carry, batch)                # the pending update, then the gradients of this batch
        params, state = train.finish(carry)             # before evaluation, checkpoints, the end

    The numbers are those of the plain loop. ``aux.now`` is what the step returns beside what it carries; what of it
    needs the new parameters comes one call later, in ``aux.late``. A hyperparameter in the state that is changed
    between two calls would act on the pending update: ``finish`` first, and ``start`` again.

    Args:
      step: a function of parameters, state, a batch, as for ``jax_offload.jit``; each of the carried arguments is
        returned with its next value, a result of the same tree, shapes and dtypes.
      donate_argnames: the names of the arguments that are carried from call to call. They are donated.

    Returns:
      A ``Pipelined``: ``start``, the call itself, ``finish``, and ``params`` for a look at the current parameters.

    Raises:
      ValueError: at the first call, where the step has no update that can be seen, or does not return what it carries.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> tx = jo.offload(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
      >>> def step(w, state, x):
      ...     loss, grads = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(w)
      ...     return *jo.update_params(tx, grads, state, w), loss
      >>> w, x = jax.device_put((jnp.ones((256, 256)), jnp.ones((2, 256))), jax.devices()[0])
      >>> train = jo.pipelined(step, donate_argnames=("w", "state"))
      >>> carry, aux = train.start(w, tx.init(w), x)
      >>> w, state = train.finish(train(carry, x)[0])
    """
    names = (donate_argnames,) if isinstance(donate_argnames, str) else tuple(donate_argnames)
    parameters = inspect.signature(step).parameters
    if not names or any(name not in parameters for name in names):
        raise ValueError(f"donate_argnames: expected names among {list(parameters)}, got {donate_argnames!r}.")
    return Pipelined(step, names)


class Pipelined:
    """What ``pipelined`` returns."""

    def __init__(self, step: Callable[..., Any], names: tuple[str, ...]) -> None:
        self._step, self._names = step, names
        self._programs: dict[Any, _Program] = {}
        self._signature = inspect.signature(step)
        rest = [p for name, p in self._signature.parameters.items() if name not in names]
        self._rest = self._signature.replace(parameters=rest)

    def start(self, *args: Any, **kwargs: Any) -> tuple[Carry, Aux]:
        """The gradients of the first batch; ``args`` are the step's."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        carried = jax.tree.map(_as_array, tuple(bound.arguments[name] for name in self._names))
        rest = {name: x for name, x in bound.arguments.items() if name not in self._names}
        program = self._program(carried, rest)
        made, now = program.start(jax.tree.leaves(carried), program.arrays(rest))
        values = program.pending(jax.tree.leaves(carried), made)
        return Carry(values, 0, program), Aux(program.aux(now, program.now), None, 0)

    def __call__(self, carry: Carry, *args: Any, **kwargs: Any) -> tuple[Carry, Aux]:
        """The pending update, then the gradients of the next batch; ``args`` are the step's without what is carried."""
        old = self._of(carry)
        bound = self._rest.bind(*args, **kwargs)
        bound.apply_defaults()
        program = self._program(old.carried, dict(bound.arguments))
        train = old.train(program)
        carry.used = True
        values, late, now = train(carry.values, program.arrays(dict(bound.arguments)))
        number = carry.step + 1
        return Carry(values, number, program), Aux(program.aux(now, program.now), old.aux(late, old.late), number)

    def finish(self, carry: Carry, *, with_late: bool = False) -> Any:
        """The carried arguments after the pending update: their tuple, or the only one.

        ``with_late``: with them, what ``aux.late`` of a further call would have.
        """
        program = self._of(carry)
        carry.used = True
        results, late = program.finish(carry.values)
        results = program.results(results)
        results = results[0] if len(results) == 1 else results
        return (results, program.aux(late, program.late)) if with_late else results

    def params(self, carry: Carry) -> Any:
        """The current parameters, after the pending update, which stays pending: the argument ``params``, or the
        attribute of that name of the only argument that has one."""
        program = self._of(carry)
        carried = program.carried
        found = [k for k, name in enumerate(self._names) if name == "params"]
        owners = [k for k, x in enumerate(carried) if hasattr(x, "params")]
        if not found and len(owners) != 1:
            raise ValueError(f"params: no carried argument is called 'params' or has that attribute: {self._names}.")
        place = (found or owners)[0]
        return program.look(carry.values, place, bool(found))

    def whole_step(self, *args: Any, **kwargs: Any) -> Any:
        """``start`` and a call, of the step's arguments: what ``jax_offload.placement`` traces."""
        carry, _ = self.start(*args, **kwargs)
        rest = {name: x for name, x in self._signature.bind(*args, **kwargs).arguments.items()}
        return self(carry, **{name: x for name, x in rest.items() if name not in self._names})

    def _of(self, carry: Carry) -> _Program:
        if not isinstance(carry, Carry):
            raise TypeError(f"carry: expected what start or a call has returned, got a {type(carry).__name__}.")
        if carry.used:
            raise ValueError("carry: was used already, and its arrays are gone; use what the last call has returned.")
        return carry.program

    def _program(self, carried: tuple[Any, ...], rest: Mapping[str, Any]) -> _Program:
        leaves, treedef = jax.tree.flatten((carried, dict(rest)))
        key = treedef, tuple(_type(x) if _is_traced(x) else x for x in leaves)
        if key not in self._programs:
            self._programs[key] = _Program(self._step, self._names, carried, rest)
        return self._programs[key]


class _Program:
    """A step, traced for arguments of some types, cut at its update, and put together the other way round."""

    def __init__(
        self, step: Callable[..., Any], names: tuple[str, ...], carried: tuple[Any, ...], rest: Mapping[str, Any]
    ) -> None:
        rest = dict(rest)
        leaves, self.treedef = jax.tree.flatten(carried)
        others, rest_tree = jax.tree.flatten(rest)
        self.is_array = [_is_traced(x) for x in others]
        self.carried = jax.tree.unflatten(self.treedef, [_abstract(x) for x in leaves])
        structure: list[Any] = []

        def call(leaves: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
            given = iter(arrays)
            filled = [next(given) if a else x for x, a in zip(others, self.is_array, strict=True)]
            named = dict(zip(names, jax.tree.unflatten(self.treedef, leaves), strict=True))
            result = step(**named, **jax.tree.unflatten(rest_tree, filled))
            structure[:] = [result if isinstance(result, tuple) else (result,)]
            return jax.tree.leaves(structure[0])

        arrays = [x for x, a in zip(others, self.is_array, strict=True) if a]
        closed, _ = jaxpr_of(call, [on_a_mesh(x) for x in leaves], arrays)
        places, self.others = _matched(names, carried, structure[0])
        del structure[:]
        cut = cut_step(closed)
        inputs = cut.program.inputs[len(cut.program.consts) :]
        self.cut, self.inputs, self.arrays_in = cut, inputs[: len(leaves)], inputs[len(leaves) :]
        outputs = cut.program.outputs
        self.outputs = [outputs[k] for k in places]
        late = {v for part in (cut.update, cut.after) for v in part.outputs}
        if not any(v in late for v in self.outputs if not isinstance(v, Literal)):
            raise ValueError(
                f"step: returns {', '.join(names)} as they were, or without the update's results; return new ones."
            )
        flat = [k for k in range(len(outputs)) if k not in {*places}]
        self.late = [k for k in flat if not isinstance(v := outputs[k], Literal) and v in late]
        self.now = [k for k in flat if k not in self.late]
        names_of = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in
                    jax.tree_util.tree_flatten_with_path(dict(zip(names, carried, strict=True)))[0]]  # fmt: skip
        self._key(names_of, late)
        self.look = jax.jit(self._look, static_argnums=(1, 2))
        self._trains: dict[int, Any] = {}

    def _key(self, names_of: list[str], late: set[Var]) -> None:
        """What is pending: all that the late parts read, or that is returned by them as it is."""
        cut = self.cut
        made = {v for part in (cut.update, cut.after) for v in part.outputs}
        read = [v for part in (cut.update, cut.after) for v in part.inputs if v not in made]
        read += [v for v in self.outputs if not isinstance(v, Literal) and v not in late]
        consts = {*cut.program.inputs[: len(cut.program.consts)]}
        named = dict(zip(self.inputs, names_of, strict=True))
        others = [v for v in dict.fromkeys(read) if v not in named and v not in consts]
        named |= {v: f"{_PENDING}{k:04d}" for k, v in enumerate(others)}
        self.keys = {v: named[v] for v in dict.fromkeys(read) if v not in consts}
        self.made = others
        self.start = Jitted(self._before, {})
        self._finish = Jitted(lambda own, others: self._late(own | others), {"donate_argnums": 0})

    def arrays(self, rest: Mapping[str, Any]) -> list[Any]:
        return [x for x, a in zip(jax.tree.leaves(dict(rest)), self.is_array, strict=True) if a]

    def pending(self, leaves: Sequence[Any], made: Sequence[Any]) -> dict[str, Any]:
        values = dict(zip(self.inputs, leaves, strict=True)) | dict(zip(self.made, made, strict=True))
        return {name: values[v] for v, name in self.keys.items()}

    def finish(self, values: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """What is pending has no successor whose buffer it could be: it is not donated."""
        others = {name: x for name, x in values.items() if name.startswith(_PENDING)}
        return self._finish({name: x for name, x in values.items() if name not in others}, others)

    def results(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        return jax.tree.unflatten(self.treedef, leaves)

    def aux(self, values: Sequence[Any], places: Sequence[int]) -> Any:
        known = dict(zip(places, values, strict=True))
        filled = jax.tree.map(known.get, self.others)
        return filled[0] if len(filled) == 1 else filled

    def train(self, following: _Program) -> Any:
        """The late part of this one, then the first part of the one that follows: the same, where types are."""
        if id(following) not in self._trains:

            def train(values: dict[str, Any], arrays: Sequence[Any]) -> Any:
                leaves, late = self._late(values)
                made, now = following._before(leaves, arrays)
                return following.pending(leaves, made), late, now

            self._trains[id(following)] = Jitted(train, {"donate_argnums": 0})
        return self._trains[id(following)]

    def _before(self, leaves: Sequence[Any], arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        cut, program = self.cut, self.cut.program
        env = dict(zip(program.inputs, [*program.consts, *leaves, *arrays], strict=True))
        _run(cut, env, 0)
        return [env[v] for v in self.made], [_value(env, program.outputs[k]) for k in self.now]

    def _late(self, values: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        cut, program = self.cut, self.cut.program
        env = {v: values[name] for v, name in self.keys.items()}
        env |= dict(zip(program.inputs[: len(program.consts)], program.consts, strict=True))
        _run(cut, env, 1)
        _run(cut, env, 2)
        return [_value(env, v) for v in self.outputs], [_value(env, program.outputs[k]) for k in self.late]

    def _look(self, values: dict[str, Any], place: int, whole: bool) -> Any:
        result = self.results(self._late(values)[0])[place]
        return result if whole else result.params


def _run(cut: Cut, env: dict[Var, Any], part: int) -> None:
    s = cut.parts[part]
    env.update(zip(s.outputs, s.run(*(env[v] for v in s.inputs)), strict=True))


def _value(env: Mapping[Var, Any], v: Any) -> Any:
    return as_array(v) if isinstance(v, Literal) else env[v]


def _is_traced(x: Any) -> bool:
    """Whether ``jit`` would trace ``x``: arrays and numbers."""
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct | bool | int | float | complex)


def _as_array(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def _type(x: Any) -> Any:
    if not hasattr(x, "dtype"):
        return type(x)
    return tuple(x.shape), x.dtype, getattr(x, "weak_type", False), getattr(x, "sharding", None)


def _abstract(x: Any) -> Any:
    sharding, weak = getattr(x, "sharding", None), getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)


def _types(tree: Any) -> Any:
    arrays = map(_as_array, jax.tree.leaves(tree))
    return jax.tree.structure(tree), [(tuple(x.shape), x.dtype) for x in arrays]


def _matched(names: Sequence[str], carried: Sequence[Any], results: tuple[Any, ...]) -> tuple[list[int], Any]:
    """The numbers of the result's leaves that are the next values of what is carried, and the tree of the others."""
    number = iter(range(len(jax.tree.leaves(results))))
    numbered = [jax.tree.map(lambda _: next(number), result) for result in results]
    types = [_types(result) for result in results]
    places: list[int] = []
    taken: set[int] = set()
    for name, x in zip(names, carried, strict=True):
        want = _types(x)
        found = [k for k, each in enumerate(types) if each == want and k not in taken]
        alike = [other for other, y in zip(names, carried, strict=True) if _types(y) == want]
        expected = sum(each == want for each in types)
        if not found or expected > len(alike):
            what = "no result has" if not found else f"{expected} results have"
            raise ValueError(
                f"step: {what} the tree, shapes and dtypes of the carried argument {name!r}; return its next value, "
                "among the results and once."
            )
        taken.add(found[0])
        places += jax.tree.leaves(numbered[found[0]])
    return places, tuple(each for k, each in enumerate(numbered) if k not in taken)
