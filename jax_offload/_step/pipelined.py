"""The software-pipelined training loop: the update for a batch's gradients runs in the next batch's forward pass.

An update that needs all gradients, such as clipping by their norm, cannot run while the backward pass makes them. But
the next step can begin with it: the norm is known by then, and each layer's update can run just before the layer's
forward pass, while the state of its neighbors moves. The result is exact: every forward pass sees the parameters that
it would see in the plain loop. In return the gradients live from one call to the next.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.core import Tracer

from jax_offload._program.jaxprs import jax_fun
from jax_offload._program.jaxprs import jit as jit_of_jax
from jax_offload._rewrite.inlined import traced_step
from jax_offload._step.jit import Jitted
from jax_offload._step.rotated import Aux, Carry, Rotated, Types, array_of


def pipelined(
    step: Callable[..., Any],
    *,
    donate_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    gradients: Literal["device", "host"] = "device",
) -> Pipelined:
    """Run each batch's update in the next batch's forward pass, which hides the transfers of the optimizer state.

    Use it for optimizers that need all gradients before they can update any parameter, such as clipping by the global
    norm. Otherwise ``jax_offload.jit`` hides transfers in the backward pass. The step is an ordinary one, unchanged::

        train = jo.pipelined(step, donate_argnums=(0, 1))
        carry = params, state
        for batch in batches:
            carry, aux = train(carry, batch)  # the pending update, then the gradients of this batch
        params, state = train.finish(carry)   # the last pending update: before a checkpoint, and at the end

    The numbers equal the plain loop's. ``aux.now`` is whatever the step returns besides the carried values; the
    part of it that needs the new parameters arrives one call later, in ``aux.late``. A hyperparameter in the state that
    changes between two calls would act on the pending update: call ``finish`` first, and continue with its result.

    Args:
      step: a function of parameters, state and a batch, as for ``jax_offload.jit``. It returns the next value of each
        carried argument, with the same tree, shapes and dtypes, in any order and in a tuple with whatever else it
        returns. If several arguments look alike, such as parameters and a target network, the update tells which result
        is which, and the results must have the arguments' order. If doubt remains, an error asks for a dict whose keys
        are the names of the carried arguments.
      donate_argnames: the names of the arguments that are carried from call to call, as for ``jax.jit``. They are
        donated. The first call takes them as a tuple in the order of the step's parameters, and ``finish`` returns such
        a tuple; a single argument is the carry itself.
      donate_argnums: the same by position.
      static_argnames: the names of arguments that are not arrays, as for ``jax.jit``.
      static_argnums: the same by position.
      gradients: where the gradients wait. With ``"host"``, gradients of 64 KiB and more wait in pinned host
        memory, where the backward pass stores them as it makes them. The peak falls by about their bytes, and the link
        carries them once in each direction. Use it if a device is too small, or if the forward pass is long enough to
        hide them (docs/step.md).

    Returns:
      A ``types.Pipelined``: the call itself, ``finish``, and ``params``, the current parameters.

    Raises:
      ValueError: a name or position is not a parameter of the step, or nothing is carried. At the first call: the step
        has no visible update, does not return what it carries, leaves in doubt which result is which, or calls the loss
        in its update.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> tx = jo.offload(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
      >>> def step(w, state, x):
      ...     loss, grads = jax.value_and_grad(lambda w: jnp.tanh(x @ w).mean())(w)
      ...     return *jo.update_params(tx, grads, state, w), loss
      >>> w, x = jax.device_put((jnp.ones((256, 256)), jnp.ones((2, 256))), jax.devices()[0])
      >>> train = jo.pipelined(step, donate_argnames=("w", "state"))
      >>> carry, aux = train((w, tx.init(w)), x)
      >>> w, state = train.finish(train(carry, x)[0])
    """
    step = step._fun if isinstance(step, Jitted) else step  # it rewrites the whole, turned round
    given = {"donate_argnames": donate_argnames, "donate_argnums": donate_argnums}
    jit_of_jax(step, **given, static_argnames=static_argnames, static_argnums=static_argnums)  # it checks all of them
    carried = _chosen(step, "donate_argnames", donate_argnums, donate_argnames)
    if not carried:
        raise ValueError(
            f"donate_argnames: expected names among {list(inspect.signature(step).parameters)}, got "
            f"{donate_argnames!r}; name what the step carries from call to call, its parameters and state."
        )
    if gradients not in ("device", "host"):
        raise ValueError(f"gradients: expected 'device' or 'host', got {gradients!r}.")
    static = _chosen(step, "static_argnames", static_argnums, static_argnames)
    if both := {*carried} & {*static}:
        raise ValueError(f"static_argnames: a carried argument cannot be static; got {sorted(both)} in both.")
    return Pipelined(step, carried, static, on_host=gradients == "host")


def _chosen(
    step: Callable[..., Any], option: str, numbers: int | Sequence[int], names: str | Sequence[str]
) -> tuple[str, ...]:
    """Return the parameters that are chosen by position or by name, which jax has checked, in their own order."""
    parameters = inspect.signature(step).parameters
    places = (numbers,) if isinstance(numbers, int) else numbers
    wanted = {*([*parameters][k] for k in places), *((names,) if isinstance(names, str) else names)}
    chosen = tuple(name for name in parameters if name in wanted)
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    if various := [str(parameters[name]) for name in chosen if parameters[name].kind in kinds]:
        raise ValueError(f"{option}: {various[0]} stands for several arguments; give each a name of its own.")
    return chosen


class Pipelined:
    """A step that runs each update in the next batch's forward pass, as ``jax_offload.pipelined`` returns it.

    Args:
      step: the original step.
      names: the names of the carried arguments.
      static: the names of the static arguments.
      on_host: whether gradients wait in pinned host memory.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> tx = jo.offload(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
      >>> def step(params, state, x):
      ...     return jo.update_params(tx, jax.grad(lambda w: jnp.tanh(x @ w).mean())(params), state, params)
      >>> params, x = jax.device_put((jnp.ones((256, 256)), jnp.ones((2, 256))), jax.devices()[0])
      >>> train = jo.pipelined(step, donate_argnums=(0, 1))
      >>> carry, aux = train((params, tx.init(params)), x)
      >>> train.params(carry).shape  # to evaluate; the update stays pending
      (256, 256)
      >>> params, state = train.finish(carry)
    """

    def __init__(
        self, step: Callable[..., Any], names: tuple[str, ...], static: tuple[str, ...], *, on_host: bool = False
    ) -> None:
        self.step, self._names, self._static, self.on_host = step, names, static, on_host
        self._signature = inspect.signature(step)
        self._rest = self._signature.replace(
            parameters=[p for name, p in self._signature.parameters.items() if name not in names]
        )
        of_static = range(2, 2 + len(static))
        self._by_name = jit_of_jax(self._loaded, static_argnums=of_static)
        self._start = Jitted(self._before, {"static_argnums": of_static})
        self._programs: dict[Any, Rotated] = {}

    def __call__(self, carry: Any, *args: Any, **kwargs: Any) -> tuple[Carry, Aux]:
        """Run the pending update, then compute the gradients of the next batch.

        Args:
          carry: what the last call returned; for the first call, a tuple of the carried arguments in the order of the
            step's parameters, as ``finish`` returns them, or the only one. It is donated (the first call's arguments by
            the second call or by ``finish``), so use it once.
          *args: the step's arguments without the carried ones.
          **kwargs: the same by name.

        Returns:
          The next carry, and an ``Aux``: ``now`` belongs to this batch, ``late`` to the batch before.

        Raises:
          TypeError: ``carry`` is neither of these, or another argument is neither an array nor static.
          ValueError: ``carry`` was used already, or belongs to another step; or the step cannot be pipelined, as
            ``pipelined`` says.
        """
        try:
            rest = self._rest.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(
                f"{error}: expected what the last call returned, or at first the tuple ({', '.join(self._names)}), and "
                f"then ({', '.join(self._rest.parameters)})."
            ) from error
        return self._run(carry, *self._parted(rest))

    def _run(self, carry: Any, rest: Mapping[str, Any], static: Sequence[Any]) -> tuple[Carry, Aux]:
        if not isinstance(carry, Carry):
            carried = jax.tree.map(array_of, self._carried(carry))
            leaves = jax.tree.leaves(carried)
            produced, given, now, program = self._start(Types.of(carried), (leaves, rest), *static)
            return Carry((program.own(leaves), produced, given), 0, program), Aux(now, None, 0)
        kept, late, now, program = self._of(carry).train(*carry.kept, rest, *static)
        carry.used, number = True, _number(carry.step) + 1
        return Carry(kept, number, program), Aux(now, late, number)

    def finish(self, carry: Any, *, with_late: bool = False) -> Any:
        """Run the pending update alone: before an evaluation or a checkpoint, and at the end.

        Args:
          carry: what the last call returned, which is donated. Carried arguments have no pending update and are
            returned unchanged.
          with_late: whether to also return the ``aux.late`` that a further call would give.

        Returns:
          The carried arguments, as a tuple or as the only one; with ``with_late`` a pair of these and the rest.

        Raises:
          TypeError: ``carry`` is neither a carry nor the carried arguments.
          ValueError: ``carry`` was used already, or belongs to another step.
        """
        if not isinstance(carry, Carry):
            self._carried(carry)
            return (carry, None) if with_late else carry
        program = self._of(carry)
        carry.used = True
        leaves, late = program.finish(*carry.kept)
        results = jax.tree.unflatten(program.types.tree, leaves)
        results = results[0] if len(results) == 1 else results
        return (results, late) if with_late else results

    def params(self, carry: Any) -> Any:
        """Return the current parameters after the pending update, which stays pending.

        Args:
          carry: what the last call returned, or carried arguments; it remains usable.

        Returns:
          The carried argument ``params``, or the attribute of that name of the only carried argument that has it.

        Raises:
          TypeError: ``carry`` is neither a carry nor the carried arguments.
          ValueError: ``carry`` was used already or belongs to another step, or no carried argument is or has
            ``params``.
        """
        program = self._of(carry) if isinstance(carry, Carry) else None
        carried = self._carried(carry) if program is None else program.types.carried
        if "params" in self._names:
            owner, attribute = self._names.index("params"), None
        else:
            owners = [k for k, x in enumerate(carried) if hasattr(x, "params")]
            if len(owners) != 1:
                raise ValueError(
                    f"params: no carried argument is called 'params', and {len(owners)} of {self._names} have that "
                    "attribute. Fix: call the step's parameters params, or take them from train.finish(carry)."
                )
            owner, attribute = owners[0], "params"
        if program is not None:
            return program.look(*carry.kept, owner, attribute)
        return getattr(carried[owner], attribute) if attribute else carried[owner]

    def whole_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step twice with the original step's arguments: what ``jax_offload.placement`` traces."""
        carried, rest, static = self._given(args, kwargs)
        carry, _ = self._run(carried[0] if len(carried) == 1 else carried, rest, static)
        return self._run(carry, rest, static)

    def turned(self, *args: Any, **kwargs: Any) -> tuple[Jitted, tuple[Any, ...], dict[str, Any]]:
        """Return the call as jax compiles it, its arguments, and the types of the carried values, for ``inspect``.

        Args:
          *args, **kwargs: the arguments of a call, the first or a later one, or of the original step, which may be
            abstract.

        Raises:
          TypeError: the arguments fit neither.
        """
        if args and isinstance(args[0], Carry):
            program, kept = self._of(args[0]), args[0].kept
            rest, static = self._parted(self._rest.bind(*args[1:], **kwargs).arguments)
        else:
            carried, rest, static = self._given(args, kwargs)
            carried = jax.tree.map(array_of, carried)
            program = self._program(Types.of(carried), rest, static)
            kept = program.kept(jax.tree.leaves(carried), jax.tree.leaves(rest))
        carried = dict(zip(self._names, program.types.carried, strict=True))
        return program.train, (*kept, rest, *static), carried

    def _given(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
        """Return the carried arguments of the original step, the others, and the static ones."""
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            with contextlib.suppress(TypeError, IndexError):  # of a first call
                rest = self._rest.bind(*args[1:], **kwargs).arguments
                return self._carried(args[0]), *self._parted(rest)
            raise TypeError(
                f"{error}: expected the step's arguments, {', '.join(self._signature.parameters)}, or a carry and the "
                "others."
            ) from error
        if missing := [name for name in self._names if name not in given]:
            raise TypeError(f"step: {', '.join(missing)}: missing; carried arguments have no default.")
        return tuple(given[name] for name in self._names), *self._parted(given)

    def _carried(self, carry: Any) -> tuple[Any, ...]:
        """Return the carried arguments of a first call."""
        values = [carry] if len(self._names) == 1 else carry
        if not isinstance(values, (tuple, list)) or len(values) != len(self._names):
            count = f" of {len(carry)}" if isinstance(carry, (tuple, list)) else ""
            raise TypeError(
                f"carry: expected what the last call returned, or at first the tuple ({', '.join(self._names)}), got a "
                f"{type(carry).__name__}{count}."
            )
        _check_unused(values)
        return tuple(values)

    def _of(self, carry: Carry) -> Rotated:
        if not any(carry.program is program for program in self._programs.values()):
            raise ValueError("carry: is of another pipelined step; finish it there, and begin here with the result.")
        _check_unused(carry.kept[0], carry.used)
        return carry.program

    def _parted(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return the arguments that are neither carried nor static, and the static ones, ``empty`` if left out."""
        rest = {name: x for name, x in given.items() if name not in (*self._names, *self._static)}
        return rest, [given.get(name, inspect.Parameter.empty) for name in self._static]

    def _loaded(self, *given: Any) -> Any:
        """Call the step of its carried arguments, the others by name, and the static ones."""
        closed, result = traced_step(self._called, *given, static=range(2, len(given)))
        return jax.tree.unflatten(result, jax_fun(closed)(*jax.tree.leaves(given[:2])))

    def _called(self, carried: Sequence[Any], rest: Mapping[str, Any], *static: Any) -> Any:
        fixed = {name: x for name, x in zip(self._static, static, strict=True) if x is not inspect.Parameter.empty}
        every = dict(zip(self._names, carried, strict=True)) | fixed | dict(rest)
        in_order = {name: every[name] for name in self._signature.parameters if name in every}
        bound = inspect.BoundArguments(self._signature, in_order)  # pyright: ignore[reportArgumentType]
        return self.step(*bound.args, **bound.kwargs)

    def _program(self, types: Types, rest: Mapping[str, Any], static: Sequence[Any]) -> Rotated:
        """The step turned round. jax keeps one trace for each program: for arguments of the same types,
        static arguments, settings of jax."""
        traced = self._by_name.trace(types.carried, rest, *static)
        key = traced.jaxpr, types
        if key not in self._programs:
            how = {"statics": len(static), "gradients_on_host": self.on_host}
            self._programs[key] = Rotated(traced, types, self._names, self._program, **how)
        return self._programs[key]

    def _before(self, types: Types, given: tuple[Sequence[Any], Mapping[str, Any]], *static: Any) -> Any:
        """Run the first part of the step, without an update to run."""
        program = self._program(types, given[1], static)
        return *program.before(given[0], jax.tree.leaves(given[1])), program

    def __reduce__(self) -> Any:
        return functools.partial(Pipelined, on_host=self.on_host), (self.step, self._names, self._static)


def _check_unused(values: Any, used: bool = False) -> None:
    """Raise ``ValueError`` if a carry was used: the second call donates the values of the first one, too."""
    arrays = (x for x in jax.tree.leaves(values) if isinstance(x, jax.Array) and not isinstance(x, Tracer))
    if used or any(x.is_deleted() for x in arrays):
        raise ValueError(
            "carry: was used already, or the one that it came from, and its arrays are gone; use what the last call "
            "has returned."
        )


def _number(x: Any) -> Any:
    """The number of a step, of an array too: a carry may have been saved and restored."""
    return x if isinstance(x, Tracer) else operator.index(x)
