"""How many groups of a state on disk are under way, by number and by bytes."""

from concurrent.futures import Future
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jax_offload._base.jaxprs import jaxpr_of
from jax_offload._base.on_disk import Place
from jax_offload._drive import files
from jax_offload._drive.files import OnFiles, beside
from jax_offload._drive.stages import BEFORE, GROUP

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")

MIB = 2**20


@pytest.mark.parametrize(
    ("mib", "groups"),
    [([64] * 3, 2), ([256] * 3, 2), ([257] * 3, 1), ([513], 0), ([1, 600], 1), ([600, 1], 0), ([], 0)],
)
def test_beside_the_one_that_is_needed(mib, groups):
    assert beside(n * MIB for n in mib) == groups


class Home:
    """Files whose writes end when somebody waits for them."""

    def __init__(self):
        self.log = []

    def check(self, token):
        pass

    def fetch(self, name, sharding, rows=None):
        self.log.append(f"read {name}")
        future = Future()
        future.set_result(0)
        return future

    def put(self, name, x, rows=None):
        self.log.append(f"write {name}")
        written = lambda: self.log.append(f"{name} is written")  # noqa: E731
        return SimpleNamespace(done=lambda: False, exception=written)

    def advance(self):
        return 0


@pytest.mark.parametrize("nbytes", [400, 1000])
def test_the_driver_reads_and_writes_no_more(nbytes, monkeypatch):
    """Of three groups of as many bytes: of small ones all are under way, of large ones one; the pass hides its read."""
    monkeypatch.setattr(files, "AT_ONCE", 800)
    home, x = Home(), jnp.zeros(nbytes // 4)
    jaxpr = jaxpr_of(lambda *xs: [x + 1 for x in xs], *[x] * 3)[0].jaxpr
    places = [Place(home, str(k), x.shape, x.dtype, x.sharding) for k in range(3)]
    token = object()
    reads = {v: (token, place) for v, place in zip(jaxpr.invars, places, strict=True)}
    what = OnFiles(SimpleNamespace(outputs=jaxpr.outvars), reads, places, {})
    step = SimpleNamespace(parts={}, outputs=jaxpr.outvars)
    groups = [
        SimpleNamespace(stage=SimpleNamespace(name=GROUP), inputs=[a], outputs=[b])
        for a, b in zip(jaxpr.invars, jaxpr.outvars, strict=True)
    ]
    tasks = [SimpleNamespace(stage=SimpleNamespace(name=BEFORE), inputs=[], outputs=[]), *groups]
    values = {token: 0} | dict.fromkeys(jaxpr.outvars, x)
    under_way = files.Moving(what, step, tasks, values, dict.fromkeys(jaxpr.invars))
    for k, task in enumerate(tasks):
        under_way.read(task, tasks[k + 1 :])
        home.log.append(task.stage.name)
        under_way.write(k, task)
    small = "read 0, read 1, before, read 2, group, write 0, group, write 1, group, write 2"
    large = "read 0, before, group, write 0, 0 is written, read 1, group, write 1, 1 is written, read 2, group, write 2"
    assert home.log == {400: small, 1000: large}[nbytes].split(", ")
