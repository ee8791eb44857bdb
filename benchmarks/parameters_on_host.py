"""Parameters in host memory beside parameters on the device: peaks, bytes and steps, compiled and simulated.

    JAX_PLATFORMS=cpu python -m benchmarks.parameters_on_host [REGEX] [--out FILE]

Each case is a model and a way to train it. ``resident`` is plain optax; ``state`` is ``jo.jit`` with the state in host
memory, and ``both`` has the stacked parameters there too; ``low bits`` keeps 16 bits beside each bfloat16 parameter and
no master. ``clipped`` is ``both`` under ``jo.pipelined`` with gradients on the host, if the name does not say where.
``MaxText`` loads a layer in the scan's body, and all parameters and state for the update, by ``jax.jit``. ``largest``
models have as many layers as an H200 and 1.5 TB of host memory hold. Nothing runs; half an hour on two cores. Cases
that have a result are not compiled again. Needs ``pip install '.[aot]'``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_offload as jo
from benchmarks.models import CLIPPED, FULL, HALF, MODELS, Model
from benchmarks.parts.recipe import usual_recipe
from tests.aot.model import loss as toy_loss

OUT = Path(__file__).parent / "results" / "parameters_on_host.json"
ADAMW, SPACE = optax.adamw(1e-3), jax.memory.Space
LINKS = {"h200": 50e9, "v5e:1x1": 12e9}  # in each direction at once, as in tests/aot/compiled.json
WIDE = Model("GPT of width 8192", 8, 8192, 64, 64, 32768, 50304, 4, 2048, dtype=HALF)


class Loading(Model):
    """A model whose scan loads the parameters of a layer in its body, inside the checkpoint."""

    def _block(self, x: Any, w: Any) -> Any:
        return super()._block(x, jax.device_put(w, SPACE.Device))


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to train a model, which is one of ``benchmarks.models`` or 24 layers of 4096x4096 with so many tokens."""

    model: Model | int
    way: str
    target: str = "h200"
    dtype: Any = FULL
    storage: Any = None

    @property
    def name(self) -> str:
        title = f"24x4096^2, {self.model} tokens" if isinstance(self.model, int) else self.model.title
        return " | ".join((f"{title}, {jnp.dtype(self.dtype).name}", self.way, self.target))

    def arguments(self) -> tuple[Any, Any, Callable[..., Any]]:
        """Abstract parameters, an abstract batch, and the loss."""
        at = NamedSharding(Mesh(jax.devices("cpu")[:1], ("data",)), PartitionSpec(), memory_kind="device")
        model = self.model
        shapes = {"w": (24, 4096, 4096)} if isinstance(model, int) else model.shapes()
        leaf = partial(jax.ShapeDtypeStruct, dtype=self.dtype, sharding=at)
        params = jax.tree.map(leaf, shapes, is_leaf=lambda s: isinstance(s, tuple))
        if isinstance(model, int):
            return params, leaf((model, 4096)), toy_loss
        tokens = jax.ShapeDtypeStruct((model.sequences, model.context), jnp.int32, sharding=at)
        return params, (tokens, tokens), (Loading(**vars(model)) if self.way == "MaxText" else model).loss

    def measured(self) -> dict[str, Any]:
        params, batch, loss = self.arguments()
        inner = CLIPPED if "clipped" in self.way else ADAMW
        if self.dtype == HALF:
            inner = jo.with_master_params(inner, low_bits="low bits" in self.way)
        resident = self.way.startswith("resident")
        tx = jo.offload(inner, fraction=0) if resident else jo.offload(inner, storage=self.storage)
        state, stacked = jo.abstract_state(tx, params), "w" if "w" in params else "blocks"
        if not resident and self.way != "state":
            params[stacked] = jo.to_host(params[stacked])

        def by_optax(params: Any, state: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, batch)
            if self.way != "MaxText":
                updates, state = inner.update(grads, state, params)
                return optax.apply_updates(params, updates), state, value
            grads[stacked], whole = jax.device_put((grads[stacked], params[stacked]), SPACE.Device)
            updates, state = usual_recipe(inner).update(grads, state, params := {**params, stacked: whole})
            params = optax.apply_updates(params, updates)
            return {**params, stacked: jax.device_put(params[stacked], SPACE.Host)}, state, value

        def ours(params: Any, state: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, batch)
            return *jo.update_params(tx, grads, state, params), value

        if self.way.startswith("clipped"):
            gradients = "device" if "gradients on the device" in self.way else "host"
            step: Any = jo.pipelined(ours, donate_argnames=("params", "state"), gradients=gradients)
        elif self.way.startswith(("state", "both")):
            step = jo.jit(ours, donate_argnums=(0, 1))
        else:
            step = jax.jit(by_optax, donate_argnums=(0, 1))
        link = LINKS[self.target]
        chip = dataclasses.replace(jo.chip(self.target.partition(":")[0]), host_link=link, host_link_both=2 * link)
        seen = jo.inspect(step, params, state, batch, target=self.target, chip=chip)
        assert seen.timeline is not None
        found = {key: getattr(seen, key) for key in ("peak", "host", "loaded", "stored")}
        found |= {key: getattr(seen.timeline, key) for key in ("step", "exposed", "link")}
        return {"parameters": sum(x.size for x in jax.tree.leaves(params)), **found}


def largest(way: str) -> dict[str, Any]:
    """Return the result for the most layers that fit: peak and host memory grow linearly with the layers."""
    limits = {"peak": 0.95 * jo.chip("h200").hbm_bytes, "host": 1.5e12}  # jax takes 95 % of a GPU at most

    def of(layers: int) -> dict[str, Any]:
        model = dataclasses.replace(WIDE, layers=layers)
        return Case(model, way, dtype=HALF, storage="bfloat16").measured() | {"layers": layers}

    few, more = of(8), of(16)
    layers = int(min(8 + 8 * (limits[k] - few[k]) / (more[k] - few[k]) for k in limits if more[k] > few[k]))
    while any((found := of(layers))[k] > limits[k] for k in limits):
        layers -= 1
    return found


TOYS = [(n, "h200", FULL) for n in (32768, 16384, 512)] + [(n, "h200", HALF) for n in (16384, 32768)]
TOYS += [(n, "v5e:1x1", FULL) for n in (512, 16384)]
WAYS = "resident", "state", "both"
CASES = [Case(n, way, target, dtype) for n, target, dtype in TOYS for way in WAYS]
CASES += [Case(n, "both, low bits", dtype=HALF) for n in (16384, 32768)]
CLIPPED_WAYS = "resident, clipped", "clipped", "clipped, gradients on the device"
CASES += [Case(n, way) for n in (512, 16384) for way in CLIPPED_WAYS]
CASES += [Case(MODELS["gpt-7b"], way) for way in (*WAYS, "MaxText", "resident, clipped", "clipped")]
RUNS: dict[str, Callable[[], dict[str, Any]]] = {case.name: case.measured for case in CASES}
RUNS |= {f"largest {WIDE.title} | {way} | h200": partial(largest, way) for way in WAYS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("regex", nargs="?", default="")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in filter(re.compile(args.regex).search, RUNS):
        if name not in results:
            results[name] = RUNS[name]() | {"jax": jax.__version__}
            args.out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, results[name], flush=True)


if __name__ == "__main__":
    main()
