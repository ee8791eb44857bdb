"""What a profile comes to. The traces of GPUs are made by hand: none was taken on such a device. A CPU's is real."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.profiler import ProfileData

import jax_offload as jo
from jax_offload._look.inspection import measured, segments_of


def trace_of(plane, **lines):
    """A trace with one device: of each line (name, begin, milliseconds, details)."""
    names, text = {}, ""
    for number, (line, events) in enumerate(lines.items()):
        body = ""
        for name, begin, ms, *details in events:
            key = names.setdefault(name, len(names) + 1)
            stat = f'stats {{ metadata_id: 1 str_value: "{details[0]}" }}' if details else ""
            body += (
                f"events {{ metadata_id: {key} offset_ps: {int(begin * 1e9)} duration_ps: {int(ms * 1e9)} {stat} }}\n"
            )
        text += f'lines {{ id: {number} name: "{line}" timestamp_ns: 1000 {body} }}\n'
    text += "".join(f'event_metadata {{ key: {k} value {{ id: {k} name: "{n}" }} }}\n' for n, k in names.items())
    text += 'stat_metadata { key: 1 value { id: 1 name: "memcpy_details" } }'
    return ProfileData.from_serialized_xspace(
        ProfileData.text_proto_to_serialized_xspace(f'planes {{ id: 1 name: "{plane}" {text} }}')
    )


COMPUTE, H2D, D2H = "Stream #13(Compute)", "Stream #14(MemcpyH2D)", "Stream #15(MemcpyD2H)"
SIZE = "kind_src:pinned kind_dst:device size:1000 dest:0 async:1"


def test_of_a_gpu():
    """Two steps in 20 ms: kernels 8, loads 6, stores 4, and 2 of these meet a load; 3 ms of copies meet kernels."""
    data = trace_of(
        "/device:GPU:0",
        **{
            COMPUTE: [("void cutlass::gemm<1>", 0, 5), ("fusion", 12, 3)],
            H2D: [("MemcpyH2D", 3, 4, SIZE), ("MemcpyH2D", 14, 2, SIZE)],
            D2H: [("MemcpyD2H", 5, 2, SIZE), ("MemcpyD2H", 18, 2, SIZE)],
            "XLA Modules": [("jit_step", 0, 20)],
        },
    )
    p = measured(segments_of(data), 2)
    expected = {"step": 10, "compute": 4, "loading": 3, "storing": 2, "overlap": 1.5, "exposed": 2.5, "idle": 3.5}
    assert {name: getattr(p, name) for name in expected} == pytest.approx({k: v / 1e3 for k, v in expected.items()})
    assert (p.loaded, p.stored) == (1000, 1000)
    assert p.segments[0].name == "void cutlass::gemm<1>"
    assert p.step == pytest.approx(p.compute + p.exposed + p.idle)


def test_a_tpu_s_traces_are_not_read(monkeypatch):
    """No arguments are donated to find that out."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ValueError, match="traces of TPUs are not read"):
        jo.profile(jax.jit(lambda x: x + 1, donate_argnums=0), x := jnp.ones(3))
    assert not x.is_deleted()


def test_collectives_of_a_gpu_are_no_arithmetic():
    """NCCL's kernels take 4 ms: 1 of these is behind a matmul, and 2 are beside a copy."""
    streams = {COMPUTE: [("gemm", 0, 5)], H2D: [("MemcpyH2D", 6, 3, SIZE)]}
    nccl = [("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 4, 4)]
    p = measured(segments_of(trace_of("/device:GPU:0", **streams, **{"Stream #20": nccl})), 1)
    expected = {"compute": 5, "exposed": 1, "collectives": 4, "exposed_collectives": 3, "idle": 0, "step": 9}
    assert {k: getattr(p, k) for k in expected} == pytest.approx({k: v / 1e3 for k, v in expected.items()}, abs=1e-9)


def test_an_empty_trace():
    with pytest.raises(ValueError, match="nothing of a device"):
        measured(segments_of(trace_of("/host:metadata")), 1)


# In a process that has compiled for a chip that is not there the profiler of jax 0.10 crashes as it starts.
profiles = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10's profiler crashes after a target=")


@profiles
def test_on_a_cpu(tmp_path):
    """A step that donates its state, real on real hardware: a CPU, whose copies jax leaves out."""
    tx = jo.offload(optax.adamw(1e-3), min_bytes=0)
    params = jax.device_put({"w": jnp.ones((256, 256))}, jax.devices()[0])

    def fun(params, state, x):
        grads = jax.grad(lambda p: jnp.tanh(x @ p["w"]).sum())(params)
        params, state = jo.update_params(tx, grads, state, params)
        return params, state, jnp.float32(0)

    step = jax.jit(fun, donate_argnums=(0, 1))
    p = jo.profile(step, params, tx.init(params), np.ones((64, 256), np.float32), steps=2)
    assert p.steps == 2 and 0 < p.compute <= p.step and p.exposed == 0
    assert p.segments and str(p).startswith("ms, measured, per step of 2\nstep ")
    p.save(tmp_path / "measured.json")


@profiles
def test_what_is_donated_has_to_come_back():
    with pytest.raises(ValueError, match="argument 0 is donated, and no result has its structure"):
        jo.profile(jax.jit(lambda x: {"y": x + 1}, donate_argnums=0), jnp.ones(8))
    counted = jax.jit(lambda run: {"step": run["step"] + 1, "w": run["w"] * 2}, donate_argnums=0)
    assert jo.profile(counted, {"step": 0, "w": jnp.ones(8)}, steps=1).steps == 1  # a Python number comes back as one
    with pytest.raises(ValueError, match="steps=0; expected a whole number"):
        jo.profile(jnp.sin, jnp.ones(3), steps=0)
