"""What the package needs of jax beyond its documented API. Loud where jax has moved it.

| needed | for | seen in jax |
|---|---|---|
| ``Primitive``, rules for batching, jvp, dce and lowering | ``identity_primitive`` | 0.10 to 0.12 |
| a module's entry, ``main`` in its symbol table | ``take_back_aliases`` | 0.10 to 0.12 |
| the attributes of its arguments, set before the body is lowered | ``take_back_aliases`` | 0.10 to 0.12 |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

ALIAS, DONOR, KIND = "tf.aliasing_output", "jax.buffer_donor", "mhlo.memory_kind"


def identity_primitive(name: str, lower: Callable[..., list[Any]]) -> Primitive:
    """A primitive that returns its operands, one result for each, and is there to be lowered by ``lower``.

    Linear: derivatives pass it too, so that it is in the program of a gradient, which may need no result of the
    function itself. Results that nobody uses go, and their operands with them.
    """

    def bind_all_but_zeros(tangents: Sequence[Any]) -> list[Any]:
        nonzero = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero) and t.dtype != jax.dtypes.float0]
        bound = dict(zip(nonzero, primitive.bind(*(tangents[i] for i in nonzero)) if nonzero else (), strict=True))
        return [bound.get(i, t) for i, t in enumerate(tangents)]

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs: list(xs))
    primitive.def_abstract_eval(lambda *avals: list(avals))
    batching.primitive_batchers[primitive] = lambda xs, dims: (primitive.bind(*xs), dims)
    ad.primitive_jvps[primitive] = lambda xs, tangents: (primitive.bind(*xs), bind_all_but_zeros(tangents))
    ad.primitive_transposes[primitive] = lambda cotangents, *_: bind_all_but_zeros(cotangents)
    pe.dce_rules[primitive] = _without_unused
    mlir.register_lowering(primitive, lower)
    return primitive


def _without_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    eqn = rest[-1]  # jax 0.12 puts which operands are live before it
    if not any(used):
        return list(used), None
    invars, outvars = ([v for v, u in zip(vs, used, strict=True) if u] for vs in (eqn.invars, eqn.outvars))
    return list(used), eqn.replace(invars=invars, outvars=outvars)


def take_back_aliases(context: Any, default_kind: str) -> None:
    """Leaves the pairing of donated arguments to XLA where jax has paired two of different memory kinds.

    Args:
      context: that of a lowering rule; it tells the module, whose entry is called ``main``.
      default_kind: of what has no memory kind.
    """
    _check_lowering()
    ir, main = mlir.ir, context.module_context.symbol_table["main"]
    if "arg_attrs" not in main.attributes:  # no arguments
        return
    arguments, results = (
        [{named.name: named.attr for named in each} for each in main.attributes[name]]
        for name in ("arg_attrs", "res_attrs")
    )

    def kind(attributes: dict[str, Any]) -> str:
        return attributes[KIND].value if KIND in attributes else default_kind

    paired = [a for a in arguments if ALIAS in a]
    if all(kind(a) == kind(results[a[ALIAS].value]) for a in paired):
        return
    for a in paired:
        del a[ALIAS]
        a[DONOR] = ir.BoolAttr.get(True)
    main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in arguments])


@functools.cache
def _check_lowering() -> None:
    """Raises ``RuntimeError`` where jax lowers a function otherwise than ``take_back_aliases`` relies on."""
    lower = getattr(mlir, "lower_jaxpr_to_fun", None)
    missing = {ALIAS, DONOR, KIND} - set(_strings(lower.__code__) if lower is not None else ())
    if missing:
        raise RuntimeError(
            f"jax {jax.__version__} sets up donation otherwise than jax_offload knows (no {sorted(missing)} in "
            "lower_jaxpr_to_fun), so donated host memory could be overwritten. Install a jax that jax_offload supports "
            "(see its pyproject.toml), and report this."
        )


def _strings(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _strings(constant)
