"""The table of compiled steps that no change may make worse: peaks, bytes and overlap, as ``jo.inspect`` reads them.

``python -m tests.aot.compiled`` compiles every row and prints its figures, as ``stored -> new`` where they differ;
``--write`` stores the result in ``compiled.json``, and the kinds of steps in ``docs/what_hides.md``; words select the
rows whose names contain them. ``test_compiled.py`` compiles the rows and compares. Nothing runs: the compiler's figures
are exact, the step times are simulated from its schedule.
"""

import tests.conftest  # noqa: F401, I001  (first: it sets up jax's CPU devices)
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_offload as jo
from tests.aot import zoo
from tests.aot.harness import mesh_for, on_a_fixed_link
from tests.aot.kinds import HIDDEN, KINDS, MARK, PAGE, Kind, resident, table
from tests.aot.model import loss as toy_loss
from tests.aot.model import two_by_two
from tests.support.steps import step_of

TABLE = Path(__file__).with_name("compiled.json")
MIB = 2**20
H200, V5E = "h200", "v5e:1x1"
PEAK, EXPOSED = 0.03, 0.05  # how much worse a row may become, as shares of the peak and of the link's time
AWAY = ", parameters on the host"
TOO_HIGH = 1.01  # a peak above the resident one

INT8 = {"mu": "int8", "nu": "uint8"}
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
OUTSIDE = lambda **options: optax.chain(optax.clip_by_global_norm(1.0), jo.offload(ADAMW, **options))  # noqa: E731

