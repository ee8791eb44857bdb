"""What fits where a step runs, what it costs by the one model of time, and the verdict.

The model, a roofline: the arithmetic of a step takes its operations at the speed that large matmuls reach on the chip.
The link takes the time of both directions at once, then of the rest of the larger one alone. The backward pass, two
thirds of the arithmetic, hides what streams under ``jo.jit``; the forward pass, a third, under ``jo.pipelined``.
Nothing hides an update that waits for a norm of all gradients, or one on the host's cores. The rest is added to the
step. Latency, launches and contention for device memory are left out. Where there is a step to compile, ``timeline``
plays its schedule instead, with the same speeds.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax

from jax_offload._analysis.answer import Plan, Row
from jax_offload._analysis.chips import POOL_HEADROOM, POOL_VARIABLE, Chip, pool_limit
from jax_offload._analysis.sizes import Sizes
from jax_offload._analysis.units import in_bytes, in_seconds

BACKWARD, FORWARD, NOTHING = 2 / 3, 1 / 3, 0.0
OPERATIONS = 6  # of the forward and the backward pass, for each parameter of a matrix and each token
_ROUNDED = (None, "default", "fastest", "bfloat16")  # precisions at which a TPU rounds what its matmuls read


def link_time(chip: Chip, loaded: int, stored: int) -> float:
    """Seconds of copies both ways at once, then of the rest of one way."""
    together, rest = min(loaded, stored), abs(loaded - stored)
    return 2 * together / chip.host_link_both + rest / chip.host_link


def compute_time(chip: Chip, operations: float, dtype: str) -> float:
    """Seconds of matmuls of arrays of ``dtype``; a TPU rounds them to bfloat16 unless jax is told not to."""
    rounds = chip.platform == "tpu" and jax.config.jax_default_matmul_precision in _ROUNDED  # pyright: ignore
    fast = rounds or dtype in ("bfloat16", "float16")
    return operations / (chip.reached.bf16 if fast else chip.reached.f32)


def cores_time(chip: Chip, state: int, up: int, down: int) -> float | None:
    """Seconds in which a host's cores read and write the state once, write what goes up and read what comes down, which
    the link reads and writes as well; ``None`` without a figure of the host's memory."""
    return None if chip.dram_bandwidth is None else 2 * (state + up + down) / chip.dram_bandwidth


def exposed_time(moved: float, compute: float, hidden_by: float) -> float:
    """Seconds that ``moved`` seconds of transfers add to a step, of whose arithmetic a share hides them."""
    return max(0.0, moved - hidden_by * compute)


