"""Python's garbage collector waits while an update is traced, and is as it was before."""

import gc
import threading

import pytest

from jax_offload._base.own_primitives import collector_waits

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")


@pytest.fixture(autouse=True)
def _as_it_was():
    before = gc.isenabled()
    yield
    (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_it_is_as_it_was(on):
    (gc.enable if on else gc.disable)()
    with collector_waits():
        with collector_waits():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is on


def test_after_an_error():
    gc.enable()
    with pytest.raises(ZeroDivisionError), collector_waits():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_the_last_of_several_threads_lets_it_go_on():
    gc.enable()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with collector_waits():
            inside.set()
            leave.wait(300)

    thread = threading.Thread(target=other)
    with collector_waits():
        thread.start()
        assert inside.wait(300)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()
