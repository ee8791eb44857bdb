"""Steps are compiled fast."""

import pytest

from jax_offload._interop import jit as interop_jit
from tests.support.trees import FAST


@pytest.fixture(autouse=True)
def compile_fast(monkeypatch):
    monkeypatch.setattr(interop_jit, "compiler_options", lambda platform, **_: FAST)
