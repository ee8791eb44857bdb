"""Donation that respects memory kinds, in whatever ``jit`` an update is traced.

jax pairs each donated argument with a result of its shape and dtype, and XLA writes the result into the argument's
buffer. jax means to compare memory kinds as well; but where the kind of a single argument or result is unknown (a
result without ``out_shardings``, a NumPy batch) it ignores all kinds (``_set_up_aliases`` in
``jax/_src/interpreters/mlir.py``). New parameters may then be written into a moment in pinned host memory: the process
aborts on a CPU, and memory is overwritten silently on a GPU.

The pairs are attributes of the arguments of ``main``, set before its body is lowered. A lowering rule runs while the
body is lowered, so a primitive in the body can take the pairs back: where one crosses memory kinds, all donated
arguments are left to XLA (``jax.buffer_donor``), which knows their memories and pairs them. Programs in which
no pair crosses stay unchanged.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from jax_offload._program import memory
from jax_offload._program.jaxprs import Equation
from jax_offload._program.own_primitives import identity_primitive
from jax_offload._program.private import results_of_main, take_back_aliases
from jax_offload._program.program import Program, rebuilt


def _lower(context: Any, *values: Any, names: tuple[str, ...], home: Home, where: str) -> list[Any]:
    take_back_aliases(context, memory.DEVICE_KIND)
    check_returned(context, names, home, where)
    return list(values)


_guard = identity_primitive("jax_offload_donation", _lower)


def is_guard(eqn: Equation) -> bool:
    return eqn.primitive is _guard


def unguarded(program: Program) -> Program:
    """The program without its donation guards, because whoever jits its parts adds guards again."""
    guards = any(map(is_guard, program.eqns))
    return rebuilt(program, lambda _, eqn, ins: ins if is_guard(eqn) else None) if guards else program


def guarded(
    results: Any,
    given: Any = (),
    *,
    names: Sequence[str | None] | None = None,
    home: Home | None = None,
    where: str = "step",
) -> Any:
    """Return ``results``, guarded: no donated buffer of the program crosses memory kinds, and the user is warned if the
    program returns in device memory a result that is in host memory here.

    Args:
      results: a tree; the rule holds while any array of it that is new is used.
      given: the values from which the results are made. If nothing of both is in host memory, the program stays as it
        is.
      names: the path of each leaf in its state, ``None`` for a leaf of no state; by default the path in ``results``.
      home: the home of the ``offload`` whose state it is; by default of the one that was traced last.
      where: ``"init"`` where an init has made the state.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(results)
    leaves = [x for _, x in flat]
    operands = jax.tree.leaves(given)
    if not any(memory.on_host(x) for x in [*leaves, *operands]):
        return results
    arrays = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    handed_on = {id(x) for x in operands}  # jax forwards these; as results they would be copied where nobody donates
    new = [i for i in arrays if id(leaves[i]) not in handed_on] or arrays
    paths = [keystr(path) for path, _ in flat] if names is None else names
    on_host = tuple(path for path, x in zip(paths, leaves, strict=True) if path is not None and memory.on_host(x))
    bound = _guard.bind(*(leaves[i] for i in new), names=on_host, home=home or Home.latest(), where=where)
    for i, x in zip(new, bound, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


# ---- where the state of one ``offload`` has been seen between updates
#
# A state is seen twice: as it comes to an update, whose types tell its memory, and where a program that returns it is
# lowered, whose results tell theirs. A ``jit`` with ``out_shardings`` that name no memory returns it on the device,
# whatever an update says. The user is told once.

_latest: list[Home] = []


class Home:
    """The facts about its state that one ``offload`` has seen.

    Attributes:
      reached: whether the state has been in host memory. A resident state that becomes an offloaded one has not.
    """

    def __init__(self) -> None:
        self.reached = False
        self._told = set[str]()

    def tell(self, what: str, where: str = "step") -> None:
        """Warn once for a step, and once for an init."""
        if where not in self._told:
            self._told.add(where)
            warnings.warn(what, stacklevel=3)

    def updates(self) -> None:
        """Note that an update of this ``offload`` is traced, so that the step returns its state next."""
        _latest[:] = [self]

    @staticmethod
    def latest() -> Home:
        """The home of the ``offload`` whose update was traced last."""
        return _latest[0] if _latest else Home()


def check_returned(context: Any, names: Sequence[str], home: Home, where: str) -> None:
    """Warn if the program that is lowered returns a leaf in device memory that belongs in host memory.

    Args:
      context: a lowering rule's context.
      names: the paths of the leaves in their state, or in a larger tree; the paths of results end with them.
      home: where the state is seen.
      where: whether a ``"step"`` or an ``"init"`` returns it.
    """
    results = [(_words(path), path, on_host) for path, on_host in results_of_main(context)]
    if sum(on_host for *_, on_host in results) >= len(names):
        return
    wanted, ends = [_words(name) for name in names], dict[tuple[str, ...], list[tuple[str, bool]]]()
    for parts, path, on_host in results:
        for n in {len(name) for name in wanted}:
            ends.setdefault(parts[max(len(parts) - n, 0) :], []).append((path, on_host))
    kept = [ends.get(name, []) for name in wanted]
    forced = [found for found in kept if found and not any(on_host for _, on_host in found)]
    if not forced:
        return
    first = forced[0][0][0]
    home.tell(
        f"offload(): {len(forced)} leaves of the optimizer state were in host memory and are returned in device memory "
        f"(the first is {first}) by a jit of the {where}, whose out_shardings name no memory kind. The "
        "whole state is on the device then, and nothing is gained. Fix: out_shardings with the shardings of "
        "jax_offload.abstract_state(tx, params) in the state's place, or None there; instead of jax.pmap, which always "
        "returns arrays so, jax.jit over a mesh. See docs/trainers.md.",
        where,
    )


def _words(path: str) -> tuple[str, ...]:
    return tuple(part for part in re.findall(r"\w+", path) if part != "value")  # nnx boxes each leaf
