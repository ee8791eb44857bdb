"""The rows of a step of yours, compiled for a chip."""

from __future__ import annotations

import dataclasses
import inspect as signatures
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jax_offload._analysis.answer import Row
from jax_offload._analysis.inspection import inspect
from jax_offload._analysis.targets import target_of
from jax_offload._base.around import shardings_of
from jax_offload._base.paths import key_of
from jax_offload._interop.jit import jit
from jax_offload._interop.pipelined import pipelined
from jax_offload._report.callables import replaced, unwrapped

_RUN: dict[str, Callable[..., Any]] = {"jax.jit": jax.jit, "jo.jit": jit, "jo.pipelined": pipelined}


class Steps:
    """Makes the step for each row, and compiles it.

    Attributes:
      make: the function that makes a step of an optimizer and ``args``.
      target: the chip to compile for; ``None`` where nothing is compiled.
    """

    def __init__(self, make: Callable[..., Any], args: Sequence[Any], target: str | None) -> None:
        self.make, self.args, self.target = make, args, target
        self.missing = "" if target is None else target_of(target).missing
        self._donated: tuple[int, ...] = ()

    def parameters(self, inner: optax.GradientTransformation) -> Any:
        """The parameters, abstract, that ``make`` hands to the optimizer's ``init``; it is made resident for that."""
        seen: list[Any] = []

        def init(params: Any) -> Any:
            places = shardings_of(params)
            seen.append(jax.tree_util.tree_map_with_path(
                lambda path, x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=places.get(key_of(path))), params
            ))  # fmt: skip
            return inner.init(params)

        tx = optax.GradientTransformationExtraArgs(init, optax.with_extra_args_support(inner).update)
        step, args = self._made(tx, "resident")
        if not seen:
            raise ValueError(
                "make: it has made no state of the optimizer that it is given. Return (step, params, state, ...) with "
                "state = jo.abstract_state(tx, params)."
            )
        self._donated = tuple(replaced(args, jax.eval_shape(step, *args)))
        return seen[0]

    @property
    def compiles(self) -> bool:
        """Whether there is a target whose compiler is installed."""
        return self.target is not None and not self.missing

    @property
    def advice(self) -> str:
        """What to do where it does not compile."""
        wheel = f"{self.missing} is not installed; " if self.missing else ""
        return f"{wheel}pip install 'jax_offload[aot]' and target=, such as \"h100\", give each row's peak and time"

    def compiled(self, row: Row, tx: Any, run: str) -> Row:
        """A row with the compiler's figures, where there is a target and its compiler."""
        if self.target is None or not self.compiles:
            return row
        step, args = self._made(tx, row.name)
        try:
            found = inspect(_RUN[run](step, donate_argnums=self._donated), *args, target=self.target)
        except jax.errors.JaxRuntimeError as error:  # a TPU's compiler gives up where memory does not suffice
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return dataclasses.replace(row, compiled=self.target, fits=False, why="more than the compiler can place")
        gradients = found.parts.get("gradients", 0)
        rest = found.peak - row.parameters - row.state - (row.window or 0) - gradients
        row = dataclasses.replace(
            row, compiled=self.target, total=found.peak, gradients=max(0, gradients + min(0, rest)),
            activations=max(0, rest), host=max(row.host, found.host), hidden_from=None,
        )  # fmt: skip
        time = found.timeline
        if time is None or found.program:  # one of several programs, and time is theirs together
            return row
        share = time.exposed / time.compute if time.compute else None
        return dataclasses.replace(
            row, loaded=found.loaded, stored=found.stored, added=time.exposed, overhead=share, link=time.link
        )

    def _made(self, tx: Any, name: str) -> tuple[Any, tuple[Any, ...]]:
        """A step for one row, and its arguments."""
        try:
            got = self.make(tx, *self.args)
        except ValueError as error:
            raise ValueError(
                f"make(tx) is called once for each row, here for {name!r}, and raises {error} Its state has to be the "
                "one of the tx that it is given: jo.abstract_state(tx, params)."
            ) from error
        if not isinstance(got, tuple | list) or len(got) < 2 or not callable(got[0]):
            what = f" that begins with a {type(got[0]).__name__}" if isinstance(got, tuple | list) and got else ""
            raise TypeError(
                "plan(make, tx): make(tx) is to return (step, *arguments) with the state from "
                f"jo.abstract_state(tx, params); got a {type(got).__name__}{what}."
            )
        step, *args = got
        try:
            signatures.signature(step).bind(*args)
        except TypeError as error:
            raise TypeError(
                f"plan(make, tx): make(tx) returned a step that cannot be called with the {len(args)} argument(s) "
                f"beside it: {error}. Fix: return step, params, state, batch, not one tuple of them."
            ) from error
        return unwrapped(step), tuple(args)
