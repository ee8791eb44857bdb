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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.core import Tracer

from jax_offload._program.jaxprs import jit as jit_of_jax
from jax_offload._program.memory import sharding_of
from jax_offload._step.jit import Jitted
from jax_offload._step.rotated import Aux, Carry, Rotated, Values, array_of


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
    jit_of_jax(  # jax checks all options
        step,
        donate_argnames=donate_argnames,
        donate_argnums=donate_argnums,
        static_argnames=static_argnames,
        static_argnums=static_argnums,
    )
    names = _chosen(step, "donate_argnames", donate_argnums, donate_argnames)
    if not names:
        raise ValueError(
            f"donate_argnames: expected names among {list(inspect.signature(step).parameters)}, got "
            f"{donate_argnames!r}; name what the step carries from call to call, its parameters and state."
        )
    if gradients not in ("device", "host"):
        raise ValueError(f"gradients: expected 'device' or 'host', got {gradients!r}.")
    static = _chosen(step, "static_argnames", static_argnums, static_argnames)
    if both := {*names} & {*static}:
        raise ValueError(f"static_argnames: a carried argument cannot be static; got {sorted(both)} in both.")
    return Pipelined(step, names, static, gradients == "host")


def _chosen(
    step: Callable[..., Any], option: str, numbers: int | Sequence[int], names: str | Sequence[str]
) -> tuple[str, ...]:
    """Return the parameters that are chosen by position or by name, which jax has checked, in their own order."""
    parameters = [*inspect.signature(step).parameters.values()]
    numbers, names = [numbers] if isinstance(numbers, int) else numbers, [names] if isinstance(names, str) else names
    named = {*names, *(parameters[min(k, len(parameters) - 1)].name for k in numbers)}
    chosen = [x for x in parameters if x.name in named]
    if various := [x for x in chosen if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]:
        raise ValueError(f"{option}: {various[0]} stands for several arguments; give each a name of its own.")
    return tuple(x.name for x in chosen)


