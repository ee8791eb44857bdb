"""Accelerators as figures: those of ``chips.toml``, and any other from a small file of the user's."""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("chips.toml")
_PLATFORMS = ("cuda", "tpu")
_TPU_KINDS = {"v5 lite": "v5e", "v5": "v5p", "v6 lite": "v6e"}  # as jax has them in device_kind
# What follows a GPU's name where it is the card of the figures: not PCIe, NVL, a part of it, or another memory.
_SAME_CARD = re.compile(r"sxm\d*|hbm\w*|80gb|141gb|480gb")


@dataclasses.dataclass(frozen=True)
class Reached:
    """Speeds of real programs, per second; assumptions, which the simulated timeline counts with.

    Attributes:
      bf16, f32: operations of large matmuls; other dtypes count as float32.
      hbm: bytes that fusions read and write in device memory.
      interconnect: bytes that a ring sends to the other accelerators, and as many that it receives.
    """

    bf16: float
    f32: float
    hbm: float
    interconnect: float


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator and its host: bytes, bytes per second, operations per second.

    Attributes:
      name: by which ``chip`` knows it.
      platform: ``"cuda"`` or ``"tpu"``.
      hbm_bytes: device memory.
      flops: of matmuls in bfloat16, dense, as the data sheet has it.
      hbm_bandwidth: of device memory, as the data sheet has it.
      host_link: copies between pinned host memory and the device, one way alone.
      host_link_both: both ways at once, their sum.
      interconnect: to other accelerators, one way.
      dram_bytes: the host's memory, for each of its accelerators.
      reached: what programs reach of ``flops``, ``hbm_bandwidth`` and ``interconnect``.
      dram_bandwidth: of the host's memory, for each of its accelerators; ``None`` where it is not known.
      sources: for each figure where it is published, or that it is assumed, and from what.

    Example:
      >>> import jax_offload as jo
      >>> h100 = jo.chip("h100")
      >>> round(h100.hbm_bytes / 2**30), h100.host_link / 1e9
      (80, 55.0)
      >>> h100.sources["host_link_both"]
      'assumed: 92 % of twice one way'
    """

    name: str
    platform: str
    hbm_bytes: int
    flops: float
    hbm_bandwidth: float
    host_link: float
    host_link_both: float
    interconnect: float
    dram_bytes: int
    reached: Reached
    dram_bandwidth: float | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The figures and their sources as what JSON has."""
        return dataclasses.asdict(self) | {"sources": dict(self.sources)}


def chip(name: str | Path | Chip) -> Chip:
    """The figures of an accelerator, see ``jax_offload.chip``."""
    if isinstance(name, Chip):
        return name
    if not isinstance(name, str | Path):
        raise TypeError(f"chip: expected a name, a path or a Chip; got a {type(name).__name__}. Known: {_listed()}.")
    path = Path(name)
    if path.suffix == ".toml":
        return _of_file(path)
    found = known_as(str(name))
    if found is None:
        raise ValueError(
            f"chip: {str(name)!r} is not known. Known: {_listed()}; or the path of a .toml with the figures of another."
        )
    return _known()[found]


def known_chips() -> tuple[str, ...]:
    """The names that ``chip`` takes."""
    return tuple(_known())


def known_as(name: str) -> str | None:
    """Which of them a person or jax calls so: ``tpu-v5e``, ``NVIDIA H100 80GB HBM3``, ``TPU v5 lite``."""
    plain = re.sub(r"nvidia|tpu", "", name.lower()).strip(" -_")
    first, *rest = re.split(r"[\s_-]+", _TPU_KINDS.get(plain, plain))
    return first if first in _known() and all(map(_SAME_CARD.fullmatch, rest)) else None


def _listed() -> str:
    return ", ".join(known_chips())


@functools.cache
def _known() -> dict[str, Chip]:
    return {name: _parsed(name, table, name) for name, table in tomllib.loads(_FILE.read_text()).items()}


def _of_file(path: Path) -> Chip:
    if not path.exists():
        raise ValueError(f"chip: there is no file {str(path)!r}. Known without one: {_listed()}.")
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"chip: {path} is no TOML, lines of name = number: {error}") from error
    like = table.pop("like", None)
    base = {} if like is None else chip(like).to_dict()
    base.pop("name", None)
    # What follows from figures that the file has does not come from the other chip.
    for key, of in {"reached": {"flops", "hbm_bandwidth", "interconnect"}, "host_link_both": {"host_link"}}.items():
        if table.keys() & of:
            base.pop(key, None)
    sources = {key: f"as {like}" for key in base if key != "sources"} | {key: str(path) for key in table}
    return _parsed(
        table.pop("name", path.stem), base | table | {"sources": sources | table.get("sources", {})}, str(path)
    )


def _parsed(name: str, table: Mapping[str, Any], where: str) -> Chip:
    fields = {field.name: field for field in dataclasses.fields(Chip) if field.name != "name"}
    if unknown := table.keys() - fields.keys():
        raise ValueError(f"chip: {where} has {', '.join(sorted(unknown))}; a chip has {', '.join(fields)}.")
    needed = ("hbm_bytes", "flops", "hbm_bandwidth", "host_link", "dram_bytes")
    if missing := [key for key in needed if key not in table]:
        raise ValueError(f'chip: {where} lacks {", ".join(missing)}. Add them, or a line like = "h100".')
    for key in (*needed, "host_link_both", "interconnect", "dram_bandwidth"):
        value = 1 if (value := table.get(key)) is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"chip: {key} in {where} is {value!r}; expected a number above 0, in bytes or per second.")
    platform = table.get("platform", "cuda")
    if platform not in _PLATFORMS:
        raise ValueError(f"chip: platform in {where} is {platform!r}; expected one of {', '.join(_PLATFORMS)}.")
    one_way, flops = float(table["host_link"]), float(table["flops"])
    interconnect = float(table.get("interconnect", one_way))
    # Where a file does not say what programs reach: the shares of our own chips.
    assumed = {"bf16": flops * 2 / 3, "f32": flops / 3, "hbm": table["hbm_bandwidth"] * 5 / 6}
    reached = assumed | {"interconnect": interconnect * 7 / 9} | dict(table.get("reached", {}))
    if unknown := reached.keys() - {field.name for field in dataclasses.fields(Reached)}:
        raise ValueError(f"chip: reached in {where} has {', '.join(sorted(unknown))}; expected {', '.join(assumed)}.")
    return Chip(
        name=name,
        platform=platform,
        hbm_bytes=int(table["hbm_bytes"]),
        flops=flops,
        hbm_bandwidth=float(table["hbm_bandwidth"]),
        host_link=one_way,
        host_link_both=float(table.get("host_link_both", 2 * one_way)),
        interconnect=interconnect,
        dram_bytes=int(table["dram_bytes"]),
        dram_bandwidth=None if table.get("dram_bandwidth") is None else float(table["dram_bandwidth"]),
        reached=Reached(**{key: float(value) for key, value in reached.items()}),
        sources=dict(table.get("sources", {})),
    )