Tree = Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled step.

    Attributes:
      model: a key of ``MODELS``.
      tokens: tokens per step and device.
      optimizer: a name that says the options, and what makes the optimizer.
      way: ``"jit"``, ``"jo.jit"``, ``"pipelined"`` or ``"pipelined, gradients on the host"``; with ``AWAY`` the
        parameters are on the host too.
      target: the chip.
      beside: the resident optimizer, for a step by ``tx.update`` whose peak is also held to the resident one.
      mesh: ``""`` for one device; for four ``"fsdp"``, ``"layers"`` (divided along the first axis), ``"zero-1"`` or
        ``"replicated"``.
    """

    model: str
    tokens: int
    optimizer: tuple[str, Callable[[], Any]]
    way: str = "jo.jit"
    target: str = H200
    mesh: str = ""
    beside: Any = None

    @property
    def name(self) -> str:
        where = self.target + (f" x4 {self.mesh}" if self.mesh else "")
        return " | ".join((self.model, f"{self.tokens} tokens", self.optimizer[0], self.way, where))


def stack(
    layers: int, *shape: int, around: Callable[[Any], Any] = lambda loss: loss, batches: tuple[int, ...] = ()
) -> Callable[[], Any]:
    loss = around(two_by_two if len(shape) == 3 else toy_loss)
    params = {"w": (layers, *shape)}
    return lambda: (params, lambda tokens: ((*batches, tokens, shape[-1]), jnp.float32), loss)


def unrolled(layers: int, width: int) -> Callable[[], tuple[Tree, Any, Any]]:
    params = {f"w{k:03d}": (width, width) for k in range(layers)}
    return lambda: (params, lambda tokens: ((tokens, width), jnp.float32), toy_loss)


def matrix(rows: int, columns: int) -> Callable[[], tuple[Tree, Any, Any]]:
    def loss(params: Tree, x: jax.Array) -> jax.Array:
        return ((x @ params["w"]) ** 2).mean()

    return lambda: ({"w": (rows, columns)}, lambda tokens: ((tokens, rows), jnp.float32), loss)


def transformer(
    layers: int, width: int, heads: int, hidden: int, vocab: int, *, experts: int = 0, checkpoint: bool = True
) -> Callable[[], tuple[Tree, Any, Any]]:
    """Blocks in one scan, tied embeddings, gated MLPs; with ``experts``, each token goes to the best of them."""
    size = width // heads
    block = {"norm_1": (width,), "qkv": (width, 3 * width), "o": (width, width), "norm_2": (width,)}
    e = (experts,) if experts else ()
    block |= {"gate": (*e, width, hidden), "up": (*e, width, hidden), "down": (*e, hidden, width)}
    block |= {"router": (width, experts)} if experts else {}
    params = {"embed": (vocab, width), "norm": (width,), "blocks": {k: (layers, *s) for k, s in block.items()}}

    def mlp(y: jax.Array, p: Tree) -> jax.Array:
        if not experts:
            return (jax.nn.gelu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
        tokens = y.reshape(experts, -1, width)  # as many for each, as a balanced router gives them
        share = jax.nn.softmax((tokens @ p["router"]).astype(jnp.float32)).max(-1, keepdims=True).astype(y.dtype)
        h = jax.nn.silu(jnp.einsum("etw,ewh->eth", tokens, p["gate"])) * jnp.einsum("etw,ewh->eth", tokens, p["up"])
        return (jnp.einsum("eth,ehw->etw", h, p["down"]) * share).reshape(y.shape)

    def apply(x: jax.Array, p: Tree) -> jax.Array:
        p = {k: w.astype(x.dtype) for k, w in p.items()}
        y = (zoo.norm(x, p["norm_1"]) @ p["qkv"]).reshape(*x.shape[:2], 3, heads, size)
        x = x + zoo.attend(y[:, :, 0], y[:, :, 1], y[:, :, 2], True).reshape(x.shape) @ p["o"]
        return x + mlp(zoo.norm(x, p["norm_2"]), p)

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        embed = params["embed"].astype(jnp.bfloat16)
        body = jax.checkpoint(apply) if checkpoint else apply
        x, _ = jax.lax.scan(lambda x, p: (body(x, p), None), embed[tokens[:, :-1]], params["blocks"])
        return zoo.nats(zoo.norm(x, params["norm"]), embed.T, tokens[:, 1:])

    return lambda: (params, lambda tokens: ((tokens // zoo.CONTEXT, zoo.CONTEXT + 1), jnp.int32), loss)


MODELS: dict[str, tuple[Callable[[], tuple[Tree, Any, Any]], Any]] = {
    "24x4096^2 scanned": (stack(24, 4096, 4096), jnp.float32),
    "12x(2x4096^2) scanned": (stack(12, 2, 4096, 4096), jnp.float32),
    "24x4096^2 scanned, bfloat16": (stack(24, 4096, 4096), jnp.bfloat16),
    "24x4096^2 scanned, a checkpoint around the loss": (stack(24, 4096, 4096, around=jax.checkpoint), jnp.float32),
    "24x4096^2 unrolled": (unrolled(24, 4096), jnp.float32),
    "12x4096^2 unrolled": (unrolled(12, 4096), jnp.float32),
    "12x4096^2 scanned": (stack(12, 4096, 4096), jnp.float32),
    "GPT 1.3B scanned": (transformer(24, 2048, 16, 5504, 50304), jnp.float32),
    "GPT of four wide blocks scanned": (transformer(4, 4096, 32, 8192, 256, checkpoint=False), jnp.float32),
    "Gemma 2B scanned": (transformer(18, 2048, 8, 16384, 256128), jnp.float32),
    "MoE scanned": (transformer(8, 2048, 16, 5504, 32000, experts=8), jnp.float32),
    "588x1280": (matrix(588, 1280), jnp.float32),  # on a TPU 12 rows are left behind the last whole chunk
    "ViT": (zoo.vit, jnp.float32),
    "ViT, checkpointed": (partial(zoo.vit, checkpoint=True, mapped=False), jnp.bfloat16),
    "GPT unrolled, bfloat16": (zoo.gpt, jnp.bfloat16),
    "ConvNet, bfloat16": (zoo.convnet, jnp.bfloat16),
    "MLP with biases and norms": (zoo.mlp, jnp.float32),
}


def three_in_a_scan(tx: Any, loss: Any, params: Tree, state: Tree, batches: Any) -> Any:
    """Three steps in one program; each is rewritten as a step of its own."""

    def one(carry: Any, x: Any) -> Any:
        return jo.update_params(tx, jax.grad(loss)(carry[0], x), carry[1], carry[0]), None

    return jax.lax.scan(one, (params, state), batches)[0]


def of_microbatches(tx: Any, loss: Any, params: Tree, state: Tree, batches: Any) -> Any:
    """Four microbatches in a scan. The last one hosts the update, or the first one if the step is turned round."""

    def add(total: Tree, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(jnp.add, total, grads), value

    grads = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]
    return jo.update_params(tx, grads, state, params)


MOVED = "16x4096^2 unrolled, the state moved to the device"  # by a trainer: it goes home in the step
MICROBATCHES = "12x(2x4096^2) scanned, four microbatches"
THREE = "8x4096^2 scanned, three steps in a scan"
STEPS = {THREE: three_in_a_scan, MICROBATCHES: of_microbatches}
MODELS |= {
    THREE: (stack(8, 4096, 4096, batches=(3,)), jnp.float32),
    MICROBATCHES: (stack(12, 2, 4096, 4096, batches=(4,)), jnp.float32),
    MOVED: (unrolled(16, 4096), jnp.float32),
}
MODELS |= {
    f"{n}x{width}^2 scanned": (stack(n, width, width), jnp.float32) for n, width in ((2, 4096), (12, 1024), (12, 512))
}
MODELS |= {
    f"{n}x{width}^2 unrolled": (unrolled(n, width), jnp.float32)
    for n, width in ((8, 128), (16, 256), (32, 768), (12, 512), (4, 512))
}
RESIDENT = ("resident", lambda: ADAMW)
OFFLOAD = ("adamw", lambda: jo.offload(ADAMW))
CLIP = ("clipped adamw", lambda: jo.offload(CLIPPED))
CLIP_OUTSIDE = ("clip, adamw", OUTSIDE)
HALF = ("adamw, fraction 0.5", lambda: jo.offload(ADAMW, fraction=0.5))
TENTH = ("adamw, fraction 0.1", lambda: jo.offload(ADAMW, fraction=0.1))
EIGHT = ("adamw, int8", lambda: jo.offload(ADAMW, storage=INT8))
MASTERS = ("masters of adamw", lambda: jo.offload(jo.with_master_params(ADAMW)))
ZERO = ("adamw, ZeRO-1", lambda: jo.offload(ADAMW, shard_over="data"))
CORES = ("adamw on the cores", lambda: jo.offload(ADAMW, update_on="host"))
DISK = ("adamw on disk", lambda: jo.offload(ADAMW, disk=jo.disk(tempfile.mkdtemp())))
FACTORED = ("adafactor", lambda: jo.offload(optax.adafactor(1e-3)))
LAMB = ("lamb", lambda: jo.offload(optax.lamb(1e-3)))
LION = ("lion", lambda: jo.offload(optax.lion(1e-3)))
FINITE = ("apply_if_finite of clipped", lambda: jo.offload(optax.apply_if_finite(CLIPPED, 3)))
MULTI = ("MultiSteps", lambda: jo.offload(optax.MultiSteps(ADAMW, 2)))
MULTI_CLIP = ("MultiSteps of clipped", lambda: jo.offload(optax.MultiSteps(CLIPPED, 2)))
MULTI_SKIP = (
    "MultiSteps that skips",
    lambda: jo.offload(optax.MultiSteps(CLIPPED, 2, should_skip_update_fn=optax.skip_not_finite)),
)
PRODIGY = ("prodigy", lambda: jo.offload(optax.contrib.prodigy(1.0)))
ZERO_CLIP = ("clipped adamw, ZeRO-1", lambda: jo.offload(CLIPPED, shard_over="data"))
THIRD_ON_CORES = ("adamw, 0.3 on the cores", lambda: jo.offload(ADAMW, update_on=0.3))
HALF_ON_CORES = ("adamw, half on the cores", lambda: jo.offload(ADAMW, update_on=0.5))


def by_update(model: str, name: str, inner: Any = ADAMW, target: str = H200, mesh: str = "", **options: Any) -> Row:
    """A row of small leaves beside the resident step, with state from 1 MiB to 1 GiB."""
    return Row(model, 512, (f"{name}, by update", lambda: jo.offload(inner, **options)), "jit", target, mesh, inner)


SCANNED, PAIRS = "24x4096^2 scanned", "12x(2x4096^2) scanned"
AROUND = "24x4096^2 scanned, a checkpoint around the loss"
LAYERS, TWELVE = "24x4096^2 unrolled", "12x4096^2 unrolled"
MANY = 16384
ROWS = [
    *(Row(SCANNED, tokens, OFFLOAD, way) for tokens in (512, MANY) for way in ("jo.jit", "jit")),
    *(Row(SCANNED, tokens, RESIDENT, "jit") for tokens in (512, MANY)),
    Row(LAYERS, 512, RESIDENT, "jit"),
    *(Row(LAYERS, tokens, OFFLOAD, way) for tokens in (512, MANY) for way in ("jit", "jo.jit")),
    Row(LAYERS, 32768, OFFLOAD, "jit"),
    Row(SCANNED, 512, CLIP, "jit"),
    Row(SCANNED, 512, CLIP_OUTSIDE, "jit"),
    Row(LAYERS, 512, CLIP, "jit"),
    Row(PAIRS, MANY, ("resident, clipped", lambda: CLIPPED), "jit"),
    *(Row(PAIRS, tokens, CLIP, "pipelined") for tokens in (MANY, 32768)),
    Row(PAIRS, MANY, CLIP, "pipelined, gradients on the host"),
    Row(TWELVE, MANY, CLIP, "pipelined"),
    Row(PAIRS, MANY, ("clipped adamw, int8", lambda: jo.offload(CLIPPED, storage=INT8)), "pipelined"),
    *(Row(TWELVE, MANY, each) for each in (HALF, TENTH)),
    *(Row(SCANNED, MANY, each) for each in (EIGHT, FACTORED, LAMB)),
    *(Row("24x4096^2 scanned, bfloat16", MANY, MASTERS, way) for way in ("jit", "jo.jit")),
    Row("GPT 1.3B scanned", MANY, RESIDENT, "jit"),
    Row("GPT 1.3B scanned", MANY, OFFLOAD),
    Row("GPT 1.3B scanned", MANY, CLIP, "pipelined"),
    Row("GPT of four wide blocks scanned", 32768, CLIP, "pipelined"),  # its halves need their gate
    Row("Gemma 2B scanned", MANY, OFFLOAD),
    Row("MoE scanned", MANY, OFFLOAD),
    *(Row("ViT", MANY, OFFLOAD, way) for way in ("jit", "jo.jit")),
    *(Row("GPT unrolled, bfloat16", MANY, OFFLOAD, way) for way in ("jit", "jo.jit")),
    Row("ConvNet, bfloat16", MANY, OFFLOAD, "jit"),
    Row("MLP with biases and norms", MANY, OFFLOAD),
    *(Row("12x4096^2 scanned", 512, each) for each in (CORES, DISK)),
    Row(TWELVE, 512, CORES),
    Row(LAYERS, 512, DISK),
    *(Row("12x4096^2 scanned", 512, OFFLOAD, "jo.jit", H200, mesh) for mesh in ("fsdp", "replicated")),
    Row("12x4096^2 scanned", 512, ZERO, "jo.jit", H200, "zero-1"),
    Row("12x4096^2 scanned", 512, ("clipped adamw", lambda: jo.offload(CLIPPED)), "pipelined", H200, "fsdp"),
    *(Row("12x4096^2 scanned", 512, OFFLOAD, way, V5E) for way in ("jit", "jo.jit")),
    Row(LAYERS, 512, CLIP_OUTSIDE, "jit"),
    *(Row(LAYERS, 512, each, "jit") for each in (MULTI, FINITE, LION)),
    *(Row(SCANNED, 512, each, "jit") for each in (LAMB, MULTI_CLIP, MULTI_SKIP, FINITE, PRODIGY)),
    Row("588x1280", 64, ("adamw, a window of 1 MiB", lambda: jo.offload(ADAMW, window=2**20)), "jit", V5E),
    Row(THREE, MANY, OFFLOAD),
    Row(MICROBATCHES, MANY, CLIP, "pipelined"),
    Row(MOVED, 512, OFFLOAD, "jit"),
    Row(LAYERS, MANY, CORES),
    Row(LAYERS, MANY, THIRD_ON_CORES),
    Row("GPT unrolled, bfloat16", MANY, HALF_ON_CORES),
    Row("12x4096^2 scanned", MANY, OFFLOAD, "jo.jit", H200, "fsdp"),
    Row("12x4096^2 scanned", MANY, ZERO, "jo.jit", H200, "zero-1"),
    Row("12x4096^2 scanned", 512, OFFLOAD, "jo.jit", H200, "layers"),
    *(Row(TWELVE, 512, each, "jit", H200, "zero-1") for each in (ZERO, ZERO_CLIP)),
    *(Row(model, MANY, ZERO_CLIP, "pipelined", H200, "zero-1") for model in (PAIRS, TWELVE)),
    *(Row(model, MANY, CLIP, "pipelined", H200, "fsdp") for model in (PAIRS, TWELVE)),
    Row("ViT, checkpointed", 4096, ("adamw, fraction 0.25", lambda: jo.offload(ADAMW, fraction=0.25)), "jit", H200,
        "fsdp"),
    *(Row(SCANNED, tokens, OFFLOAD, f"jo.jit{AWAY}") for tokens in (512, MANY)),
    Row("GPT 1.3B scanned", MANY, OFFLOAD, f"jo.jit{AWAY}"),
    Row("12x4096^2 scanned", 512, OFFLOAD, f"jo.jit{AWAY}", H200, "fsdp"),
    *(Row(PAIRS, MANY, CLIP, f"{way}{AWAY}") for way in ("pipelined", "pipelined, gradients on the host")),
    *(Row(LAYERS, tokens, OFFLOAD, f"jo.jit{AWAY}") for tokens in (512, MANY)),
    *(Row(AROUND, MANY, OFFLOAD, f"jo.jit{away}") for away in ("", AWAY)),
    *(Row(MICROBATCHES, MANY, OFFLOAD, f"jo.jit{away}") for away in ("", AWAY)),
    by_update("12x1024^2 scanned", "clipped adamw", CLIPPED),  # in an early version each was above resident
    by_update("2x4096^2 scanned", "adamw"),
    by_update("12x4096^2 scanned", "adamw", mesh="fsdp"),
    by_update("8x128^2 unrolled", "adamw"),
    by_update("16x256^2 unrolled", "clipped adamw", CLIPPED),
    by_update("32x768^2 unrolled", "adamw"),
    by_update("12x512^2 unrolled", "lamb", optax.lamb(1e-3)),
    by_update("12x512^2 scanned", "adamw, bfloat16 state", storage="bfloat16"),
    by_update("4x512^2 unrolled", "adamw", target=V5E),
    # Gathered updates are larger than divided gradients.
    *(by_update(m, "adamw, ZeRO-1", mesh="zero-1", shard_over="data") for m in (TWELVE, "2x4096^2 scanned")),
    *KINDS,
]  # fmt: skip


def abstract(row: Row) -> tuple[Tree, Any, Any]:
    """Parameters and a batch, abstract, and the loss."""
    built, dtype = MODELS[row.model]
    shapes, batch_of, loss = built()
    n = 4 if row.mesh else 1
    mesh = mesh_for("", (n,))

    def leaf(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        spec = [None] * len(shape)
        if row.mesh in ("fsdp", "layers") and len(shape) > 1:
            first = 1 if row.mesh == "fsdp" else 0
            spec[next(k for k in range(first, len(shape)) if shape[k] % n == 0)] = "data"  # pyright: ignore
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec), memory_kind="device"))

    params = jax.tree.map(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))
    shape, of_batch = batch_of(n * row.tokens)
    rows = NamedSharding(mesh, P("data") if row.mesh else P(), memory_kind="device")
    return params, jax.ShapeDtypeStruct(shape, of_batch, sharding=rows), loss


def compiled(row: Row | Kind, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """A row of the table: MiB per device, milliseconds (simulated), and the share of the link's time exposed.

    Args:
      before: the stored row; the resident step of a kind is not compiled again.
    """
    if isinstance(row, Kind):
        return of_kind(row, (before or {}).get("resident"))
    found = measured(row, *jitted(row))
    if row.beside is None:
        return found
    plain = dataclasses.replace(row, optimizer=("resident", lambda: row.beside))
    return found | {"resident": (before or {}).get("resident") or measured(plain, *jitted(plain))["peak"]}


def jitted(row: Row) -> tuple[Any, tuple[Any, ...]]:
    """The step of a row, as its way jits it, and its abstract arguments."""
    params, batch, loss = abstract(row)
    tx = row.optimizer[1]()
    state = jo.abstract_state(tx, params)
    plain = row.optimizer[0].startswith("resident") or row.beside is not None
    form = "update" if plain or row.model == MOVED else "update_params"
    step = partial(STEPS[row.model], tx, loss) if row.model in STEPS else step_of(tx, form, loss)
    how: dict[str, Any] = {"donate_argnums": (0, 1)}
    if row.model == MOVED:
        how["out_shardings"] = *jax.tree.map(lambda x: x.sharding, (params, state)), None
        state = jax.tree.map(lambda x: x.update(sharding=x.sharding.with_memory_kind("device")), state)
    elif row.way == "jit":
        how["compiler_options"] = jo.compiler_options("tpu" if row.target == V5E else "cuda")
    elif row.way.startswith("pipelined"):
        how["gradients"] = "host" if "gradients on the host" in row.way else "device"
    if row.way.endswith(AWAY):
        params = jax.tree.map(lambda x: x.update(sharding=x.sharding.with_memory_kind("pinned_host")), params)
    wraps = {"jit": jax.jit, "jo.jit": jo.jit, "pipelined": jo.pipelined}
    return wraps[row.way.partition(",")[0]](step, **how), (params, state, batch)


def of_kind(kind: Kind, plain: float | None) -> dict[str, Any]:
    """A row with the peak of the resident step, and the first reason why little is hidden."""
    if plain is None:
        step, args, donate = kind.make(resident)
        plain = jo.inspect(jax.jit(step, donate_argnums=donate), *args, target=kind.target).peak / MIB
    step, args, donate = kind.make(jo.offload)
    ours: Any = {"jo.jit": jo.jit, "pipelined": jo.pipelined}[kind.way](step, donate_argnums=donate)
    found = measured(kind, ours, args)
    stays = () if kind.way == "pipelined" else jo.placement(ours, *args).stays
    why = re.sub(r" \(at \S+\)", "", stays[0]) if found["exposed"] > HIDDEN and stays else ""
    return found | {"resident": round(plain, 1), "why": why}


def measured(row: Row | Kind, step: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    found = jo.inspect(step, *args, target=row.target, chip=on_a_fixed_link(row.target))
    t = found.timeline
    assert t is not None
    may_err = isinstance(row, Kind) or row.optimizer[0].startswith("resident") or row.model == MOVED
    assert may_err or not found.errors, found.errors
    return {
        "peak": round(found.peak / MIB, 1),
        "host": round(found.host / MIB, 1),
        "loaded": round(found.loaded / MIB, 1),
        "stored": round(found.stored / MIB, 1),
        "step_ms": round(t.step * 1e3, 2),
        "exposed": round(t.exposed / t.link if t.link else 0.0, 3),
        **({"collectives_ms": round(t.collectives * 1e3, 2)} if row.mesh else {}),
    }


def stored() -> dict[str, dict[str, Any]]:
    """The table as it was last written."""
    return json.loads(TABLE.read_text())["rows"] if TABLE.exists() else {}


def figures(now: dict[str, Any], before: dict[str, Any]) -> str:
    """Return a row's figures, each after the stored one if they differ, for better or worse."""
    both = ((name, x, before.get(name, x)) for name, x in now.items())
    return ", ".join(f"{name} {x}" if x == old else f"{name} {old} -> {x}" for name, x, old in both)


