"""The pass before an update in several programs, compiled for an H200: no more memory than one takes."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_offload as jo
from jax_offload._analysis.compiled import on_files
from jax_offload._base.around import step_described
from jax_offload._base.arrays import is_traced, nbytes
from jax_offload._base.jaxprs import jaxpr_of
from jax_offload._base.memory import DEVICE_KIND, HOST_KIND, is_host_aval
from jax_offload._drive.run import Driven
from jax_offload._drive.stages import BEFORE, GROUP
from jax_offload._interop.xla_options import options_for_sending
from tests.aot.harness import H200, MIB, measure, mesh_for, require


def here():
    return NamedSharding(mesh_for(H200), PartitionSpec())


def of(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=here())


def mlp(layers, tokens, remat=False, width=4096):
    layer = (jax.checkpoint if remat else lambda f: f)(lambda x, w: jnp.tanh(x @ w))

    def loss(params, x):
        for name in sorted(params):
            x = layer(x, params[name])
        return (x**2).mean()

    return loss, {f"w{k:02d}": of((width, width)) for k in range(layers)}, of((tokens, width))


def scanned(layers=12, width=4096, tokens=16384, head=0):
    """Layers in a scan, and a head behind it."""
    params = {"layers": of((layers, width, width)), **({"head": of((width, head))} if head else {})}

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        return ((x @ params["head"] if head else x) ** 2).mean()

    return loss, params, of((tokens, width))


MODELS = {
    "MLP": lambda: mlp(12, 16384),
    "MLP, checkpointed": lambda: mlp(12, 16384, remat=True),
    "MLP, few tokens": lambda: mlp(24, 512),
    "scanned": scanned,
    "scanned, a head": lambda: scanned(head=2**15),
    "scanned, few tokens": lambda: scanned(24, tokens=512),
}


def driven(name, segments, **where):
    return driven_and_leaves(*MODELS[name](), segments, **where)[0]


def driven_and_leaves(loss, params, batch, segments, **where):
    tx = jo.offload(optax.adamw(1e-3), **where)

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return *jo.update_params(tx, grads, state, params), value

    args = params, jo.abstract_state(tx, params), batch
    with step_described():
        closed, _ = jaxpr_of(step, *args)
        if (there := on_files(args, closed)) is not args:
            closed, _ = jaxpr_of(step, *there)
    leaves = [x for x in jax.tree.leaves(there) if is_traced(x)]
    return Driven(closed, leaves, [True] * (len(leaves) - 1) + [False], {}, {}, segments), leaves


def peak(found):
    """How many programs the pass has; and MiB: of each, and of each group of a state on disk, its own and what is
    beside it, the greatest."""
    alive = {v for v in found._step.inputs if not is_host_aval(v.aval)}
    peaks, of_program = [], {}
    for task, program in found._tasks:
        if task.stage.name not in (BEFORE, GROUP):
            break
        beside = sum(nbytes(v.aval) for v in alive - {*task.inputs}) / MIB
        kinds = [[HOST_KIND if is_host_aval(v.aval) else DEVICE_KIND for v in of] for of in (task.inputs, task.outputs)]
        kinds[1] += [HOST_KIND for _ in task.down]
        before, after = ([here().with_memory_kind(kind) for kind in of] for of in kinds)
        operands = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=s)
            for v, s in zip(task.inputs, before, strict=True)
        ]
        if (own := of_program.get(program)) is None:
            options = options_for_sending("cuda") if task.sends else {}
            compiled = measure(H200, program.__wrapped__, tuple(operands), task.reused, after, options)
            assert compiled.host_temp == 0 and (compiled.loaded == 0 or task.stage.name == GROUP)
            own = of_program[program] = compiled.peak
        peaks.append(own + beside)
        alive |= {v for v in task.outputs if not is_host_aval(v.aval)}
        alive -= task.free
    return sum(task.stage.name == BEFORE for task, _ in found._tasks), max(peaks)


def check(name, least, **offload):
    """Several programs take no more than one does."""
    (one, in_one), (several, in_several) = (peak(driven(name, cut, **offload)) for cut in (False, True))
    print(name, offload, several, in_one, in_several)
    assert one == 1 and several >= least and in_several <= 1.02 * in_one


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.parametrize(
    ("name", "share", "programs"),
    [
        ("MLP", "host", 5),
        ("MLP", 0.5, 3),
        ("MLP, checkpointed", "host", 5),
        ("MLP, few tokens", "host", 5),
        ("scanned", "host", 1),
        ("scanned, a head", "host", 2),
        ("scanned, few tokens", "host", 1),
    ],
)
def test_peak(name, share, programs):
    require(H200)
    check(name, programs, update_on=share)


@pytest.mark.long("compiles more of the same for a chip")
@pytest.mark.parametrize(("name", "programs"), [("MLP", 7), ("MLP, few tokens", 12)])
def test_peak_of_a_state_on_disk(name, programs, tmp_path):
    """Gradients are freed by the groups between the programs, of which those of layers that are alike are one."""
    require(H200)
    found = driven(name, True, disk=jo.disk(tmp_path / "of_programs"))
    assert len({id(program) for _, program in found._tasks}) <= 9
    check(name, programs, disk=jo.disk(tmp_path))
