"""What ``plan`` returns: rows and a verdict, to be printed or read."""

from __future__ import annotations

import dataclasses
import html
import textwrap
from typing import Any

from jax_offload._analysis.units import in_bytes, in_seconds
from jax_offload._base.text import aligned, html_table, terminal_width

HEADER = ("", "params", "grads", "state", "window", "activations", "sum", "fits", "host", "adds")


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to run a step, and what it takes of one device; a row of a ``Plan``.

    Bytes are exact unless ``compiled`` says that XLA's compiler gave them; ``None`` stands for what is not known.

    Attributes:
      name: the name by which ``plan[name]`` finds it.
      code: the line to write.
      parameters: bytes of the parameters.
      gradients: bytes of all gradients; of a compiled row those alive at its peak.
      state: bytes of the optimizer state that stays on the device.
      window: bytes of the state on the device at a time while it streams; ``None`` for a state on disk, as only the
        compiler knows what the program of a group takes.
      host: bytes of pinned host memory, for one device.
      disk: bytes of the state on disk, for one device.
      loaded: bytes from the host in one step; ``None`` where a norm of the state reads leaves first, which a step loads
        once or twice.
      stored: bytes to the host in one step.
      activations: bytes of activations, by the formula, as given, or what is left of a compiled peak.
      same_numbers: whether the step computes what the optimizer that was given computes.
      compiled: the chip that the row was compiled for; empty where its parts are sums.
      total: bytes of the compiled peak; ``None`` where the sum of the parts is the peak.
      link: seconds that the transfers take alone.
      added: seconds that they add to a step.
      overhead: ``added`` as a share of the step's arithmetic.
      hidden_from: tokens a step from which on nothing is added.
      fits: whether it fits; ``None`` where a part of the sum, or the memory, is not known.
      room: bytes that what is not known may take; below zero where it does not fit.
      why: why it does not fit, or what has to hold.

    Example:
      >>> import jax, optax, jax_offload as jo
      >>> params = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
      >>> row = jo.plan(optax.adamw(1e-3), params, device_memory="80GiB")["offload"]
      >>> row.host, row.loaded, row.fits, row.missing
      (8388608, 8388608, None, ('activations',))
    """

    name: str
    code: str
    parameters: int
    gradients: int
    state: int
    window: int | None
    host: int
    disk: int
    loaded: int | None
    stored: int
    activations: int | None = None
    same_numbers: bool = True
    compiled: str = ""
    total: int | None = None
    link: float | None = None
    added: float | None = None
    overhead: float | None = None
    hidden_from: int | None = None
    fits: bool | None = None
    room: int | None = None
    why: str = ""

    @property
    def peak(self) -> int:
        """Bytes on one device: the compiled peak, or the sum of the parts that are known."""
        if self.total is not None:
            return self.total
        return self.parameters + self.gradients + self.state + (self.window or 0) + (self.activations or 0)

    @property
    def missing(self) -> tuple[str, ...]:
        """The parts of the sum that are not known."""
        parts = {"activations": self.activations, "the window": self.window}
        return () if self.total is not None else tuple(name for name, nbytes in parts.items() if nbytes is None)

    @property
    def adds(self) -> str:
        """What it adds to a step, in words: a share of the step's arithmetic, or seconds."""
        if not self.added:
            return "?" if self.added is None else "nothing"
        return in_seconds(self.added) if self.overhead is None else f"{self.overhead:.1%}"

    def _cells(self) -> tuple[str, ...]:
        why = self.why.replace("activations stay", "act. stay")
        fits = "yes" if self.fits else f"no, {why}" if self.fits is False else why
        parts = (self.parameters, self.gradients, self.state, self.window, self.activations, self.peak)
        name = self.name if self.same_numbers else f"{self.name} *"
        return name, *map(_gib, parts), fits, _gib(self.host), self.adds

    def _details(self) -> str:
        loaded = "once or twice as much" if self.loaded is None else in_bytes(self.loaded)
        said = [f"{in_bytes(self.stored)} to the host in a step and {loaded} from it"]
        said += [] if self.link is None else [f"the link alone {in_seconds(self.link)}"]
        said += [] if self.hidden_from is None else [f"hidden from {self.hidden_from:,} tokens a step on"]
        said += [f"{in_bytes(self.disk)} on disk"] if self.disk else []
        said += [f"compiled for {self.compiled}"] if self.compiled else []
        return "; ".join(said)


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Rows for the ways to run a step, a verdict, and what was assumed; ``print`` it.

    What ``jax_offload.plan`` returns.

    Attributes:
      options: the rows, a ``Row`` each.
      recommended: the row to take; ``None`` where nothing fits or the memory is not known.
      verdict: two sentences.
      code: the line to write: the recommended row's; or, where nothing fits, the one that fits with a larger share of
        the device's memory, after the line that sets it. Empty where there is none.
      device_memory: bytes of one device; ``None`` where they are not known.
      usable: of these, what jax takes less the headroom: what a row may take.
      host_memory: bytes of a host's memory for each of its devices; ``None`` where they are not known.
      devices: how many the parameters are on.
      chip: the accelerator; empty where none was given.
      tokens_per_step: over all devices.
      compute: seconds of a step's arithmetic.
      assumptions: the inputs, and what was assumed.
      sources: where the chip's figures are from.

    Example:
      >>> import optax, jax_offload as jo
      >>> found = jo.plan(optax.adamw(1e-3), "70B", devices=64, chip="h100", activations="10GiB")
      >>> found.recommended.name, round(found.usable / 2**30)
      ('resident', 57)
    """

    options: tuple[Row, ...]
    recommended: Row | None
    verdict: str
    code: str
    device_memory: int | None
    usable: int | None
    host_memory: int | None
    devices: int
    chip: str = ""
    tokens_per_step: int | None = None
    compute: float | None = None
    assumptions: tuple[str, ...] = ()
    sources: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    def __getitem__(self, name: str) -> Row:
        """The row of that name."""
        for row in self.options:
            if row.name == name:
                return row
        raise KeyError(f"{name!r} is none of {[row.name for row in self.options]}")

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON types: bytes and seconds."""
        found = dataclasses.asdict(self)
        found["recommended"] = None if self.recommended is None else self.recommended.name
        for row, given in zip(found["options"], self.options, strict=True):
            row |= {"peak": given.peak, "missing": list(given.missing)}
        return found

    def table(self) -> list[tuple[str, ...]]:
        """The header and the rows as printed."""
        return [HEADER, *(row._cells() for row in self.options)]

    def describe(self, verbose: bool = False) -> str:
        """The printed form. ``verbose``: with each row's transfers and code, and where the chip's figures are from."""
        width = terminal_width()
        lines = textwrap.wrap(self.verdict, width, break_on_hyphens=False)
        lines += [*(f"  {line}" for line in self.code.splitlines()), "", "GiB on one device:"]
        lines += aligned(self.table(), range(1, len(HEADER)))
        if not all(row.same_numbers for row in self.options):
            lines.append("* changes the numbers")
        lines.append("")
        for said in self.assumptions:
            lines += textwrap.wrap(said, width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        if verbose:
            for row in self.options:
                lines += ["", f"{row.name}: {row.code}", f"  {row._details()}"]
            lines += ["", *(f"{self.chip}.{key}: {source}" for key, source in self.sources.items())]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        best = "nothing" if self.recommended is None else self.recommended.name
        return f"Plan({len(self.options)} rows, {best} recommended)"

    def _repr_html_(self) -> str:
        code = f"<pre>{html.escape(self.code)}</pre>" if self.code else ""
        header, *rows = self.table()
        said = "".join(f"<li>{html.escape(each)}</li>" for each in self.assumptions)
        table = html_table(header, [("GiB on one device", rows)], range(1, len(HEADER)))
        return f"<p>{html.escape(self.verdict)}</p>{code}{table}<ul>{said}</ul>"


def _gib(nbytes: int | None) -> str:
    return "?" if nbytes is None else "-" if not nbytes else f"{nbytes / 2**30:.2f}"
