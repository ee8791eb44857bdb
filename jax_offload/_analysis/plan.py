"""``plan``: what a model and its optimizer will need and cost, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from jax_offload._analysis.chips import Chip
from jax_offload._analysis.chips import chip as chip_of
from jax_offload._analysis.drives import DEFAULT, Drive
from jax_offload._analysis.drives import drive as drive_of
from jax_offload._analysis.each_way import of_each_way
from jax_offload._analysis.forecast import Forecast
from jax_offload._analysis.host import host_memory
from jax_offload._analysis.optimizer import of_optimizer
from jax_offload._analysis.setting import Setting
from jax_offload._analysis.targets import target_of
from jax_offload._analysis.units import bytes_of
from jax_offload._analysis.whole_step import of_step
from jax_offload._base.shardings import sharding_of
from jax_offload._update.arguments import check_inner


def plan(
    tx: optax.GradientTransformation | optax.MultiSteps | Callable[..., Any],
    *args: Any,
    chip: str | Chip | None = None,
    tokens_per_step: int | None = None,
    flops_per_token: float | None = None,
    device_memory: int | str | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    target: str | None = None,
    drive: str | Path | Drive | None = None,
    **kwargs: Any,
) -> Forecast:
    """Whether a model fits, how much slower offloading makes it, and which line of code to write.

    ``plan(tx, params)``: of an optimizer, offloaded already or not. A row for every way: resident, offloaded, the
    smallest ``fraction`` and the largest ``window`` that fit, moments in bfloat16 and in 8 bits, ZeRO-1 where
    parameters are replicated over a mesh, ``jax_offload.pipelined`` where gradients are clipped by their norm; with
    files where this host lacks memory. Activations are not in these peaks.

    ``plan(step, *args)``: of a training step that offloads, with its state on the device, under ``jax.jit``,
    ``jax_offload.jit`` and, where gradients are clipped by their norm, ``jax_offload.pipelined``; its activations and
    arithmetic are estimated from the trace. With ``target`` each is compiled for that chip, which need not be there:
    peak and host memory are then XLA's, and time is that of the schedule, simulated. It takes seconds to minutes.

    ``plan(make, tx)``: of a step by how its optimizer may be offloaded. ``make(tx)`` returns ``(step, *args)``, with a
    state from ``jax_offload.abstract_state(tx, params)``; it is called for every way of ``plan(tx, params)``, and each
    step traced, or compiled, as it would run.

    Nothing is allocated or decided here: the placements and plans are those that would run. The estimate's model of
    time: transfers are hidden behind the backward pass, two thirds of a step's arithmetic; in ``pipelined`` behind the
    forward pass; not at all where an update waits for a norm of all gradients. What is not hidden is added. Of a
    state on disk the first groups are read, and the last written, beside the gradients; the rest is waited for. A pass
    that is cut into several programs counts as these, where a step is given. A step's peak and what is added to it are
    ranges too, of what XLA may make of them (``peak_range`` and ``exposed_range`` of an ``Option``).

    Args:
      tx: the transformation; or the step, jitted or not; or a function that makes a step of a transformation.
      *args: the parameters; or the step's arguments, concrete or abstract; or the transformation.
      chip: the accelerator, a name that ``jax_offload.chip`` takes or a ``Chip``; without it no seconds.
      tokens_per_step: over all devices.
      flops_per_token: operations of the forward and the backward pass for each token; where it is left out 6 for each
        parameter of two and more axes. A step's are counted: with one it is an error.
      device_memory: bytes of one device that the step may use, or text, ``"80GiB"``: the window may have what is left
        of them; where it is left out the chip's.
      mesh: that of the parameters, where they are to have one: it is an error if they are not on it, or with a step,
        whose arguments have their shardings.
      target: of a step, a chip to compile it for, as ``jax_offload.inspect`` takes it (extra ``aot``); ``chip`` is then
        that one, unless it is given.
      drive: what a state on disk is on, a name that ``jax_offload.drive`` takes or a ``Drive``; where it is left out
        ``pm9a3``, one of a data centre, the slowest of those that are known. One for each directory of the disk.
      **kwargs: the step's keyword arguments, but for those whose names are above.

    Returns:
      A ``Forecast``. Where nothing fits, its ``recommended`` is ``None``, and it says what is missing.

    Raises:
      TypeError: ``tx`` is neither a transformation nor a function.
      ValueError: the chip or the target is not known, a number is out of range, parameters are not on the mesh, the
        step offloads nothing, or the target's compiler is not installed.

    Example:
      >>> import jax, optax, jax_offload as jo
      >>> params = {f"w{i}": jax.ShapeDtypeStruct((4096, 4096), "float32") for i in range(8)}
      >>> forecast = jo.plan(optax.adamw(1e-3), params, device_memory="1.5GiB")
      >>> forecast["resident"].peak >> 20, forecast["offload"].host >> 20
      (2048, 1024)
      >>> forecast.recommended.code
      'tx = jo.offload(inner, fraction=0.63, window=133169152); step = jo.jit(step, donate_argnums=(0, 1))'
    """
    if target is not None and chip is None:
        chip = target_of(target).chip
    setting = setting_of(chip, tokens_per_step, flops_per_token, device_memory, drive)
    optimizers = optax.GradientTransformation | optax.MultiSteps
    by_make = len(args) == 1 and isinstance(args[0], optimizers)
    if kwargs and (by_make or isinstance(tx, optimizers)):
        raise TypeError(f"plan: {', '.join(kwargs)}: a step's keyword arguments go to plan(step, *args), no others.")
    if callable(tx) and (mesh is not None or flops_per_token is not None):
        name, why = ("mesh", "its arguments have their shardings") if mesh is not None else (
            "flops_per_token", "its operations are counted")  # fmt: skip
        raise ValueError(f"{name}: of plan(tx, params) alone; here is a step, and {why}. Leave it out.")
    if callable(tx) and by_make:
        return of_each_way(tx, args[0], setting, target)
    if isinstance(tx, optimizers):
        if len(args) != 1:
            raise TypeError(f"plan(tx, params): expected the parameters alone; got {len(args)} arguments.")
        if target is not None:
            raise ValueError(
                f"target: compiles a step, plan(step, *args, target={target!r}); an optimizer alone is none. Give "
                f"chip={target!r} for figures that need no compiler."
            )
        check_on_one_mesh(args[0], mesh)
        return of_optimizer(tx, args[0], setting, mesh)
    if len(args) == 1 and (getattr(tx, "__module__", None) or "").partition(".")[0] == "optax":
        check_inner(tx, "tx")  # the function that makes one
    if not callable(tx):
        raise TypeError(
            f"tx: expected an optax.GradientTransformation or a step, a function; got a {type(tx).__name__}. The order "
            "is plan(tx, params) or plan(step, *args)."
        )
    return of_step(tx, args, setting, target, kwargs)


def check_on_one_mesh(params: Any, mesh: Any) -> None:
    """Raises where ``mesh`` is none, or where it is left out and only some of the parameters are on several devices."""
    if isinstance(mesh, Mesh | AbstractMesh):
        return  # what is not on that one is told elsewhere
    if mesh is not None:
        raise TypeError(
            f"mesh: expected a jax.sharding.Mesh or an AbstractMesh; got {mesh!r}, a {type(mesh).__name__}."
        )
    found = [(keystr(path), sharding_of(x)) for path, x in tree_flatten_with_path(params)[0] if np.ndim(x)]
    there = [(path, s.mesh) for path, s in found if isinstance(s, NamedSharding) and s.mesh.size > 1]
    elsewhere = [path for path, s in found if not isinstance(s, NamedSharding)]
    if there and elsewhere:
        path, shape = there[0][0], dict(there[0][1].shape)
        raise ValueError(
            f"params: {path} is on the mesh {shape}, and {elsewhere[0]} is on none. Give all of them a "
            "NamedSharding of that mesh, PartitionSpec() for those that are whole on every device."
        )


def setting_of(given: Any, tokens: Any, flops: Any, memory: Any, drive: Any = None) -> Setting:
    """Checked."""
    for name, value in ("tokens_per_step", tokens), ("flops_per_token", flops):
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):
            raise ValueError(f"{name}: expected a number > 0; got {value!r}.")
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens_per_step: expected whole ones, 1 or more; got {tokens!r}.")
    known = None if given is None else chip_of(given)
    budget = bytes_of("device_memory", memory) if memory is not None else known.hbm_bytes if known else None
    if memory is not None and budget is not None and budget < 2**20:
        raise ValueError(f'device_memory: got {memory!r}, which is {budget} bytes, not even 1 MiB. Say "80GiB".')
    disk = drive_of(DEFAULT if drive is None else drive)
    return Setting(
        known, None if tokens is None else int(tokens), flops, budget, host_memory(), memory is not None, drive=disk
    )
