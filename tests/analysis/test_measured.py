"""``jo.chip.measured``, with a clock and copies whose speeds are known."""

import itertools
from types import SimpleNamespace

import jax
import pytest

import jax_offload as jo
from jax_offload._analysis import chips

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
ALONE = {(HOST, DEVICE): 50e9, (DEVICE, HOST): 40e9}  # bytes per second, by where from and where to
BOTH = 30e9  # of each, where both are busy
SLOWER = (100.0, 3.0, 1.0, 2.0)  # the runs of a program, beside its best: the first one is not counted


class Machine:
    """A clock, and programs that move it on by the time of their copies. ``copied``: bytes, of each program's runs."""

    def __init__(self):
        self.now, self.copied, self.programs = 0.0, [], []

    def jit(self, move, out_shardings):
        kinds = [sharding.memory_kind for sharding in jax.tree.leaves(out_shardings)]

        def compiled(*args):
            traced = jax.make_jaxpr(move)(*args)
            ways = {}
            for x, y, kind in zip(traced.in_avals, traced.out_avals, kinds, strict=True):
                assert (kind == "pinned_host") == (y.memory_space == HOST)
                ways.setdefault((x.memory_space, y.memory_space), []).append(x.size * x.dtype.itemsize)
            moved = {way: sum(sizes) for way, sizes in ways.items()}
            seconds = max(nbytes / (BOTH if len(moved) == 2 else ALONE[way]) for way, nbytes in moved.items())
            runs = iter(SLOWER)

            def program(*args):
                self.now += seconds * next(runs)
                self.copied[-1] += sum(moved.values())
                return args

            self.copied.append(0)
            self.programs.append(tuple(moved))
            return program

        return SimpleNamespace(lower=lambda *args: SimpleNamespace(compile=lambda compiler_options: compiled(*args)))


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(chips, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    monkeypatch.setattr(chips, "dram_bandwidth", lambda: 7e9)
    monkeypatch.setattr(jax, "jit", machine.jit)
    return machine


def test_each_way_alone_and_both_at_once(machine, monkeypatch):
    """The best of three; ``both`` is what one way has while the other is busy. It copies what its docstring says: 16
    GiB in four runs each, with the pieces that an accelerator has."""
    found = jo.chip.measured()
    assert (found.host_link, found.host_link_both, found.dram_bandwidth) == pytest.approx((40e9, 60e9, 7e9))
    assert found.name == "cpu" and found.flops == jo.chip("h100").flops
    assert (found.sources["host_link"], found.sources["flops"]) == ("measured on this machine", "as h100")
    assert machine.programs == [((HOST, DEVICE),), ((DEVICE, HOST),), ((HOST, DEVICE), (DEVICE, HOST))]
    assert [n * chips.PIECE / chips.ON_CPU / 2**30 for n in machine.copied] == [4, 4, 8]
    monkeypatch.setattr(chips, "dram_bandwidth", lambda: None)
    assert jo.chip.measured().dram_bandwidth is None


def test_a_card_without_a_name_has_the_memory_that_jax_takes_its_share_of(monkeypatch):
    monkeypatch.setattr(chips, "_link", lambda device: (20e9, 20e9, 15e9))
    monkeypatch.setattr(chips, "dram_bandwidth", lambda: 7e9)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    stats = {"bytes_limit": 18 * 2**30}
    card = SimpleNamespace(device_kind="NVIDIA GeForce RTX 4090", platform="gpu", memory_stats=lambda: stats)
    assert jo.chip.measured(card).hbm_bytes == 24 * 2**30


def test_the_host_s_memory_by_the_best_of_three(monkeypatch):
    """Two arrays are read and one is written; the first run, which compiles, is not timed."""
    monkeypatch.setattr(chips, "ARRAY", 2**12)
    took = [(1.0, 5.0), (6.0, 8.0), (9.0, 12.0)]
    monkeypatch.setattr(chips, "time", SimpleNamespace(perf_counter=itertools.chain(*took).__next__))
    assert chips.dram_bandwidth() == 3 * 2**12 / 2


def test_what_is_no_device():
    with pytest.raises(TypeError, match=r"device: expected a jax.Device, of jax.local_devices\(\); got 'foo'"):
        jo.chip.measured("foo")
