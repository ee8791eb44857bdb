"""Every public name says what it takes and gives, and shows an example, which runs."""

import builtins
import doctest
import inspect
import os
import re
import subprocess
import sys
import warnings
from operator import attrgetter
from pathlib import Path

import jax
import optax
import pytest

import jax_offload as jo

pytestmark = pytest.mark.daily("each is a public name")

NAMES = [name for name in jo.__all__ if name != "types"] + [f"types.{name}" for name in jo.types.__all__]
VALUES = {name for name in NAMES if isinstance(attrgetter(name)(jo), type)}
NEVER_RAISE = {*VALUES, "to_device"}  # they hold values, or take whatever they are given
LINES = 9  # of an example's source: what one takes in at a glance


def section(name, title):
    """A section of a docstring, without the indentation; empty where there is none."""
    doc = inspect.cleandoc(attrgetter(name)(jo).__doc__ or "")
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)+)", doc + "\n", re.MULTILINE)
    return inspect.cleandoc("\n" + found[1]) if found else ""


def documented(text):
    """The names that a section documents: ``name: ...``, at its margin."""
    return [line.partition(":")[0].lstrip("*") for line in text.splitlines() if re.match(r"\*{0,2}\w+: ", line)]


def examples(name):
    found = doctest.DocTestFinder(recurse=False).find(attrgetter(name)(jo), name)
    return [test for test in found if test.examples]


def run(name):
    """By itself, with nothing but what it imports. A warning in an example is a bad example."""
    said = []
    (test,) = examples(name)
    test.globs = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        failed = doctest.DocTestRunner(verbose=False).run(test, out=said.append).failed
    return "".join(said) if failed else ""


@pytest.mark.parametrize("name", NAMES)
def test_says_what_it_takes_and_gives(name):
    given = attrgetter(name)(jo)
    parameters = list(inspect.signature(given).parameters)
    assert len(given.__doc__.splitlines()) > 1
    # the parameters of a class that only holds values are its attributes
    sections = [section(name, title) for title in ("Args", "Attributes")]
    assert [documented(text) for text in sections if text] == [parameters]
    assert inspect.isclass(given) or (sections[0] and section(name, "Returns"))


@pytest.mark.parametrize("name", sorted({*NAMES} - NEVER_RAISE))
def test_says_what_it_raises(name):
    kinds = documented(section(name, "Raises"))
    assert kinds and all(issubclass(getattr(builtins, kind), Exception) for kind in kinds)


@pytest.mark.parametrize("name", NAMES)
def test_shows_an_example(name):
    assert section(name, "Example")
    (test,) = examples(name)
    assert sum(each.source.count("\n") for each in test.examples) <= LINES
    assert "jax_offload as jo" in test.examples[0].source
    shown = any(re.search(rf"\bjo\.{name}\b", each.source) for each in test.examples)
    assert shown or inspect.isclass(attrgetter(name)(jo))  # some are only returned


@pytest.mark.oldest("every example")
@pytest.mark.parametrize("name", NAMES)
def test_example(name):
    if name == "profile" and jax.__version_info__ < (0, 11):
        pytest.skip("jax 0.10's profiler crashes in a process that has compiled for a chip that is not there")
    assert not run(name)


@pytest.mark.long("every example again")
def test_examples_on_one_device():
    """As they are copied: into a process of their own, in which nobody has set flags."""
    code = "from tests import test_docstrings as t; print(*(t.run(name) for name in t.NAMES), sep='')"
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


# ---- what else is public


@pytest.mark.oldest("options of XLA by platform")
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
