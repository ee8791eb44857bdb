"""Donation that respects memory kinds, in whatever ``jit`` an update is traced.

jax pairs each donated argument with a result of its shape and dtype, and XLA writes the result into the argument's
buffer. jax means to compare memory kinds as well; but where the kind of a single argument or result is unknown (a
result without ``out_shardings``, a NumPy batch) it ignores all kinds (``_set_up_aliases`` in
``jax/_src/interpreters/mlir.py``). New parameters may then be written into a moment in pinned host memory: the process
aborts on a CPU, and memory is overwritten silently on a GPU.

The pairs are attributes of the arguments of ``main``, set before its body is lowered. A lowering rule runs while the
body is lowered, so a primitive in the body can take the pairs back: where one crosses memory kinds, all donated
arguments are left to XLA (``jax.buffer_donor``), which pairs them by what it knows of their memory. Programs in which
none crosses stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from jax_offload._base import memory
from jax_offload._base.calls import identity_primitive
from jax_offload._base.home import Home, check_returned
from jax_offload._base.jaxprs import Equation
from jax_offload._base.private import take_back_aliases


def _lower(context: Any, *values: Any, names: tuple[str, ...], home: Home, where: str) -> list[Any]:
    take_back_aliases(context, memory.DEVICE_KIND)
    check_returned(context, names, home, where)
    return list(values)


_guard = identity_primitive("jax_offload_donation", _lower)


def is_guard(eqn: Equation) -> bool:
    return eqn.primitive is _guard


def guarded(
    results: Any,
    given: Any = (),
    *,
    names: Sequence[str | None] | None = None,
    home: Home | None = None,
    where: str = "step",
) -> Any:
    """``results``, and with them the rule that no donated buffer of the program crosses memory kinds; and the warning
    where the program returns in device memory what of them is in host memory.

    Args:
      results: a tree; the rule holds while any array of it that is new is used.
      given: what the results are made of. Where neither is in host memory, nothing is added to the program.
      names: the path of each leaf in its state; ``None``: of a leaf that is none. Else that in ``results``.
      home: of the ``offload`` whose state it is; else of the one that was traced last.
      where: ``"init"`` where an init has made the state.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(results)
    leaves = [x for _, x in flat]
    operands = jax.tree.leaves(given)
    if not any(memory.on_host(x) for x in [*leaves, *operands]):
        return results
    arrays = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    handed_on = {id(x) for x in operands}  # which jax forwards; made a result it would be copied where nobody donates
    new = [i for i in arrays if id(leaves[i]) not in handed_on] or arrays
    paths = [keystr(path) for path, _ in flat] if names is None else names
    on_host = tuple(path for path, x in zip(paths, leaves, strict=True) if path is not None and memory.on_host(x))
    bound = _guard.bind(*(leaves[i] for i in new), names=on_host, home=home or Home.latest(), where=where)
    for i, x in zip(new, bound, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)