def worse(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What a row has lost beside the stored one, and beside the resident step."""
    found = []
    if now["peak"] > before["peak"] * (1 + PEAK) + 1:
        found.append(f"peak {before['peak']} -> {now['peak']} MiB")
    if now["peak"] > max(now.get("resident", now["peak"]) * TOO_HIGH, now.get("resident", 0) + 1):
        found.append(f"peak {now['peak']} MiB above resident, {now['resident']} MiB")
    if now["exposed"] > HIDDEN and now.get("why") != before.get("why"):
        found.append(f"the reason was {before['why']!r}, and is {now['why']!r}")
    if now["exposed"] > before["exposed"] + EXPOSED:
        found.append(f"exposed {before['exposed']} -> {now['exposed']}")
    if "resident" in now and before["exposed"] <= HIDDEN < now["exposed"]:
        found.append(f"a kind that was hidden exposes {now['exposed']}")
    for name in ("host", "loaded", "stored", "collectives_ms"):
        if name in now and name in before and now[name] > before[name] * 1.01 + 1:
            found.append(f"{name} {before[name]} -> {now[name]}")
    if now["host"] < before.get("host", 0) * 0.99:
        found.append(f"less is in host memory: {before['host']} -> {now['host']}")
    return found


def main(arguments: list[str]) -> None:
    write, words = "--write" in arguments, [word for word in arguments if word != "--write"]
    rows = stored()
    for row in ROWS:
        if not all(word in row.name for word in words):
            continue
        try:
            now = compiled(row)
        except Exception as error:
            print(f"{row.name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
            continue
        lost = [f"WORSE: {each}" for each in worse(now, rows[row.name])] if row.name in rows else ["new"]
        print(row.name, figures(now, rows.get(row.name, {})), *lost, flush=True)
        if write:
            rows[row.name] = now
            head = {"jax": jax.__version__, "optax": optax.__version__, "units": "MiB per device; ms simulated"}
            TABLE.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
            PAGE.write_text(PAGE.read_text().partition(MARK)[0] + f"{MARK}\n\n{table(rows)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
