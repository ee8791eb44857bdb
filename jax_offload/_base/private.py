"""What the package needs of jax beyond its documented API. Loud where jax has moved it.

| needed | for | seen in jax |
|---|---|---|
| the fields of variables, literals, jaxprs and equations | the types of ``jaxprs`` | 0.10 to 0.12 |
| ``Primitive``; rules for batching, jvp, dce and lowering | the primitives of ``calls`` | 0.10 to 0.12 |
| ``jvp_jaxpr`` | ``calls.call_primitive`` | 0.10 to 0.12 |
| where an equation has the jaxprs that it runs | ``jaxprs.sub_jaxprs`` | 0.10 to 0.12 |
| how a ``scan`` says which of its operands are what | ``jaxprs.scan_of`` | 0.10 and 0.11, 0.12 |
| ``dce_jaxpr``; the jaxprs among parameters | ``jaxprs.without_dead_code``, ``jaxprs.holds_equations`` | 0.10 to 0.12 |
| the names of arguments and results in a ``DebugInfo`` | ``jaxprs.nameless`` | 0.10 to 0.12 |
| a module's entry, ``main`` in its symbol table | ``take_back_aliases`` | 0.10 to 0.12 |
| the attributes of its arguments, set before the body is lowered | ``take_back_aliases`` | 0.10 to 0.12 |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, cast

import jax
from jax._src.interpreters.ad import jvp_jaxpr as jvp_jaxpr
from jax.interpreters import mlir
from jax.interpreters import partial_eval as pe

dce_jaxpr = cast(Callable[..., Any], pe.dce_jaxpr)

ALIAS, DONOR, KIND = "tf.aliasing_output", "jax.buffer_donor", "mhlo.memory_kind"


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
