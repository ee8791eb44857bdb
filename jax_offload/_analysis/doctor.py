"""Whether this machine can offload: what is installed, what memory there is, the link, and a short run."""

from __future__ import annotations

import dataclasses
import platform
from importlib import metadata
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_offload._analysis.chips import POOL_VARIABLE, host_memory, pool_limit, rates_of
from jax_offload._analysis.units import in_bytes
from jax_offload._base.memory import HOST_KIND
from jax_offload._base.text import aligned
from jax_offload._interop.jit import jit
from jax_offload._offload import offload
from jax_offload._update.update_params import update_params

STEPS = 5
TOLERANCE = 1e-5  # of the resident run's numbers; XLA may round otherwise where a fusion ends
# layers, width: 256 MiB of parameters and 512 of state on an accelerator, and next to nothing on a CPU
SELF_TEST = {"cpu": (4, 256)}
SELF_TEST_ELSEWHERE = (16, 2048)

Kind = Literal["ok", "note", "bad"]


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report. ``next``: what to do where it is not ok."""

    name: str
    kind: Kind
    says: str
    next: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.kind != "bad" for check in self.checks)

    @property
    def verdict(self) -> str:
        if not self.ok:
            return "this machine cannot offload as it is: " + ", ".join(c.name for c in self.checks if c.kind == "bad")
        notes = [check.name for check in self.checks if check.kind == "note"]
        return "this machine can offload" + (f"; mind: {', '.join(notes)}" if notes else "")

    @property
    def next_step(self) -> str:
        """The first thing to do."""
        wanted = [c for kind in ("bad", "note") for c in self.checks if c.kind == kind and c.next]
        return wanted[0].next if wanted else "jax-offload plan module:function --chip NAME"

    def __str__(self) -> str:
        marks = {"ok": "✓", "note": "!", "bad": "✗"}
        lines = aligned([(marks[check.kind], check.name, check.says) for check in self.checks])
        return "\n".join([f"verdict: {self.verdict}", f"next: {self.next_step}", *lines])

    def to_dict(self) -> dict[str, Any]:
        """All of it as what JSON has."""
        said = {"ok": self.ok, "verdict": self.verdict, "next_step": self.next_step}
        return dataclasses.asdict(self) | said


def examine() -> Report:
    """All checks; a few seconds."""
    found = [_versions()]
    try:
        device = jax.local_devices()[0]
    except RuntimeError as error:
        return Report((*found, Check("devices", "bad", f"jax finds none: {error}", "install jax for this machine")))
    found += [_devices(device), _kinds(device), *_memory(device)]
    if Report(tuple(found)).ok:
        found += [_link(device), _self_test(device)]
    return Report(tuple(found))


def _versions() -> Check:
    said = [f"Python {platform.python_version()}"]
    for name in ("jax_offload", "jax", "jaxlib", "optax"):
        try:
            said.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            said.append(f"{name} (not installed as a package)")
    return Check("versions", "ok", ", ".join(said))


def _devices(device: Any) -> Check:
    said = f"{jax.local_device_count()} × {device.device_kind}, platform {device.platform}"
    if device.platform == "cpu":
        said += ": no accelerator, so nothing is gained here"
        return Check("devices", "note", said, "run it where the accelerator is")
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return Check("devices", "ok", said + (f", {in_bytes(limit)} each for jax" if limit else ""))


def _kinds(device: Any) -> Check:
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST_KIND in kinds:
        return Check("memories", "ok", ", ".join(kinds))
    return Check("memories", "bad", f"{', '.join(kinds)}: no {HOST_KIND}", "use a jax with pinned_host memory: 0.10 on")


def _memory(device: Any) -> tuple[Check, ...]:
    named = dict(zip(("available", "left by the cgroup"), host_memory(), strict=True))
    said = [f"{in_bytes(n)} {what}" for what, n in named.items() if n is not None]
    host = Check("host memory", "ok" if said else "note", ", ".join(said) or "not known")
    try:
        limit = pool_limit()
    except ValueError as error:
        return host, Check("pinned pool", "bad", str(error), f"set {POOL_VARIABLE} to a number of GiB, or leave it out")
    pool = f"{in_bytes(limit)} in a process ({POOL_VARIABLE})"
    if device.platform not in ("gpu", "cuda", "rocm"):
        return host, Check("pinned pool", "ok", f"no limit of XLA's on this platform; on a GPU {pool}")
    usable = min((n for n in named.values() if n is not None), default=0)
    if usable > 2 * limit:
        fix = f"set {POOL_VARIABLE} to what the state needs and a third more, before jax starts"
        return host, Check("pinned pool", "note", f"{pool}, of {in_bytes(usable)} that are there", fix)
    return host, Check("pinned pool", "ok", pool)


def _link(device: Any) -> Check:
    link = rates_of(device)
    said = f"{link.load / 1e9:.1f} GB/s from the host, {link.store / 1e9:.1f} to it, {link.both / 1e9:.1f} each at once"
    said = "none on a CPU" if device.platform == "cpu" else said
    if link.dram is not None:
        said += f"; the cores reach {link.dram / 1e9:.1f} GB/s of the host's memory for each device"
    return Check("link", "ok", said)


def _self_test(device: Any) -> Check:
    """A few steps of a small model, offloaded and not: the state has to be on the host, and the numbers alike."""
    layers, width = SELF_TEST.get(device.platform, SELF_TEST_ELSEWHERE)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    x = jax.device_put(jnp.asarray(np.random.default_rng(0).normal(size=(64, width)), jnp.float32), device)

    def loss(params: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2).mean()

    def trained(tx: Any) -> tuple[Any, Any]:
        params = jax.device_put(jnp.eye(width, dtype=jnp.float32)[None].repeat(layers, 0), device)
        state = tx.init(params)
        step = jit(lambda p, s, x: update_params(tx, jax.grad(loss)(p, x), s, p), donate_argnums=(0, 1))
        for _ in range(STEPS):
            params, state = step(params, state, x)
        return np.asarray(params), state

    try:
        ours, state = trained(offload(inner))
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.ndim}
        resident, _ = trained(inner)
    except Exception as error:  # whatever it is, it is what the report is for
        return Check("self-test", "bad", f"{type(error).__name__}: {str(error).splitlines()[0]}", "report it")
    if kinds != {HOST_KIND}:
        return Check("self-test", "bad", f"the state ended in {sorted(map(str, kinds))}", "report it")
    off = float(np.linalg.norm(ours - resident) / np.linalg.norm(resident))
    if not off <= TOLERANCE:
        return Check("self-test", "bad", f"{STEPS} steps differ from the resident ones by {off:.1e}", "report it")
    return Check("self-test", "ok", f"{STEPS} steps as the resident ones, to {off:.0e}; the state is in {HOST_KIND}")