_EMPTY = inspect.Parameter.empty


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
        self, step: Callable[..., Any], names: tuple[str, ...], static: tuple[str, ...], on_host: bool = False
    ) -> None:
        self.step, self.names, self.on_host, self._static = step, names, on_host, static
        self._expected = f"expected what the last call returned, or at first the tuple ({', '.join(names)})"
        self._signature = inspect.signature(step)
        others = [x for name, x in self._signature.parameters.items() if name not in names]
        self._rest = self._signature.replace(parameters=others)
        # jax caches a ``Rotated`` for each combination of argument types, static arguments and settings
        turn = jit_of_jax(functools.partial(Rotated, self), static_argnums=(0, *range(3, 3 + len(static))))
        self.program: Callable[..., Rotated] = turn.eval_shape

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
        return self._run(*self._of_call(carry, *args, **kwargs))

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
        pending = self._checked(carry)
        if not isinstance(pending, Carry):
            return (carry, None) if with_late else carry
        leaves, late = pending.program.finish(*pending.kept)
        results = jax.tree.unflatten(pending.program.tree, leaves)
        found = results if len(results) > 1 else results[0]
        return (found, late) if with_late else found

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
        pending = self._checked(carry)
        carried = pending.program.carried.values() if isinstance(pending, Carry) else pending
        owners = [(k, "params") for k, x in enumerate(carried) if hasattr(x, "params")]
        found = [(k, "") for k, name in enumerate(self.names) if name == "params"] or owners
        if len(found) != 1:
            raise ValueError(
                f"params: no carried argument is called 'params', and {len(owners)} of {self.names} have that "
                "attribute. Fix: call the step's parameters params, or take them from train.finish(carry)."
            )
        ((place, attribute),) = found
        if isinstance(pending, Carry):
            return pending.program.look(*pending.kept, place, attribute)
        return pending[place].params if attribute else pending[place]

    def whole_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step twice with the original step's arguments: what ``jax_offload.placement`` traces."""
        carried, *others = self._given(args, kwargs)
        return self._run(self._run(carried, *others)[0], *others)

    def turned(self, *args: Any, **kwargs: Any) -> tuple[Jitted, tuple[Any, ...], dict[str, Any]]:
        """Return the call as jax compiles it, its arguments, and the types of the carried values, for ``inspect``.

        Args:
          *args, **kwargs: the arguments of a call, the first or a later one, or of the original step, which may be
            abstract.

        Raises:
          TypeError: the arguments fit neither.
        """
        carry, rest, *static = self._given(args, kwargs)
        if isinstance(carry, Carry):
            program, kept = carry.program, carry.kept
        else:
            program, leaves = self._begun(carry, rest, *static)
            kept = program.kept(leaves, rest)
        return program.train, (*kept, rest, *static), dict(sorted(program.carried.items()))  # in jax's order

    def __reduce__(self) -> Any:
        return Pipelined, (self.step, self.names, self._static, self.on_host)

    def _run(self, carry: Any, rest: Values, *static: Any) -> tuple[Carry, Aux]:
        """Call the step with a carry, or with carried arguments."""
        if isinstance(carry, Carry):
            kept, late, now, following = carry.program.train(*carry.kept, rest, *static)
            step: Any = 1 + (carry.step if isinstance(carry.step, Tracer) else int(carry.step))  # restored as an array
            return Carry(kept, step, following), Aux(now, late, step)
        program, leaves = self._begun(carry, rest, *static)
        made, given, now = program.first(leaves, rest, *static)
        return Carry((program.own(leaves), made, given), 0, program), Aux(now, None, 0)

    def _begun(self, carried: tuple[Any, ...], rest: Values, *static: Any) -> tuple[Rotated, list[Any]]:
        """Return the step rotated for arguments of these types, and the carried leaves as arrays."""
        leaves = jax.tree.leaves(carried := jax.tree.map(array_of, carried))
        return self.program(tuple(map(sharding_of, leaves)), carried, rest, *static), leaves

    def called(self, carried: tuple[Any, ...], rest: Values, *static: Any) -> Any:
        """Call the step with its carried arguments, the others by name, and the static ones."""
        given = rest | dict(zip((*self.names, *self._static), (*carried, *static), strict=True))
        ordered = {name: x for name in self._signature.parameters if (x := given.get(name, _EMPTY)) is not _EMPTY}
        call = inspect.BoundArguments(self._signature, ordered)  # pyright: ignore[reportArgumentType]
        return self.step(*call.args, **call.kwargs)

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Split arguments, of a call or the original step, into a carry or carried, others by name, and static ones."""
        if args and isinstance(args[0], Carry):
            return self._of_call(*args, **kwargs)
        try:
            given = self._signature.bind(*args, **kwargs).arguments
            return tuple(given.pop(name) for name in self.names), *self._parted(given)
        except (TypeError, KeyError) as error:
            with contextlib.suppress(TypeError):
                return self._of_call(*args, **kwargs)
            whole = ", ".join(self._signature.parameters)
            raise TypeError(f"{error}: expected the step's arguments, {whole}, or a carry and the others.") from None

    def _of_call(self, carry: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Split the arguments of a call in the same way."""
        try:
            given = self._rest.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{error}: {self._expected}, and then ({', '.join(self._rest.parameters)}).") from None
        return self._checked(carry), *self._parted(given)

    def _parted(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        rest = {name: x for name, x in given.items() if name not in self._static}
        return rest, *(given.get(name, _EMPTY) for name in self._static)  # a default may be unhashable

    def _checked(self, carry: Any) -> Any:
        """Return a carry, or the carried arguments of a first call; raise an error if it cannot be used."""
        if isinstance(carry, Carry) and carry.program.of is not self:
            raise ValueError("carry: is of another pipelined step; finish it there, and begin here with the result.")
        pending = isinstance(carry, Carry)
        found: Any = carry if pending or len(self.names) > 1 else (carry,)
        if not pending and not (isinstance(found, tuple | list) and len(found) == len(self.names)):
            count = f" of {len(carry)}" if isinstance(carry, tuple | list) else ""
            raise TypeError(f"carry: {self._expected}, got a {type(carry).__name__}{count}.")
        values = jax.tree.leaves(carry.kept[:2] if pending else found)  # the second call donates the first call's
        if any(x.is_deleted() for x in values if isinstance(x, jax.Array) and not isinstance(x, Tracer)):
            raise ValueError(
                "carry: was used already, or the one that it came from, and its arrays are gone; use what the last "
                "call has returned."
            )
        return carry if pending else tuple(found)
