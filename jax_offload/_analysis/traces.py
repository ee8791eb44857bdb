"""The profiler's traces as what takes time: operations, copies between host and device, collectives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jax_offload._analysis.hlo import Copy, computations, started
from jax_offload._analysis.schedule import COLLECTIVES, COMPUTE, LOAD, STORE, Segment

# XLA's, and NCCL's kernels.
_COLLECTIVE = re.compile(
    "(all-gather|all-reduce|reduce-scatter|(ragged-)?all-to-all|collective-)|.*nccl", re.IGNORECASE
)
# Lines of a TPU's plane: operations one after the other, and those beside them, each as long as it is in flight.
_OPS, _BESIDE = "XLA Ops", "Async XLA Ops"


def segments_of(data: Any, text: str = "") -> list[Segment]:
    """What ran on the first GPU or TPU of a ``jax.profiler.ProfileData``, or on a CPU's threads where there is none;
    seconds.

    ``text``: of the compiled module, which says which way a TPU's copies go. Its trace does not.

    Raises:
      ValueError: a TPU's trace has copies between host and device, and not how long they were in flight.
    """
    planes = sorted(data.planes, key=lambda plane: plane.name)
    if tpu := next((plane for plane in planes if re.fullmatch(r"/device:TPU:\d+", plane.name)), None):
        return sorted(_of_a_tpu(tpu, text), key=lambda s: s.begin)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    found: list[Segment] = []
    for plane in devices[:1] or [plane for plane in planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):
                continue  # the same again, as modules, steps, scopes
            for event in line.events:
                if event.duration_ns and (devices or any(key == "hlo_op" for key, _ in event.stats)):
                    lane = _lane(event.name)
                    if lane:
                        found.append(_segment(lane, event, event.name, _bytes(event)))
    return sorted(found, key=lambda s: s.begin)


def _of_a_tpu(plane: Any, text: str) -> Iterator[Segment]:
    """Of its operations those that compute; of those beside them copies to and from the host, and collectives."""
    copies = _copies(text)
    lines = {line.name: [event for event in line.events if event.duration_ns] for line in plane.lines}
    used = {_plain(event.name) for event in lines.get(_OPS, [])}
    if _BESIDE not in lines and not used.isdisjoint(copies):
        raise ValueError(
            f"profile(): the trace of {plane.name} has no line {_BESIDE!r}, so it does not say how long copies between "
            f"host and device were in flight; it has {', '.join(sorted(lines)) or 'none'}. Look at the trace itself "
            "(jax.profiler.trace; transfers have their leaves' names), and at jax_offload.inspect."
        )
    for event in lines.get(_OPS, []):
        name = _plain(event.name)
        if _COLLECTIVE.match(name) and not re.search(r"-(start|done)\b", name):
            yield _segment(COLLECTIVES, event, name)
        elif not re.search(r"-(start|done|update)\b", name) and not re.match("(while|conditional|call)\\b", name):
            yield _segment(COMPUTE, event, name)
    for event in lines.get(_BESIDE, []):
        name = _plain(event.name)
        if (copy := copies.get(name)) is not None:
            yield _segment(LOAD if copy.loads else STORE, event, name, copy.nbytes)
        elif _COLLECTIVE.match(name):
            yield _segment(COLLECTIVES, event, name)


def _plain(name: str) -> str:
    """``%copy-start.3 = (f32[8]{0}, ...) copy-start(...)``, as a TPU's traces have it, or the name alone."""
    return name.lstrip("%").partition(" ")[0]


def _copies(text: str) -> dict[str, Copy]:
    """Copies between host and device, by the names of what starts them and what waits for them."""
    found: dict[str, Copy] = {}
    for ops in computations(text).values():
        for op in ops:
            if (copy := started(op)) is not None:
                found[op.name] = copy
            elif op.opcode.endswith(("-done", "-update")) and op.operand in found:
                found[op.name] = found[op.operand]
    return found


def _segment(lane: str, event: Any, name: str, nbytes: int = 0) -> Segment:
    begin = event.start_ns / 1e9
    end = begin + event.duration_ns / 1e9
    return Segment(lane, begin, end, name, nbytes, end)


def _lane(name: str) -> str:
    plain = name.replace(" ", "").lower()
    if plain.startswith("memcpy"):
        return LOAD if "h2d" in plain or "htod" in plain else STORE if "d2h" in plain or "dtoh" in plain else ""
    return COLLECTIVES if _COLLECTIVE.match(name) else COMPUTE


def _bytes(event: Any) -> int:
    """What a GPU's trace says of a copy: kind_src:... size:1048576 ..."""
    details = next((str(value) for key, value in event.stats if key == "memcpy_details"), "")
    size = next((word.removeprefix("size:") for word in details.split() if word.startswith("size:")), "0")
    return int(size) if size.isdigit() else 0
