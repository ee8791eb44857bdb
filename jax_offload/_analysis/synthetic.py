"""Parameters and an optimizer as a command line describes them: nothing is allocated."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jax_offload._analysis.ways import eight_bits
from jax_offload._files.files import Disk
from jax_offload._offload import offload
from jax_offload._precision.masters import with_master_params


@dataclasses.dataclass(frozen=True)
class Described:
    """What a command line says of a model.

    Attributes:
      tx: the optimizer; offloaded already where storage or sharding were asked for.
      called: the optimizer without that, as code.
      params: abstract ones: stacked layers, and what is left over as one matrix.
      layers, width: of them.
    """

    tx: Any
    called: str
    params: Any
    layers: int
    width: int


def described(
    n: int, optimizer: str, dtype: str, *, master: str | None = None, storage: str | None = None, clip: bool = False,
    layers: int | None = None, width: int | None = None, devices: int = 1, shard_over: str | None = None,
    fsdp: bool = False, disk: Disk | None = None,
) -> Described:  # fmt: skip
    """A transformer of ``n`` parameters, and its optimizer.

    Raises:
      ValueError: an option does not fit.
    """
    axis, mesh = shard_over or "data", None
    if devices > 1:
        mesh = AbstractMesh((devices,), (axis,))
    elif shard_over is not None or fsdp:
        option = "fsdp: divides parameters over" if fsdp else "shard-over: is an axis of"
        raise ValueError(f"{option} several devices; give --devices too.")
    if fsdp and shard_over is not None:
        raise ValueError(
            "shard-over: with --fsdp the state is divided as the parameters; leave out the one or the other."
        )
    layers, width = shape_of(n, layers, width)
    if fsdp and width % devices:
        raise ValueError(f"devices: {devices} do not divide the width, {width}, as --fsdp would.")
    place = None if mesh is None else NamedSharding(mesh, PartitionSpec(None, axis) if fsdp else PartitionSpec())
    params = _parameters(n, layers, width, _dtype("param-dtype", dtype), place)
    inner, called = _optimizer(optimizer)
    if clip:
        inner = optax.chain(optax.clip_by_global_norm(1.0), inner)
        called = f"optax.chain(optax.clip_by_global_norm(1.0), {called})"
    if master is not None:
        inner = with_master_params(inner, _dtype("master", master))
        called = f"jo.with_master_params({called})"
    options: dict[str, Any] = {} if shard_over is None else {"shard_over": shard_over}
    if storage is not None:
        options["storage"] = storage
        if storage == "int8":
            options["storage"] = eight_bits(jax.eval_shape(inner.init, params)) or storage
    if disk is not None:
        if mesh is not None:
            raise ValueError(f"disk: plan counts files for one device yet; got {devices} devices. Leave out one.")
        options["disk"] = disk
    return Described(offload(inner, **options) if options else inner, called, params, layers, width)


def shape_of(n: int, layers: int | None, width: int | None) -> tuple[int, int]:
    """Layers and width of a transformer of ``n`` parameters, 12 width² in a layer: as given, or 128 wide a layer."""
    if width is None:
        width = int((n / 12 / layers) ** 0.5) if layers else int((128 * n / 12) ** (1 / 3))
        width = max(128, width // 128 * 128)
    return layers or max(1, n // (12 * width**2)), width


def _parameters(n: int, layers: int, width: int, dtype: Any, sharding: Any) -> dict[str, Any]:
    def leaf(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    columns = min(12 * width, n // (layers * width))
    if columns < 3:
        of = f"{layers} layer{'s' if layers > 1 else ''} of width {width}"
        raise ValueError(
            f"--params: {n:g} are too few for {of}, {3 * layers * width} at least. Give more, or fewer --layers and a "
            "smaller --width."
        )
    found = {"attention": leaf(layers, width, columns // 3), "mlp": leaf(layers, width, columns - columns // 3)}
    rest = (n - layers * width * columns) // width
    return found | ({"embed": leaf(rest, width)} if rest else {})


def _dtype(option: str, name: str) -> Any:
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{option}: expected a floating dtype such as bfloat16 or float32; got {name!r}.")
    return dtype


def _optimizer(name: str) -> tuple[Any, str]:
    for module, called in (optax, "optax"), (optax.contrib, "optax.contrib"):
        make = getattr(module, name, None)
        if make is None or name.startswith("_"):
            continue
        try:
            tx = make(1e-3)
        except Exception as error:
            raise ValueError(f"optimizer: {called}.{name}(1e-3) raises {type(error).__name__}: {error}") from error
        if isinstance(tx, optax.GradientTransformation):
            return tx, f"{called}.{name}(1e-3)"
    raise ValueError(f"optimizer: optax has no {name!r}. Names are those of optax: adamw, adam, lion, sgd, adafactor.")
