"""Whether this machine can offload: installed packages, memories, the link, and a short run."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax

import jax_offload
from jax_offload._analysis.chips import chip, host_memory
from jax_offload._base.memory import HOST_KIND, POOL_VARIABLE, pool_limit
from jax_offload._base.text import aligned, in_bytes
from jax_offload._interop.jit import jit
from jax_offload._offload import offload
from jax_offload._update.update_params import update_params

STEPS = 5
TOLERANCE = 1e-5  # of the resident run's numbers; XLA may round otherwise where a fusion ends
ON_CPU, ELSEWHERE = (4, 256), (16, 2048)  # layers and width of the model of the self-test


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report. ``next``: what to do where it is not ok."""

    name: str
    kind: Literal["ok", "note", "bad"]
    says: str
    next: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The doctor's findings, check by check."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.kind != "bad" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types, with a verdict and the first thing to do."""
        bad, notes = ([check for check in self.checks if check.kind == kind] for kind in ("bad", "note"))
        verdict = "this machine can offload" + "; mind: " * bool(notes) + ", ".join(check.name for check in notes)
        if bad:
            verdict = "this machine cannot offload yet: " + ", ".join(check.name for check in bad)
        wanted = [check.next for check in (*bad, *notes) if check.next]
        next_step = wanted[0] if wanted else "jax-offload plan module:function --chip NAME"
        return dataclasses.asdict(self) | {"ok": self.ok, "verdict": verdict, "next_step": next_step}

    def __str__(self) -> str:
        marks, said = {"ok": "✓", "note": "!", "bad": "✗"}, self.to_dict()
        lines = aligned([(marks[check.kind], check.name, check.says) for check in self.checks])
        return "\n".join([f"verdict: {said['verdict']}", f"next: {said['next_step']}", *lines])


def examine() -> Report:
    """Run all checks, which takes a few seconds."""
    modules = [f"{module.__name__} {module.__version__}" for module in (jax_offload, jax, jaxlib, optax)]
    found = [Check("versions", "ok", ", ".join([f"Python {platform.python_version()}", *modules]))]
    try:
        device = jax.local_devices()[0]
    except RuntimeError as error:
        return Report((*found, Check("devices", "bad", f"jax finds none: {error}", "install jax for this machine")))
    found += [_devices(device), _kinds(device), _host_memory(), _pool(device)]
    if Report(tuple(found)).ok:
        found += [_link(device), _self_test(device)]
    return Report(tuple(found))


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


def _host_memory() -> Check:
    named = zip(("available", "left by the cgroup"), host_memory(), strict=True)
    said = [f"{in_bytes(n)} {what}" for what, n in named if n is not None]
    return Check("host memory", "ok" if said else "note", ", ".join(said) or "not known")


def _pool(device: Any) -> Check:
    try:
        limit = pool_limit()
    except ValueError as error:
        return Check("pinned pool", "bad", str(error), f"set {POOL_VARIABLE} to a number of GiB, or leave it out")
    pool = f"{in_bytes(limit)} in a process ({POOL_VARIABLE})"
    if device.platform not in ("gpu", "cuda", "rocm"):
        return Check("pinned pool", "ok", f"no limit of XLA's on this platform; on a GPU {pool}")
    usable = min((n for n in host_memory() if n is not None), default=0)
    if usable > 2 * limit:
        fix = f"set {POOL_VARIABLE} to what the state needs and a third more, before jax starts"
        return Check("pinned pool", "note", f"{pool}, of {in_bytes(usable)} that are there", fix)
    return Check("pinned pool", "ok", pool)


def _link(device: Any) -> Check:
    found = chip.measured(device)
    said = f"{found.host_link / 1e9:.1f} GB/s one way, {found.host_link_both / 2e9:.1f} each way at once"
    said = "none on a CPU" if device.platform == "cpu" else said
    if found.dram_bandwidth is not None:
        said += f"; the cores reach {found.dram_bandwidth / 1e9:.1f} GB/s of the host's memory for each device"
    return Check("link", "ok", said)


def _self_test(device: Any) -> Check:
    """Train a small model offloaded and resident: the state has to be on the host, and the numbers alike.

    Its layers differ and are updated inside the backward scan, so a row that is loaded or stored in the wrong place
    shows in the numbers.
    """
    layers, width = ON_CPU if device.platform == "cpu" else ELSEWHERE
    inner = optax.adamw(1e-3)
    x = jax.device_put(jnp.asarray(np.random.default_rng(0).normal(size=(64, width)), jnp.float32), device)

    def loss(params: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2).mean()

    def trained(tx: Any) -> tuple[Any, Any]:
        scales = 1 + jnp.arange(layers, dtype=jnp.float32)[:, None, None] / layers
        params = jax.device_put(scales * jnp.eye(width, dtype=jnp.float32), device)
        state = tx.init(params)
        step = jit(lambda p, s, x: update_params(tx, jax.grad(loss)(p, x), s, p), donate_argnums=(0, 1))
        for _ in range(STEPS):
            params, state = step(params, state, x)
        return np.asarray(params), {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.ndim}

    try:
        (ours, kinds), (resident, _) = trained(offload(inner)), trained(inner)
    except Exception as error:  # whatever it is, it is what the report is for
        return Check("self-test", "bad", f"{type(error).__name__}: {str(error).splitlines()[0]}", "report it")
    off = float(np.linalg.norm(ours - resident) / np.linalg.norm(resident))
    if kinds != {HOST_KIND}:
        return Check("self-test", "bad", f"the state ended in {sorted(map(str, kinds))}", "report it")
    if not off <= TOLERANCE:
        return Check("self-test", "bad", f"{STEPS} steps differ from the resident ones by {off:.1e}", "report it")
    return Check("self-test", "ok", f"{STEPS} steps as the resident ones, to {off:.0e}; the state is in {HOST_KIND}")
