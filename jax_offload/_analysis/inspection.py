"""What an executable really does with host memory: ``inspect``, and ``verify`` for a user's own test."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_offload._analysis.chips import Chip
from jax_offload._analysis.chips import chip as chip_of
from jax_offload._analysis.compiled import Compiled, compiled
from jax_offload._analysis.driven import SAYS
from jax_offload._analysis.found import Loop, Problem, Transfer, loops, problems, transfers
from jax_offload._analysis.schedule import UNKNOWN, Program
from jax_offload._analysis.timeline import Timeline, played
from jax_offload._analysis.units import in_seconds

_MIB = 2**20
_UNSEEN_ON_A_CPU = (
    "whether the state streams or is on the device all at once, and arithmetic on the host: jax on a CPU leaves out "
    'the copies. Compile for a chip that need not be there: target="h200"'
)


@dataclasses.dataclass(frozen=True, eq=False)
class Inspection:
    """What a compiled step does with device memory, host memory and the link between them; ``print`` it.

    ``jax_offload.inspect`` returns it. Figures are bytes on each device; the printed tables have MiB.

    Attributes:
      target: the chip for which the step was compiled, or the platform.
      peak: the peak of device memory in the step, from XLA's compiler.
      parts: the peak by kind: parameters, gradients, activations, window and others. They are worked out from the
        lifetimes in the schedule; ``rest`` is the difference to XLA's peak and may be negative.
      host: pinned host memory of the step's arguments, results and temporaries.
      host_temp: the temporaries among them. A program that streams in place has none.
      transfers: one for each leaf and direction between host and device.
      loops: the loops that contain transfers.
      problems: what is wrong; empty if all is well.
      timeline: the simulated run; ``None`` if the chip's figures are unknown.
      compiled_for: whether the step was compiled for a chip that is not there.
      program: ``"before"``, the first program, if the step runs as several programs.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> tx, params = jo.offload(optax.adamw(1e-3)), jax.device_put(jnp.ones((256, 256)), jax.devices()[0])
      >>> step = jax.jit(lambda p, s: jo.update_params(tx, p, s, p), donate_argnums=(0, 1))
      >>> seen = jo.inspect(step, params, tx.init(params))
      >>> seen.problems, seen.peak == sum(seen.parts.values())
      ((), True)
    """

    target: str
    peak: int
    parts: Mapping[str, int]
    host: int
    host_temp: int
    transfers: tuple[Transfer, ...]
    loops: tuple[Loop, ...]
    problems: tuple[Problem, ...]
    timeline: Timeline | None
    compiled_for: bool
    program: str = ""

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Those problems for which the offload is not real."""
        return tuple(problem for problem in self.problems if problem.error)

    @property
    def loaded(self) -> int:
        """Bytes from the host in one step."""
        return sum(t.nbytes for t in self.transfers if t.loads)

    @property
    def stored(self) -> int:
        """Bytes to the host in one step."""
        return sum(t.nbytes for t in self.transfers if not t.loads)

    @property
    def unseen(self) -> str:
        """What could be wrong and cannot be told from this program; empty where all can."""
        found = [_UNSEEN_ON_A_CPU] if self.target == "cpu" else []
        return ". ".join(found + ([f"the other programs. {SAYS}"] if self.program else []))

    def to_dict(self) -> dict[str, Any]:
        """All of it as what JSON has, without the timeline's segments."""
        plain = {"target": self.target, "compiled_for": self.compiled_for, "peak": self.peak, "host": self.host}
        lists = {
            name: [dataclasses.asdict(x) for x in getattr(self, name)] for name in ("transfers", "loops", "problems")
        }
        return {
            **plain,
            "parts": dict(self.parts),
            "host_temp": self.host_temp,
            **lists,
            "unseen": self.unseen,
            "program": self.program,
            "timeline": self.timeline and self.timeline.to_dict(),
        }

    def _tables(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        how = "compiled, not run" if self.compiled_for else "compiled"
        parts = [(f"peak of device memory ({how})", _mib(self.peak))]
        parts += [
            (f"  {name}" if nbytes > 0 else "  less what XLA packs closer", _mib(nbytes))
            for name, nbytes in self.parts.items()
            if abs(nbytes) >= 0.005 * _MIB
        ]
        # XLA's analysis counts all of a CPU's memory as the device's
        host = ("pinned host memory: a CPU counts it above", "") if self.target == "cpu" else None
        parts += [host or ("pinned host memory", _mib(self.host))]
        parts += [("  temporaries", _mib(self.host_temp))] if self.host_temp else []
        which = f", program {self.program!r}" if self.program else ""
        found: list[tuple[str, list[tuple[str, ...]]]] = [(f"device: {self.target}{which}", [("", "MiB"), *parts])]
        if t := self.timeline:
            times = [("step", t.step), ("  compute", t.compute), ("  waits for transfers", t.exposed)]
            times += [("  waits for collectives", t.exposed_collectives)] if t.collectives else []
            rows = [(name, in_seconds(seconds)) for name, seconds in [*times, ("link, busier way alone", t.link)]]
            found.append((f"simulated on {t.chip}, not measured", [("", "time"), *rows]))
        if self.transfers:
            by_bytes = sorted(self.transfers, key=lambda t: (-t.nbytes, t.leaf, not t.loads))
            rows = [
                (t.leaf, "load" if t.loads else "store", _mib(t.nbytes), f"{t.hidden:.0%}", t.behind) for t in by_bytes
            ]
            rows = rows if len(rows) <= 40 else [*rows[:39], (f"... and {len(rows) - 39} more", "", "", "", "")]
            found.append(("transfers", [("leaf", "way", "MiB", "hidden", "behind"), *rows]))
        if self.loops:
            rows = [(", ".join(x.leaves[:4]) + ("" if len(x.leaves) < 5 else f" and {len(x.leaves) - 4} more"),
                     str(x.times), _mib(x.nbytes)) for x in self.loops]  # fmt: skip
            found.append(("loops", [("leaves", "iterations", "MiB each"), *rows]))
        rows = [("error" if p.error else "warning", f"{p.leaf}: {p.what}" if p.leaf else p.what) for p in self.problems]
        rows = rows or [("none", "")]
        rows += [("not seen", self.unseen)] if self.unseen else []
        found.append(("problems", [("", ""), *rows]))
        return found

    def __str__(self) -> str:
        return "\n\n".join(f"{title}\n{_aligned(rows)}" for title, rows in self._tables())

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        return "".join(
            f"<table><caption>{html.escape(title)}</caption>{row(head, 'th')}"
            + "".join(row(cells, "td") for cells in rows)
            + "</table>"
            for title, (head, *rows) in self._tables()
        )


def _mib(nbytes: float) -> str:
    return f"{nbytes / _MIB:.2f}"


def _aligned(rows: list[tuple[str, ...]]) -> str:
    rows = rows if any(rows[0]) else rows[1:]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    numeric = [
        all(row[k].replace(".", "").strip("-%").isdigit() for row in rows[1:] if row[k]) for k in range(len(widths))
    ]
    lines = (
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)) for row in rows
    )
    return "\n".join(f"  {line}".rstrip() for line in lines)


