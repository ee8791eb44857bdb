"""What ``plan`` returns: rows and a verdict, to be printed or read."""

from __future__ import annotations

import dataclasses
import html
import math
import os
import textwrap
from collections.abc import Sequence
from typing import Any

from jax_offload._analysis import roofline
from jax_offload._analysis.chips import Chip
from jax_offload._analysis.host import POOL_HEADROOM, POOL_VARIABLE, pool_limit
from jax_offload._analysis.units import in_bytes, in_seconds
from jax_offload._base.text import aligned, html_table, terminal_width

HEADROOM = 0.05  # of what jax takes of a device's memory; and of a host's memory twice that
FRACTION, OTHER_NAME, BY_DEFAULT = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", 0.75
MOST = 0.95  # of a GPU's memory that jax can be told to take
ON_A_HOST = 8  # devices that share a host, at most
ASK = "give activations, or layers, width and tokens"
WORDS = {
    "fraction": "offloading this fraction",
    "window": "offloading with a smaller window",
    "cores": "updating on the host's cores",
    "disk": "a state on disk",
}
HEADER = ("", "params", "grads", "state", "window", "activations", "sum", "fits", "host", "adds")


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to run a step, and what it takes of one device; a row of a ``Plan``.

    Bytes are exact unless ``compiled`` says that XLA's compiler gave them; ``None`` stands for what is not known.

    Attributes:
      name: of the way, as ``plan[name]`` finds it.
      code: the line to write.
      parameters: bytes of the parameters.
      gradients: bytes of all gradients; of a compiled row those alive at its peak.
      state: bytes of the optimizer state that stays on the device.
      window: bytes of the state on the device at a time while it streams.
      activations: bytes of activations, by the formula, as given, or what is left of a compiled peak.
      host: bytes of pinned host memory, for one device.
      disk: bytes of the state on disk, for one device.
      loaded: bytes from the host in one step.
      stored: bytes to the host in one step.
      same_numbers: whether the step computes what the optimizer that was given computes.
      compiled: the chip that the row was compiled for; empty where its parts are sums.
      total: the compiled peak; ``None`` where the sum of the parts is.
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
    activations: int | None
    host: int
    disk: int
    loaded: int
    stored: int
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


