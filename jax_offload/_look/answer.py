"""The answer of ``plan``: rows, whether they fit, what they cost by the one model of time, and the verdict.

Times use the roofline of ``timeline`` without a schedule: arithmetic runs at the speed that large matmuls reach on the
chip, and copies run at the speed of the link. A step takes three times the arithmetic of its forward pass, or four
times if the backward pass computes each layer once more, as the formula for activations assumes. Under ``jo.jit`` the
backward pass hides transfers, under ``jo.pipelined`` the forward pass, with both directions of the link busy at once.
Nothing hides an update that waits for a norm of all gradients, and its transfers use one direction after the other.
Nothing hides an update on the host's cores either. A step takes longer by all transfers that are not hidden. If there
is a step to compile, ``timeline`` plays its schedule instead.
"""

import dataclasses
import math
from functools import cached_property
from typing import Any

from jax_offload._look.chips import FRACTION, HEADROOM, MOST, Chip, jax_takes, on_gpus, share_for, usable
from jax_offload._look.text import aligned, in_bytes, in_seconds, paragraph
from jax_offload._look.timeline import link_time
from jax_offload._program.memory import POOL_HEADROOM, POOL_VARIABLE, pool_limit

HEADER = ("", "params", "grads", "state", "window", "activations", "sum", "fits", "host", "adds")