def inspect(
    step: Any, *args: Any, target: str | None = None, chip: str | Path | Chip | None = None, **kwargs: Any
) -> Inspection:
    """Compile a step and say what it does with device memory, host memory and the link between them.

    It compiles for the devices of the arguments, or for a chip that is not there, and reads the scheduled program.
    Nothing runs, and nothing is allocated on a device. On a CPU jax leaves out the copies between memories, so there
    are no transfers to see and the peak says little; pass ``target``. ``unseen`` says what cannot be told.

    Args:
      step: a training step, jitted with its donation, or by ``jax_offload.jit``; the result of
        ``jax_offload.pipelined``, whose call between ``start`` and ``finish`` is inspected; or the result of
        ``.lower(...)`` or ``.compile()``.
      *args: the step's arguments, concrete or abstract (``jax.ShapeDtypeStruct`` with a sharding); none if ``step`` is
        lowered or compiled. For a pipelined step, the arguments of ``start`` or of the call.
      target: a chip to compile for: ``"h200"``, ``"h100"``, ``"v5e:2x2"``, or ``v5p`` and ``v6e`` with a topology. It
        needs the extra ``aot``, and arguments that are abstract or on the CPU.
      chip: the chip whose speeds the simulation uses, as ``jax_offload.chip`` takes it; the target's if left out.
      **kwargs: the step's keyword arguments.

    Returns:
      An ``Inspection``.

    Raises:
      TypeError: ``step`` is none of these.
      ValueError: the target or the chip is not known, its compiler is not installed, or it has too few devices.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> tx, params = jo.offload(optax.adamw(1e-3)), jax.device_put(jnp.ones((256, 256)), jax.devices()[0])
      >>> step = jax.jit(lambda p, s: jo.update_params(tx, p, s, p), donate_argnums=(0, 1))
      >>> print(jo.inspect(step, params, tx.init(params)))  # doctest: +ELLIPSIS
      device: cpu
      ...
      problems
        none...
    """
    return inspected(compiled(step, args, kwargs, target), chip)


