"""Type checkers are told of jaxprs in our own words, for all versions of jax at once: jax has what those words say."""

import ast
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_offload._base import jaxprs

pytestmark = pytest.mark.oldest("the stages, on jax's own jaxprs")


def declared():
    """The classes that only type checkers see, and the protocols."""
    module = ast.parse(Path(jaxprs.__file__).read_text())
    nodes = [node for top in module.body for node in (top.body if isinstance(top, ast.If) else [top])]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return {node.name: node for node in classes if node.name in EXAMPLES}


def examples():
    step = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(jnp.ones(3))
    *_, eqn = step.eqns
    literal = next(v for eqn in step.eqns for v in eqn.invars if isinstance(v, jaxprs.Literal))
    var = step.jaxpr.invars[0]
    return {
        "Aval": var.aval,
        "EquationContext": eqn.ctx,
        "Var": var,
        "DropVar": jaxprs.DropVar(var.aval),
        "Literal": literal,
        "Equation": eqn,
        "Jaxpr": step.jaxpr,
        "ClosedJaxpr": step,
    }


EXAMPLES = examples()


def names_of(node):
    """The fields and methods of a class, but for Python's own."""
    fields = [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]
    methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
    return [name for name in (*fields, *methods) if not name.startswith("__")]


def test_every_type_has_an_example():
    assert declared().keys() == EXAMPLES.keys()
    assert sum(len(names_of(node)) for node in declared().values()) > 20


@pytest.mark.parametrize("name", EXAMPLES)
def test_fields_exist(name):
    example = EXAMPLES[name]
    for field in names_of(declared()[name]):
        assert hasattr(example, field), f"{type(example)} has no {field}"
    if hasattr(jaxprs, name) and name not in ("Aval", "EquationContext"):
        assert isinstance(example, getattr(jaxprs, name))


@pytest.mark.parametrize("name", EXAMPLES)
def test_parameters_exist(name):
    """Of constructors by position, of ``replace`` by name."""
    for part in declared()[name].body:
        if not isinstance(part, ast.FunctionDef) or part.name not in ("__init__", "replace"):
            continue
        found = list(inspect.signature(getattr(type(EXAMPLES[name]), part.name)).parameters)
        positional, named = ([arg.arg for arg in args] for args in (part.args.args, part.args.kwonlyargs))
        # 0.12 names a closed jaxpr's jaxpr and constants as it names an open one's variables
        assert len(found) >= len(positional) and (name == "ClosedJaxpr" or found[: len(positional)] == positional)
        assert set(named) <= set(found)


def test_variables_are_keys_and_literals_are_not():
    assert hash(EXAMPLES["Var"]) is not None
    with pytest.raises(TypeError, match="unhashable"):
        hash(EXAMPLES["Literal"])
