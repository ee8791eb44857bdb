"""The rows of a step's forecast as a compiler has them, for a chip that need not be there."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_offload._analysis.compiled import Compiled, compiled, of_first
from jax_offload._analysis.driven import First
from jax_offload._analysis.option import Option
from jax_offload._analysis.schedule import Program
from jax_offload._analysis.setting import Setting, priced
from jax_offload._analysis.timeline import played
from jax_offload._base.arrays import is_traced
from jax_offload._base.jaxprs import ClosedJaxpr, jax_fun
from jax_offload._base.memory import on_a_mesh
from jax_offload._base.shardings import sharding_of
from jax_offload._emit.find import emitted
from jax_offload._interop.jit import Jitted
from jax_offload._interop.pipelined import Pipelined, pipelined
from jax_offload._peak.donated import successors

DRIVEN = "as given"
TURNED = ("jo.pipelined", "gradients too")
GIVES_UP = "the compiler gives up, as"
ESTIMATED = "is estimated, not compiled, as the step cannot be turned round"


def compiled_labels(target: str) -> tuple[tuple[str, str], ...]:
    return (
        ("each way, window", "exact"),
        ("peak, host", f"compiled for {target}, not run"),
        ("hidden, added", "simulated from the schedule"),
    )


@dataclasses.dataclass(frozen=True)
class Compiler:
    """What compiles a step's rows.

    Attributes:
      target: the chip.
      plain: the step, traced; ``leaves`` are its flat arguments, abstract.
      resident: the step with its state on the device, of ``there``.
      setting: where it runs.
      driven: the first of its programs, where the host's cores update a part; its row is called ``DRIVEN``.
      turned: by the names of their rows, what ``jo.pipelined`` makes of the step, with its ``args``, of which the last
        are those with names where it is ``named``; without it, a row stays estimated.
    """

    target: str
    plain: ClosedJaxpr
    leaves: Sequence[Any]
    resident: Callable[..., Any]
    there: Sequence[Any]
    setting: Setting
    turned: Mapping[str, Pipelined]
    args: Sequence[Any]
    named: bool = False
    driven: First | None = None

    def row(self, option: Option) -> Option:
        """An estimated row with the compiler's figures."""
        if not self.compiles(option.name):
            return option
        try:
            return _with(option, self._compiled(option.name), self.setting)
        except (TypeError, ValueError) as error:
            if option.name not in TURNED:
                raise
            return dataclasses.replace(option, why_not=f"{option.name} {ESTIMATED}: {error}")
        except jax.errors.JaxRuntimeError as error:  # a TPU's compiler gives up where memory does not suffice
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            said = f"{option.name}: {GIVES_UP} {self.target} has too little memory; its figures here are estimates"
            return dataclasses.replace(option, fits=False, why_not=said)

    def compiles(self, name: str) -> bool:
        """Whether that row can be compiled."""
        return name not in TURNED or name in self.turned

    def _compiled(self, name: str) -> Compiled:
        if name in TURNED:
            *args, names = self.args if self.named else (*self.args, {})
            return compiled(self.turned[name], tuple(args), names, self.target)
        if name == DRIVEN and self.driven is not None:
            return of_first(self.driven, self.target)
        at_home = name == "resident"
        step: Any = self.resident if at_home else jax_fun(self.plain)
        given = [on_a_mesh(x) for x in (self.there if at_home else self.leaves)]
        nexts = successors(emitted(self.plain).jaxpr, len(given))
        # what is returned in the place of an argument lies where that does; of the others XLA decides
        out = [sharding_of(given[nexts[k]]) if k in nexts else None for k in range(len(self.plain.jaxpr.outvars))]
        how = {"donate_argnums": tuple(sorted(nexts.values())), "out_shardings": out}
        jitted = Jitted(step, how) if name == "jo.jit" else jax.jit(step, **how)
        return compiled(jitted, tuple(given), {}, self.target)


def turned_round(
    step: Any, base: Callable[..., Any], args: Sequence[Any], plain: ClosedJaxpr, *, both: bool = False
) -> dict[str, Pipelined]:
    """The rows in which a step is turned round, by their names: what was given, with ``both`` the other one too, or
    what ``jo.pipelined`` makes of the step itself, ``base``. Carried are the arguments all of whose arrays are handed
    on.

    None where there are none of these, or where its arguments have no names.
    """
    if isinstance(step, Pipelined):
        return {TURNED[h]: step.with_gradients(on_host=h) for h in (False, True) if both or h is step.on_host}
    try:
        given = inspect.signature(base).bind(*args)
    except (TypeError, ValueError):
        return {}
    counts = {name: sum(map(is_traced, jax.tree.leaves(x))) for name, x in given.arguments.items()}
    kept = {*successors(emitted(plain).jaxpr, sum(counts.values())).values()}
    carried: list[str] = []
    static: list[str] = []
    at = 0
    for name, n in counts.items():
        if n and kept.issuperset(range(at, at + n)):
            carried.append(name)
        elif not n:
            static.append(name)
        at += n
    if not carried or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in given.signature.parameters.values()):
        return {}
    names: dict[str, Any] = {"donate_argnames": carried, "static_argnames": static}
    return dict(zip(TURNED, (pipelined(base, **names), pipelined(base, gradients="host", **names)), strict=True))


_OF_ALL_PROGRAMS = ("exposed", "overhead", "hidden", "hidden_from", "dram", "cores", "beside")


def _with(given: Option, program: Compiled, setting: Setting) -> Option:
    option = dataclasses.replace(given, exposed_range=None, overhead_range=None)  # it is one number now
    known = option.parameters + option.state + option.window
    gradients = min(option.gradients, max(0, program.peak - known))
    rest = max(0, program.peak - known - gradients)
    # of groups with a state on disk none is compiled
    peak = max(program.peak, option.parameters + option.gradients + option.state + option.window) if option.disk \
        else program.peak  # fmt: skip
    option = dataclasses.replace(
        option, peak=peak, peak_range=(peak, peak), host=program.host, gradients=gradients,
        activations=rest,
    )  # fmt: skip
    if program.program:  # one of several, and host memory and time are those of all
        own = priced(dataclasses.replace(option, host=given.host), setting, 0.0)
        return dataclasses.replace(own, **{name: getattr(given, name) for name in _OF_ALL_PROGRAMS})
    option, chip = priced(option, setting, 0.0), setting.chip or program.chip
    if chip is None:
        return option
    run = played(Program(program.text, chip, program.roles))
    hidden = max(0.0, 1 - run.exposed / run.link) if run.link else None
    exposed = run.exposed if option.link else 0.0
    return dataclasses.replace(
        option, exposed=exposed, overhead=exposed / (run.step - run.exposed), hidden=hidden, hidden_from=None
    )