def inspected(program: Compiled, chip: str | Path | Chip | None) -> Inspection:
    """Of a compiled step; ``chip``: whose speeds to simulate with."""
    speeds = program.chip if chip is None else chip
    # Without figures the schedule still tells what lives when: the times are then nobody's.
    schedule = Program(program.text, chip_of("h200" if speeds is None else speeds), program.roles)
    run = played(schedule)
    parts = {kind: nbytes for kind, nbytes in run.peak.items() if nbytes}
    parts["rest"] = program.peak - sum(parts.values())
    return Inspection(
        target=program.target,
        peak=program.peak,
        parts=parts,
        host=program.host,
        host_temp=program.host_temp,
        # what the first program of several sends is what the cores read
        transfers=tuple(
            dataclasses.replace(t, leaf="gradients") if program.program and t.leaf == UNKNOWN else t
            for t in transfers(run)
        ),
        loops=loops(schedule),
        problems=problems(program, schedule, run),
        timeline=None if speeds is None else run,
        compiled_for=program.compiled_for,
        program=program.program,
    )


def verify(
    step: Any, *args: Any, target: str | None = None, chip: str | Path | Chip | None = None, **kwargs: Any
) -> Inspection:
    """Raise if the offload of a step is not real: one line for your script or a test.

    The offload is not real if nothing of the state is in host memory, if a leaf arrives on the device or does not
    return to the host although it should, if a donated buffer crosses memory kinds, or if all of the state is on the
    device at once, as in the usual recipe. The last can be seen only with a ``target`` or on an accelerator, because
    jax leaves out the copies on a CPU; ``unseen`` then says so.

    Args:
      step: the step, as for ``jax_offload.inspect``.
      *args: the step's arguments.
      target: the chip to compile for, as for ``jax_offload.inspect``.
      chip: the chip whose speeds to simulate with, as for ``jax_offload.inspect``.
      **kwargs: the step's keyword arguments.

    Returns:
      The ``Inspection``, which may contain warnings.

    Raises:
      ValueError: the offload is not real, with the reason and the fix; or as ``jax_offload.inspect``.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jax_offload as jo
      >>> tx, params = jo.offload(optax.adamw(1e-3)), jax.device_put(jnp.ones((256, 256)), jax.devices()[0])
      >>> step = jax.jit(lambda p, s: jo.update_params(tx, p, s, p), donate_argnums=(0, 1))
      >>> jo.verify(step, params, tx.init(params)).errors
      ()
    """
    found = inspect(step, *args, target=target, chip=chip, **kwargs)
    if found.errors:
        said = "\n".join(f"- {p.leaf}: {p.what}" if p.leaf else f"- {p.what}" for p in found.errors[:10])
        more = f"\nand {len(found.errors) - 10} more" if len(found.errors) > 10 else ""
        raise ValueError(
            f"verify(): the offload of this step is not real, as compiled for {found.target}:\n{said}{more}"
        )
    return found