# Operations for each parameter of a matrix and each token: of a forward pass, of a step, and of a step that runs the
# forward pass of each layer again.
FORWARD, OPERATIONS, RECOMPUTING = 2, 6, 8
ON_A_HOST = 8  # devices that share a host, at most
ASK = "give activations, or layers, width and tokens"
WORDS = {"fraction": "offloading a part", "cores": "updating on the host's cores", "disk": "a state on disk"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to run a step, and the memory that it takes on one device; a row of a ``Plan``.

    Bytes are exact unless ``compiled`` says that XLA's compiler gave them; ``None`` stands for an unknown figure.

    Attributes:
      name: the name by which ``plan[name]`` finds it.
      code: the line to write.
      parameters: bytes of the parameters.
      gradients: bytes of all gradients; 0 in a compiled row, where ``activations`` has them.
      state: bytes of the optimizer state that stays on the device.
      window: bytes of the state on the device at a time while it streams; ``None`` for a state on disk, as only the
        compiler knows what the program of a group takes.
      host: bytes of pinned host memory, for one device.
      disk: bytes of the state on disk, for one device.
      loaded: bytes from the host in one step; ``None`` if a norm reads leaves of the state first, because a step then
        loads them once or twice.
      stored: bytes to the host in one step.
      on_cores: bytes of the state that the host's cores update, for one device.
      waits: whether the update waits for a number made of all gradients, such as their norm.
      activations: bytes of activations, by the formula or as given; in a compiled row, the remainder of the peak, with
        the gradients that are alive then.
      same_numbers: whether the step computes the same numbers as the given optimizer.
      compiled: the chip for which the row was compiled; empty if it was not.
      link: seconds that the transfers take alone.
      added: seconds that they add to a step.
      overhead: ``added`` as a share of the step's arithmetic.
      fits: whether it fits; ``None`` if a part of the sum, or the memory, is not known.
      room: bytes left for the unknown parts; negative if it does not fit.
      why: the reason that it does not fit, or the condition under which it does.

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
    on_cores: int
    waits: bool
    activations: int | None = None
    same_numbers: bool = True
    compiled: str = ""
    link: float | None = None
    added: float | None = None
    overhead: float | None = None
    fits: bool | None = None
    room: int | None = None
    why: str = ""

    @property
    def peak(self) -> int:
        """Bytes on one device: the sum of the parts that are known, in a compiled row the compiled peak."""
        return self.parameters + self.gradients + self.state + (self.window or 0) + (self.activations or 0)

    @property
    def missing(self) -> tuple[str, ...]:
        """The parts of the sum that are not known."""
        parts = {"activations": self.activations, "the window": self.window}
        return tuple(name for name, nbytes in parts.items() if nbytes is None)

    @property
    def adds(self) -> str:
        """The time that the row adds to a step, in words: a share of the step's arithmetic, or seconds."""
        if not self.added:
            return "?" if self.added is None else "nothing"
        return in_seconds(self.added) if self.overhead is None else f"{self.overhead:.1%}"

    def _cells(self) -> list[str]:
        why = self.why.replace("activations stay", "act. stay")
        fits = "yes" if self.fits else f"no, {why}" if self.fits is False else why
        parts = [self.parameters, self.gradients, self.state, self.window, self.activations, self.peak, self.host]
        *gib, host = ["?" if part is None else f"{part / 2**30:.2f}" if part else "-" for part in parts]
        gib[1] = "in act." if self.compiled else gib[1]
        return [self.name if self.same_numbers else f"{self.name} *", *gib, fits, host, self.adds]

    def _details(self) -> list[str]:
        loaded = "once or twice as much" if self.loaded is None else in_bytes(self.loaded)
        said = [f"{in_bytes(self.stored)} to the host in a step and {loaded} from it"]
        said += [] if self.link is None else [f"the link alone {in_seconds(self.link)}"]
        said += [f"{in_bytes(self.disk)} on disk"] if self.disk else []
        said += [f"compiled for {self.compiled}"] if self.compiled else []
        return ["", f"{self.name}: {self.code}", f"  {'; '.join(said)}"]


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The answer of ``jax_offload.plan``: a row for each way to run a step, a verdict, and assumptions; ``print`` it.

    ``verdict`` has two sentences, ``code`` the line to write, and ``recommended`` the row to take.

    Attributes:
      chip: the accelerator, a ``Chip``; ``None`` if none was given.
      devices: the number of devices that hold the parameters.
      compute: seconds of a step's arithmetic; ``None`` without a chip or tokens.
      operations: the operations in it for each parameter of a matrix and each token.
      device_memory: bytes of one device; ``None`` if not known.
      host_memory: bytes of a host's memory for each of its devices; ``None`` if not known.
      options: the rows, each a ``Row``.
      said: the assumptions about the model; ``assumptions`` has the full list.

    Example:
      >>> import optax, jax_offload as jo
      >>> found = jo.plan(optax.adamw(1e-3), "70B", devices=64, chip="h100", activations="10GiB")
      >>> found.recommended.name, round(found.usable / 2**30)
      ('resident', 57)
    """

    chip: Chip | None
    devices: int
    compute: float | None
    operations: int
    device_memory: int | None
    host_memory: int | None
    options: tuple[Row, ...] = ()
    said: tuple[str, ...] = ()

    @property
    def usable(self) -> int | None:
        """Bytes that a row may take: jax's share of ``device_memory``, less the headroom; ``None`` if not known."""
        return None if self.device_memory is None else usable(self.chip, self.device_memory)

    def judged(self, row: Row, compute: float | None = None) -> Row:
        """Complete a row: the time that its transfers add to ``compute`` seconds of arithmetic, and whether it fits."""
        link, added = self._seconds(row) if row.added is None else (row.link, row.added)
        compute = self.compute if compute is None else compute
        share = None if added is None or not compute else added / compute
        row = dataclasses.replace(row, link=link, added=added, overhead=share)
        # the compiler may have said already that it does not fit
        return row if row.fits is False or self.usable is None else self._fitted(row, self.usable)

    def _fitted(self, row: Row, usable: int) -> Row:
        """Say whether and why a row fits into the usable bytes of a device, and into the host's memory."""
        room, over = usable - row.peak, self._over_on_the_host(row)
        verb = "stays" if row.missing == ("the window",) else "stay"
        why = f"if {' and '.join(row.missing)} {verb} below {in_bytes(room)}" if row.missing else ""
        if room < 0 or over > 0:
            why = f"{in_bytes(-room)} over" if room < 0 else f"host: {in_bytes(over)} over"
            return dataclasses.replace(row, room=room, fits=False, why=why)
        return dataclasses.replace(row, room=room, fits=None if row.missing else True, why=why)

    def _over_on_the_host(self, row: Row) -> int:
        """Return the bytes by which a row exceeds the host's memory less its headroom, or 0."""
        return 0 if self.host_memory is None else max(0, row.host - int(self.host_memory * (1 - 2 * HEADROOM)))

    def _seconds(self, row: Row) -> tuple[float | None, float | None]:
        """Return the seconds that a row's transfers take alone, and those that they add to a step."""
        chip = self.chip
        if not row.disk and not row.stored:
            return None if chip is None else 0.0, 0.0
        if chip is None or row.disk or row.loaded is None:
            return None, None
        link, pipelined = link_time(chip, row.loaded, row.stored), "jo.pipelined" in row.code
        if row.on_cores:
            # The cores read and write the state once. Values that cross the link are moved by it and by the cores.
            crossed = 2 * (row.on_cores + row.loaded + row.stored)
            return link, max(link, crossed / chip.dram_bandwidth)
        if row.waits and not pipelined:  # the directions take turns
            link = link_time(chip, row.loaded, 0) + link_time(chip, 0, row.stored)
            return link, link
        forward = FORWARD / self.operations
        return link, max(0.0, link - (forward if pipelined else 1 - forward) * (self.compute or 0.0))

    @cached_property
    def _ranked(self) -> list[Row]:
        return sorted(self.options, key=_by_cost)

    @cached_property
    def recommended(self) -> Row | None:
        """The row to take; ``None`` if nothing fits or the memory is not known."""
        return self._ranked[0] if self._ranked[0].fits is not False and self.usable is not None else None

    @property
    def verdict(self) -> str:
        """The recommendation in two sentences."""
        return self._answer[0]

    @property
    def code(self) -> str:
        """The line to write; empty if there is none.

        If nothing fits, but a row would if jax took a larger share of the device's memory: the line that sets the
        share, and the line of that row.
        """
        return self._answer[1]

    def __getitem__(self, name: str) -> Row:
        """Return the row of that name; ``KeyError`` if there is none."""
        rows = {row.name: row for row in self.options}
        if name not in rows:
            raise KeyError(f"{name!r} is none of {[*rows]}")
        return rows[name]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types, in bytes and seconds."""
        found: dict[str, Any] = dataclasses.asdict(self) | {"recommended": self.recommended and self.recommended.name}
        found |= {name: getattr(self, name) for name in ("verdict", "code", "usable", "assumptions")}
        for row, given in zip(found["options"], self.options, strict=True):
            row |= {"peak": given.peak, "missing": list(given.missing)}
        return found

    def describe(self, verbose: bool = False) -> str:
        """Return the printed form. ``verbose`` adds each row's transfers and code, and the chip's sources."""
        lines = paragraph(self.verdict, indent="")
        lines += [*(f"  {line}" for line in self.code.splitlines()), "", "GiB on one device:"]
        lines += aligned([HEADER, *(row._cells() for row in self.options)], range(1, len(HEADER)))
        lines += [] if all(row.same_numbers for row in self.options) else ["* changes the numbers"]
        lines += ["", *(line for said in self.assumptions for line in paragraph(said, begin="- "))]
        if verbose:
            lines += [line for row in self.options for line in row._details()]
            chip = self.chip
            lines += ["", *(f"{chip.name}.{key}: {source}" for key, source in chip.sources.items())] if chip else []
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.describe()

    @cached_property
    def _answer(self) -> tuple[str, str, Row | None]:
        """The verdict, what to do and why or what else; the line to write; and the row that it is for."""
        if self.usable is None:
            known = "Whether it fits is not known. Give a chip or device_memory; the bytes below are exact."
            return known, "", None
        on = "each device" if self.devices > 1 else "the device"
        best, (larger, share) = self.recommended, self._with_a_larger_share
        setting = f"With {FRACTION}={share:g} in the environment,"
        resident = next((row for row in self.options if row.name == "resident"), None)
        if best is None:
            first, second = self._nothing(on)
            if larger is None:
                return f"{first} {second}", "", None
            second = f"{setting} {WORDS.get(larger.name, larger.name)} fits {larger.why}".rstrip()
            return f"{first} {second}.", f"export {FRACTION}={share:g}\n{larger.code}", larger
        name, resident_is = WORDS.get(best.name, best.name), f"Resident is {resident.why}" if resident else ""
        adds = "" if best.added is None or best.fits is None else f" and adds {best.adds} to a step"
        adds += "" if best.same_numbers else ", and changes the numbers, as nothing else fits"
        how = best.why or f"with {in_bytes(best.peak)} of the {in_bytes(self.usable)} usable"
        first = f"{name} fits {how} on {on}{adds}."
        if best.fits is None:
            ask = f"{resident_is}; {ASK}" if resident and resident.fits is False else ASK.capitalize()
            second = f"{ask}, and plan finds the smallest fraction."
        elif best is resident:
            second = "Nothing has to be offloaded."
        elif best.host and larger is not None and larger.name == "resident" and not larger.missing:
            return f"{setting} nothing has to be offloaded: resident then fits. Without it, {first}", best.code, best
        else:
            second = f"{resident_is}." if resident and resident.why else "No other row is cheaper."
        return f"{first[0].upper()}{first[1:]} {second}", best.code, best

    def _nothing(self, on: str) -> tuple[str, str]:
        """Return what is short if nothing fits, and what to do."""
        same = [row for row in self._ranked if row.same_numbers] or self._ranked
        least = min(same, key=lambda row: row.peak)
        if on_device := [row for row in same if (row.room or 0) >= 0]:
            least = min(on_device, key=self._over_on_the_host)
            needs = f"{least.name} needs {in_bytes(self._over_on_the_host(least))} more of the host's memory"
            advice = "Take a host with more, a state on disk (disk=True), or more devices."
            return f"Nothing fits: {needs} for each device.", advice
        first = f"Nothing fits: {least.name} takes least and is {least.why} on {on}."
        if (takes := least.activations or 0) > least.peak / 2:
            return first, f"Activations take {in_bytes(takes)}: take fewer tokens a step, or more devices."
        return first, "Divide the parameters over the devices (FSDP), or take more or larger ones."

    @cached_property
    def _with_a_larger_share(self) -> tuple[Row | None, float]:
        """The cheapest row that fits only if jax takes a larger share of a GPU's memory than now, and the share."""
        memory = self.device_memory or 0
        for row in self._ranked:
            share = share_for(self.chip, memory, row.peak)
            if (row.room or 0) < 0 and share <= MOST and not self._over_on_the_host(row):
                share = MOST if row.missing else share
                return self._fitted(row, int(memory * share * (1 - HEADROOM))), share
        return None, MOST

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        """The inputs and the assumptions, as printed."""
        found, best, chip = [*self.said], self._answer[2], self.chip
        if self.device_memory is not None and self.usable is not None:
            takes = f"{jax_takes(chip)[1]}; less {HEADROOM:.0%} headroom, {in_bytes(self.usable)} count"
            found.append(f"memory: {in_bytes(self.device_memory)}; {takes}")
        if any(row.activations is None for row in self.options):
            found.append("activations: not known, in no sum")
        found.append("time: not known without a chip" if chip is None else self._time(chip))
        if best is not None and best.host:
            there = "not checked without a chip or host_memory"
            if self.host_memory is not None:
                of = f" ({chip.name})" if chip and self.host_memory == chip.dram_bytes else ""
                there = f"each has {in_bytes(self.host_memory)}{of}, less {2 * HEADROOM:.0%} headroom"
            found.append(f"host: {in_bytes(best.host)} of pinned memory for each device; {there}")
            needed = math.ceil(best.host * min(self.devices, ON_A_HOST) * POOL_HEADROOM / 2**30)
            if on_gpus(chip) and needed * 2**30 > pool_limit():
                found.append(f"environment: {POOL_VARIABLE}={needed} before jax starts, with one process per host")
        return tuple(found)

    def _time(self, chip: Chip) -> str:
        """Return the inputs of the model of time."""
        compiled = any(row.compiled for row in self.options)
        how = "simulated from the compiled schedule, not measured" if compiled else "a model, not measured"
        one, both, source = chip.host_link / 1e9, chip.host_link_both / 2e9, chip.sources.get("host_link_both", "")
        known = next((f", {word}" for word in ("measured", "assumed") if source.startswith(word)), "")
        said = f"time: {how}: {chip.name}'s link {one:g} GB/s one way, {both:g} each way at once{known}"
        if any(row.on_cores for row in self.options):
            said += f", DRAM {chip.dram_bandwidth / 1e9:g} per card"
        if compiled or not self.compute:
            return said if compiled else f"{said}; without tokens nothing is hidden"
        if any(row.waits for row in self.options):
            hides = f"the forward pass ({FORWARD}/{self.operations}) hides jo.pipelined's copies"
            return f"{said}; {hides}; nothing hides jo.jit's, which take turns"
        return f"{said}; the backward pass ({self.operations - FORWARD}/{self.operations}) hides copies"


def _by_cost(row: Row) -> tuple[Any, ...]:
    """Sort rows that fit first, then those that may; among these rows with the same numbers, and the cheapest."""
    fits = {True: 0, None: 1, False: 2}[row.fits]
    added = math.inf if row.added is None else round(row.added, 6)
    return fits, not row.same_numbers, added, row.disk, row.on_cores, (row.loaded or 0) + row.stored