def tokens_to_hide(moved: float, seconds_per_token: float, hidden_by: float) -> int | None:
    """From how many tokens a step on nothing is added; ``None`` where nothing hides the transfers."""
    if not moved:
        return 0
    return None if not hidden_by or not seconds_per_token else -int(-moved // (hidden_by * seconds_per_token))


HEADROOM = 0.05  # of what jax takes of a device's memory; and of a host's memory twice that
FRACTION, OTHER_NAME, BY_DEFAULT = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", 0.75
MOST = 0.95  # of a GPU's memory that jax can be told to take
ON_A_HOST = 8  # devices that share a host, at most
ASK = "give activations, or layers, width and tokens"
WORDS = {
    "fraction": "offloading this fraction",
    "cores": "updating on the host's cores",
    "disk": "a state on disk",
}
CHEAPEST = ("resident", "fraction", "offload", "as given", "pipelined", "cores", "disk", "int8")


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
    """Where a step runs: figures for one device.

    Attributes:
      chip: the accelerator, if it is known.
      tokens: of a step, over all devices.
      devices: how many the parameters are on.
      activations: bytes; ``None`` where they are not known.
      dtype: that most bytes of the parameters have.
      flops_per_token: operations of the forward and the backward pass, over all devices.
      device_memory: bytes; ``None`` where they are not known.
      host_memory: bytes for each device of a host, where the user says it; else the chip's figure counts.
      parameters: how many there are.
    """

    chip: Chip | None
    tokens: int | None
    devices: int
    activations: int | None
    dtype: str
    flops_per_token: float
    device_memory: int | None
    host_memory: int | None
    parameters: int

    @property
    def platform(self) -> str:
        return self.chip.platform if self.chip else "cuda"

    @property
    def host(self) -> int | None:
        """Bytes of the host's memory for each device."""
        return self.chip.dram_bytes if self.host_memory is None and self.chip else self.host_memory

    @property
    def usable(self) -> int | None:
        """Bytes that a row may take."""
        share = jax_takes(self.platform)[0]
        return None if self.device_memory is None else int(self.device_memory * share * (1 - HEADROOM))

    @property
    def seconds_per_token(self) -> float | None:
        if self.chip is None:
            return None
        return compute_time(self.chip, self.flops_per_token / self.devices, self.dtype)

    @property
    def compute(self) -> float | None:
        """Seconds of a step's arithmetic."""
        each = self.seconds_per_token
        return None if each is None or self.tokens is None else each * self.tokens

    def timed(self, row: Row, sizes: Sizes, run: str) -> Row:
        """A row with what its transfers take and add, by the model of time."""
        if not row.disk and not row.stored:
            return dataclasses.replace(row, added=0.0, link=None if self.chip is None else 0.0)
        if self.chip is None or row.disk or row.loaded is None:
            return row
        hides = NOTHING if sizes.waits or sizes.on_cores else BACKWARD
        hides = FORWARD if run == "jo.pipelined" else hides
        moved, least = link_time(self.chip, row.loaded, row.stored), None
        added: float | None = exposed_time(moved, self.compute or 0.0, hides)
        if sizes.on_cores:
            busy = cores_time(self.chip, sizes.on_cores, row.loaded, row.stored)
            added = None if busy is None else max(moved, busy)
        elif self.seconds_per_token is not None:
            least = tokens_to_hide(moved, self.seconds_per_token, hides)
        return dataclasses.replace(row, link=moved, added=added, hidden_from=least)

    def judged(self, row: Row) -> Row:
        """A row with whether it fits."""
        if row.overhead is None and row.added is not None and self.compute:
            row = dataclasses.replace(row, overhead=row.added / self.compute)
        if row.fits is False or self.usable is None:  # or the compiler says so
            return row
        row = dataclasses.replace(row, room=(room := self.usable - row.peak))
        over = self._over_on_the_host(row)
        if room < 0 or over > 0:
            why = f"{in_bytes(-room)} over" if room < 0 else f"host: {in_bytes(over)} over"
            return dataclasses.replace(row, fits=False, why=why)
        return dataclasses.replace(row, fits=None if row.missing else True, why=_condition(row, room))

    def _over_on_the_host(self, row: Row) -> int:
        """Return the bytes by which a row exceeds the host's memory less its headroom, or 0."""
        return 0 if self.host is None else max(0, row.host - int(self.host * (1 - 2 * HEADROOM)))

    def plan(self, rows: Sequence[Row], said: Sequence[str], dtypes: str, replicated: bool) -> Plan:
        """Return the answer. ``said`` lists the assumptions; ``replicated``: parameters could be divided."""
        ranked = sorted(rows, key=_by_cost)
        best = ranked[0] if ranked[0].fits is not False and self.usable is not None else None
        verdict, code, row = self._verdict(best, ranked, replicated)
        return Plan(
            options=tuple(rows),
            recommended=best,
            verdict=" ".join(verdict),
            code=code,
            device_memory=self.device_memory,
            usable=self.usable,
            host_memory=self.host,
            devices=self.devices,
            chip=self.chip.name if self.chip else "",
            tokens_per_step=self.tokens,
            compute=self.compute,
            assumptions=tuple(self._assumptions(row, rows, said, dtypes)),
            sources=dict(self.chip.sources) if self.chip else {},
        )

    def _verdict(
        self, best: Row | None, ranked: Sequence[Row], replicated: bool
    ) -> tuple[tuple[str, str], str, Row | None]:
        """Two sentences, what to do, and why or what else; the line to write; and the row that it is for."""
        on, usable = "each device" if self.devices > 1 else "the device", self.usable
        if usable is None:
            known = "Whether it fits is not known.", "Give a chip or device_memory; the bytes below are exact."
            return known, "", None
        resident = next((row for row in ranked if row.name == "resident"), None)
        if best is None:
            same = [row for row in ranked if row.same_numbers] or ranked
            least = min(same, key=lambda row: row.peak)
            first = f"Nothing fits: {least.name} takes least and is {least.why} on {on}."
            if (larger := self._with_a_larger_share(ranked)) is not None:
                said, code, row = larger
                return (first, said), code, row
            if on_device := [row for row in same if (row.room or 0) >= 0]:
                least = min(on_device, key=self._over_on_the_host)
                over = in_bytes(self._over_on_the_host(least))
                first = f"Nothing fits: {least.name} needs {over} more of the host's memory for each device."
                return (first, "Take a host with more, a state on disk (disk=True), or more devices."), "", None
            over = "the" if replicated else "more"
            second = f"Divide the parameters over {over} devices (FSDP), or take larger ones."
            if (takes := least.activations or 0) > least.peak / 2:
                second = f"Activations take {in_bytes(takes)}: take fewer tokens a step, or more devices."
            return (first, second), "", None
        name = WORDS.get(best.name, best.name)
        changes = "" if best.same_numbers else ", and changes the numbers, as nothing else fits"
        if best.fits:
            adds = "" if best.added is None else f" and adds {best.adds} to a step"
            first = f"{name} fits with {in_bytes(best.peak)} of {in_bytes(usable)} on {on}{adds}{changes}."
            second = f"Resident is {resident.why}." if resident and resident.why else "No other row is cheaper."
            second = "Nothing has to be offloaded." if best is resident else second
        else:
            first = f"{name} fits {best.why} on {on}{changes}."
            over = f"Resident is {resident.why}; {ASK}" if resident and resident.fits is False else ASK.capitalize()
            second = f"{over}, and plan finds the smallest fraction."
            roomier = [row for row in ranked if row.fits is not False and (row.room or 0) > (best.room or 0)]
            if best.name.startswith("resident") and roomier:
                leaves = in_bytes(roomier[0].room or 0)
                second = f"Otherwise {roomier[0].name} leaves {leaves}; {ASK}, and plan decides."
        return (first[0].upper() + first[1:], second), best.code, best

    def _with_a_larger_share(self, ranked: Sequence[Row]) -> tuple[str, str, Row] | None:
        """The first row that fits where jax takes more of the memory than it does: a sentence, and what to write."""
        if self.platform != "cuda" or self.device_memory is None:
            return None
        for row in ranked:
            share = math.ceil(100 * row.peak / (1 - HEADROOM) / self.device_memory) / 100
            if (row.room or 0) < 0 and row.same_numbers and share <= MOST and not self._over_on_the_host(row):
                share = MOST if row.missing else share
                room = int(self.device_memory * share * (1 - HEADROOM)) - row.peak
                fits = f"With {FRACTION}={share:g} in the environment, {WORDS.get(row.name, row.name)} fits"
                said = f"{fits} {_condition(row, room)}".rstrip() + "."
                return said, f"export {FRACTION}={share:g}\n{row.code}", row
        return None

    def _assumptions(self, best: Row | None, rows: Sequence[Row], said: Sequence[str], dtypes: str) -> list[str]:
        found = [f"{dtypes}; {self.devices} device{'s' * (self.devices > 1)}", *said]
        compiled = any(row.compiled for row in rows)
        if self.device_memory is not None and self.usable is not None:
            found.append(
                f"memory: {in_bytes(self.device_memory)}; {jax_takes(self.platform)[1]}; less {HEADROOM:.0%} headroom, "
                f"{in_bytes(self.usable)} count"
            )
        if self.activations is None and not compiled:
            found.append("activations: not known, and in no sum")
        found.append(self._time(compiled))
        if best is not None and best.host:
            there = "not checked without a chip or host_memory"
            if self.host is not None:
                of = f" ({self.chip.name})" if self.host_memory is None and self.chip else ""
                there = f"{in_bytes(self.host)} are there{of}, less {2 * HEADROOM:.0%} headroom"
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
        link = (
            f"{chip.name}'s link {chip.host_link / 1e9:g} GB/s one way, {chip.host_link_both / 2e9:g} each way at once"
        )
        if compiled:
            return f"time: simulated from the compiled schedule, not measured: {link}"
        if self.compute is None or self.tokens is None:
            return f"time: a model, not measured: {link}; without tokens nothing is hidden"
        speed, each = self.flops_per_token * self.tokens / self.devices / self.compute, self.flops_per_token
        return (
            f"time: a model, not measured: {link}; {self.tokens:,} tokens × {each / max(1, self.parameters):.3g} "
            f"operations a parameter at {speed / 1e12:.4g} TFLOP/s take {in_seconds(self.compute)}, of which the "
            "backward pass (2/3) hides jo.jit's copies, the forward pass jo.pipelined's"
        )


def _condition(row: Row, room: int) -> str:
    """What has to hold for a row to fit in memory that leaves so much room."""
    verb = "stays" if row.missing == ("the window",) else "stay"
    return f"if {' and '.join(row.missing)} {verb} below {in_bytes(room)}" if row.missing else ""


def _by_cost(row: Row) -> tuple[Any, ...]:
    """Rows that fit first, then those that may; among these rows with the same numbers, and the cheapest."""
    fits = {True: 0, None: 1, False: 2}[row.fits]
    kind = next((k for k, name in enumerate(CHEAPEST) if row.name.startswith(name)), len(CHEAPEST))
    added = math.inf if row.added is None else round(row.added, 6)
    return fits, not row.same_numbers, added, kind, (row.loaded or 0) + row.stored, row.disk
