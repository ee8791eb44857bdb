import subprocess
import sys

import jax
import optax
import pytest

import jax_offload as jo

pytestmark = pytest.mark.oldest("options of XLA by platform")


def test_compiler_options_by_platform():
    assert jo.compiler_options("cuda") == jo.compiler_options("gpu") != {}
    assert jax.jit(lambda x: x + 1, compiler_options=jo.compiler_options("cuda"))(1) == 2  # this jaxlib knows them
    assert jo.compiler_options("tpu") == jo.compiler_options("cpu") == {}
    with pytest.raises(ValueError, match=r"platform: expected .* got 'rocket'"):
        jo.compiler_options("rocket")


def test_a_checkout_that_is_not_installed_can_be_imported():
    code = (
        "from importlib import metadata\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "import jax_offload as jo; print(jo.__version__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "0+unknown"


def test_what_the_package_shows_is_its_public_surface():
    shown = [name for name in dir(jo) if not name.startswith("__")]
    assert shown == sorted(jo.__all__)
    assert all(hasattr(jo, name) for name in jo.__all__)  # some are imported only now
    assert {name for name in vars(jo) if not name.startswith("_")} == set(jo.__all__)
    classes = [getattr(jo.types, name) for name in jo.types.__all__]
    assert all(isinstance(each, type) for each in classes)
    assert [name for name in dir(jo.types) if not name.startswith("__")] == sorted(jo.types.__all__)
    assert isinstance(jo.placement(jo.offload(optax.adam(1e-3)), {}), jo.types.Placement)
    assert {"__doc__", "__version__"} <= {*dir(jo)}