def jax_takes(platform: str) -> tuple[float, str]:
    """The share of a device's memory that jax takes, and why."""
    if platform == "tpu":
        return 1.0, "jax takes all of a TPU's memory"
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() == "platform":
        return 1.0, "XLA_PYTHON_CLIENT_ALLOCATOR=platform takes what there is"
    name = FRACTION if os.environ.get(FRACTION) else OTHER_NAME
    text = os.environ.get(name) or ""
    try:
        share = float(text) if text else BY_DEFAULT
    except ValueError:
        share = math.nan
    if not share > 0:
        raise ValueError(f"{name}: expected a share such as 0.9 in the environment; got {text!r}.")
    return share, f"jax takes {share:.0%} ({name if text else f'by default; {FRACTION} sets another share'})"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a step runs: figures for one device."""

    chip: Chip | None
    tokens: int | None
    devices: int
    activations: int | None
    dtype: str
    flops_per_token: float
    device_memory: int | None
    host_memory: int | None
    host_given: bool
    parameters: int

    @property
    def platform(self) -> str:
        return self.chip.platform if self.chip else "cuda"

    @property
    def usable(self) -> int | None:
        """Bytes that a row may take."""
        share = jax_takes(self.platform)[0]
        return None if self.device_memory is None else int(self.device_memory * share * (1 - HEADROOM))

    @property
    def seconds_per_token(self) -> float | None:
        if self.chip is None:
            return None
        return roofline.arithmetic(self.chip, self.flops_per_token / self.devices, self.dtype)

    @property
    def compute(self) -> float | None:
        """Seconds of a step's arithmetic."""
        each = self.seconds_per_token
        return None if each is None or self.tokens is None else each * self.tokens

    def judged(self, row: Row) -> Row:
        """With whether it fits."""
        if row.overhead is None and row.added is not None and self.compute:
            row = dataclasses.replace(row, overhead=row.added / self.compute)
        if row.fits is False:
            return row  # the compiler says so
        usable, limit = self.usable, self.host_memory
        if usable is None:
            return row
        room = usable - row.peak
        if room < 0:
            return dataclasses.replace(row, fits=False, room=room, why=f"{in_bytes(-room)} over")
        if limit is not None and row.host > (most := int(limit * (1 - 2 * HEADROOM))):
            return dataclasses.replace(row, fits=False, room=room, why=f"host: {in_bytes(row.host - most)} over")
        if row.missing:
            one = row.missing == ("the window",)
            said = f"if {' and '.join(row.missing)} {'stays' if one else 'stay'} below {in_bytes(room)}"
            return dataclasses.replace(row, room=room, why=said)
        return dataclasses.replace(row, fits=True, room=room)

    def plan(
        self, rows: Sequence[Row], ranked: Sequence[Row], said: Sequence[str], dtypes: str, spread: Row | None = None
    ) -> Plan:
        """``ranked``: the rows, the best first. ``spread``: what parameters that are divided too would take."""
        best = ranked[0] if ranked[0].fits is not False and self.usable is not None else None
        return Plan(
            options=tuple(rows),
            recommended=best,
            verdict=" ".join(self._verdict(best, ranked, spread)),
            device_memory=self.device_memory,
            usable=self.usable,
            host_memory=self.host_memory,
            devices=self.devices,
            chip=self.chip.name if self.chip else "",
            tokens_per_step=self.tokens,
            compute=self.compute,
            assumptions=tuple(self._assumptions(best, rows, said, dtypes)),
            sources=dict(self.chip.sources) if self.chip else {},
        )

    def _verdict(self, best: Row | None, ranked: Sequence[Row], spread: Row | None) -> tuple[str, str]:
        """Two sentences: what to do, and why or what else."""
        on, usable = "each device" if self.devices > 1 else "the device", self.usable
        if usable is None:
            return "Whether it fits is not known.", "Give a chip or device_memory; the bytes below are exact."
        resident = next((row for row in ranked if row.name == "resident"), None)
        if best is None:
            least = min(ranked, key=lambda row: row.peak)
            first = f"Nothing fits: {least.name} takes least and is {least.why} on {on}."
            if spread is not None and spread.fits is not False:
                needs = f"{in_bytes(spread.peak)} of {in_bytes(usable)}"
                return first, f"Divide the parameters over the devices (FSDP): {spread.name} then takes {needs}."
            return first, self._more(ranked) or "Divide the parameters over more devices, or take larger ones."
        name = WORDS.get(best.name, best.name)
        changes = "" if best.same_numbers else ", and changes the numbers, as nothing else fits"
        if best.fits:
            adds = "" if best.added is None else f" and adds {shown_added(best)} to a step"
            first = f"{name} fits with {in_bytes(best.peak)} of {in_bytes(usable)} on {on}{adds}{changes}."
        else:
            first = f"{name} fits {best.why} on {on}{changes}."
        first = first[0].upper() + first[1:]
        if best is resident and best.fits:
            return first, "Nothing has to be offloaded."
        if best.fits:
            return first, f"Resident is {resident.why}." if resident and resident.why else "No other row is cheaper."
        roomier = [row for row in ranked if row.fits is not False and (row.room or 0) > (best.room or 0)]
        if best.name.startswith("resident") and roomier:
            return (
                first,
                f"Otherwise {roomier[0].name} leaves {in_bytes(roomier[0].room or 0)}; {ASK}, and plan decides.",
            )
        over = f"Resident is {resident.why}; {ASK}" if resident and resident.fits is False else ASK.capitalize()
        return first, f"{over}, and plan finds the smallest fraction."

    def _more(self, ranked: Sequence[Row]) -> str:
        """The share of memory with which a row fits that does not yet, as a sentence; empty where none does."""
        if self.platform != "cuda" or self.device_memory is None:
            return ""
        for row in ranked:
            share = math.ceil(100 * row.peak / (1 - HEADROOM) / self.device_memory) / 100
            if row.fits is False and (row.room or 0) < 0 and row.same_numbers and not row.missing and share <= MOST:
                return f"With {FRACTION}={share:g} in the environment, {row.name} fits."
        return ""

    def _assumptions(self, best: Row | None, rows: Sequence[Row], said: Sequence[str], dtypes: str) -> list[str]:
        found = [f"{dtypes}; {self.devices} device{'s' * (self.devices > 1)}", *said]
        compiled = any(row.compiled for row in rows)
        if self.device_memory is not None and self.usable is not None:
            found.append(
                f"memory: {in_bytes(self.device_memory)} on a device; {jax_takes(self.platform)[1]}; less a headroom "
                f"of {HEADROOM:.0%}, {in_bytes(self.usable)} count"
            )
        if self.activations is None and not compiled:
            found.append("activations: not known, and in no sum")
        found.append(self._time(compiled))
        if best is not None and best.host:
            there = "not checked without a chip or host_memory"
            if self.host_memory is not None:
                of = "" if self.chip is None or self.host_given else f" ({self.chip.name}: see chip(...).sources)"
                there = f"{in_bytes(self.host_memory)} are there for each{of}, less a headroom of {2 * HEADROOM:.0%}"
            found.append(f"host: {in_bytes(best.host)} of pinned memory for each device; {there}")
            needed = math.ceil(best.host * min(self.devices, ON_A_HOST) * POOL_HEADROOM / 2**30)
            if self.platform == "cuda" and needed * 2**30 > pool_limit():
                found.append(f"environment: {POOL_VARIABLE}={needed} before jax starts, if one process has the host")
        return found

    def _time(self, compiled: bool) -> str:
        """The inputs of the model of time."""
        chip = self.chip
        if chip is None:
            return "time: not known without a chip"
        of = "simulated from the compiled schedule" if compiled else "a model, not measured"
        both = chip.host_link_both / 2e9
        said = f"time: {of}: {chip.name}, link {chip.host_link / 1e9:g} GB/s one way and {both:g} each way at once"
        if self.compute is None or self.tokens is None or compiled:
            return said if compiled else f"{said}; without tokens nothing is hidden"
        speed, each = self.flops_per_token * self.tokens / self.devices / self.compute, self.flops_per_token
        return (
            f"{said}; {self.tokens:,} tokens of {each / max(1, self.parameters):.3g} operations a parameter at "
            f"{speed / 1e12:.4g} TFLOP/s take {in_seconds(self.compute)}; the backward pass, two thirds of it, hides "
            "what jo.jit streams, and the forward pass what jo.pipelined does"
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Rows for the ways to run a step, a verdict, and what was assumed; ``print`` it.

    What ``jax_offload.plan`` returns.

    Attributes:
      options: the rows, a ``Row`` each.
      recommended: the row to take; ``None`` where nothing fits or the memory is not known.
      verdict: two sentences.
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
        """All of it as what JSON has: bytes and seconds."""
        found = dataclasses.asdict(self)
        found["recommended"] = None if self.recommended is None else self.recommended.name
        for row, given in zip(found["options"], self.options, strict=True):
            row |= {"peak": given.peak, "missing": list(given.missing)}
        return found

    def table(self) -> list[tuple[str, ...]]:
        """The printed rows below their header."""
        return [HEADER, *map(_cells, self.options)]

    def describe(self, verbose: bool = False) -> str:
        """The printed form. ``verbose``: with each row's transfers and code, and where the chip's figures are from."""
        width, code = terminal_width(), [] if self.recommended is None else [f"  {self.recommended.code}", ""]
        lines = [*textwrap.wrap(self.verdict, width), *code, "GiB on one device:"]
        lines += aligned(self.table(), range(1, len(HEADER)))
        if not all(row.same_numbers for row in self.options):
            lines.append("* changes the numbers")
        lines.append("")
        for said in self.assumptions:
            lines += textwrap.wrap(said, width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        if verbose:
            for row in self.options:
                lines += ["", f"{row.name}: {row.code}", f"  {_details(row)}"]
            lines += ["", *(f"{self.chip}.{key}: {source}" for key, source in self.sources.items())]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        best = "nothing" if self.recommended is None else self.recommended.name
        return f"Plan({len(self.options)} rows, {best} recommended)"

    def _repr_html_(self) -> str:
        code = "" if self.recommended is None else f"<pre>{html.escape(self.recommended.code)}</pre>"
        header, *rows = self.table()
        said = "".join(f"<li>{html.escape(each)}</li>" for each in self.assumptions)
        table = html_table(header, [("GiB on one device", rows)], range(1, len(HEADER)))
        return f"<p>{html.escape(self.verdict)}</p>{code}{table}<ul>{said}</ul>"


def shown_added(row: Row) -> str:
    """What a row adds to a step: its share of the step's arithmetic, or seconds."""
    if row.added is None:
        return "?"
    if not row.added:
        return "nothing"
    return in_seconds(row.added) if row.overhead is None else f"{row.overhead:.1%}"


def _cells(row: Row) -> tuple[str, ...]:
    fits = (
        "yes"
        if row.fits
        else row.why.replace("activations stay", "act. stay")
        if row.fits is None
        else f"no, {row.why}"
    )
    parts = (row.parameters, row.gradients, row.state, row.window, row.activations)
    name = row.name if row.same_numbers else f"{row.name} *"
    return name, *map(_gib, parts), _gib(row.peak), fits, _gib(row.host), shown_added(row)


def _gib(nbytes: int | None) -> str:
    return "?" if nbytes is None else "-" if not nbytes else f"{nbytes / 2**30:.2f}"


def _details(row: Row) -> str:
    said = [f"{in_bytes(row.loaded)} from the host and {in_bytes(row.stored)} to it in a step"]
    said += [] if row.link is None else [f"the link alone {in_seconds(row.link)}"]
    said += [] if row.hidden_from is None else [f"hidden from {row.hidden_from:,} tokens a step on"]
    said += [f"{in_bytes(row.disk)} on disk"] if row.disk else []
    said += [f"compiled for {row.compiled}"] if row.compiled else []
    return "; ".join(said)
