"""A scan with the update of stacked leaves inside, row by row.

*Behind*: iteration i makes the gradient of layer i and updates it at its end, with state that the iteration before has
loaded; the new state is stored by the iteration after it.

*Ahead*: iteration i begins with the update of layer i, with state that the iteration before has loaded, and stores the
new state. Were it stored one iteration later, it would share a buffer of the loop with what is being stored, and the
update would wait for that (12x2x4096x4096, 16384 tokens: 0.79 of the transfers exposed, so 0.39).

So both directions of the link have a whole iteration. Nothing is beside what the first one needs: where a call of the
step hands it on to the next, the last iteration loads it (the same: 208.9 ms, so 204.1, resident 179.3). A host buffer
that is read and written at the same time would be copied, so the leaves are in groups that take turns, two or three:
while one is stored the one before it is loaded, through as many phases of the iteration's arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_offload._base.jaxprs import Literal, Var, as_array, jax_fun
from jax_offload._emit.iteration import Emitter, Values
from jax_offload._emit.transfers import Names
from jax_offload._plan.in_scan import InScan


def scanned(plan: InScan, env: Mapping[Var, Any], names: Names) -> Values:
    """What the scan and the moved equations make, of the values of their operands."""
    scan = plan.scan

    def value(v: Any) -> Any:
        return as_array(v) if isinstance(v, Literal) else env[v]

    emitter = Emitter(plan, names, [value(v) for v in scan.consts], {v: value(v) for v in plan.others})
    xs = {k: value(v) for k, v in enumerate(scan.xs) if k not in plan.reread and k not in plan.fed}
    kept = emitter.packed(emitter.first(env, plan.first_row))
    init = jnp.int32(0), [value(v) for v in scan.init], *kept
    # ahead, the second of two iterations in one would wait with its update for the stores of the first
    # (12x2x4096x4096, 16384 tokens: 247.6 ms and 0.94 of the transfers exposed, so 208.9 and 0.39)
    unroll = 1 if plan.ahead else scan.unroll
    (_, carried, *kept), ys = jax.lax.scan(
        emitter.iteration, init, xs, length=scan.length, reverse=scan.reverse, unroll=unroll
    )
    done = emitter.unpacked(kept)
    for v, x in done.new.items():
        emitter.store(done.host, v, x, plan.last_row)
    produced = dict(zip(scan.carry, carried, strict=True)) | dict(zip(plan.kept, ys, strict=True))
    return produced | emitter.updated(done)


def one_after_the_other(plan: InScan, env: Mapping[Var, Any]) -> Values:
    """The same as in the step: the scan, and before it or after it the updates of whole leaves."""
    scan, values = plan.scan, dict(env)

    def update() -> None:
        for move in plan.moves:
            produced = move.slice.run(*(values[v] for v in move.slice.inputs))
            values.update(zip(move.slice.outputs, produced, strict=True))

    if plan.ahead:
        update()
    xs = {k: each.slice.run(*(env[v] for v in each.slice.inputs))[0] for k, each in plan.reread.items()}
    xs |= {k: values[v] for k, v in plan.fed.items()}

    def value(v: Any) -> Any:
        return as_array(v) if isinstance(v, Literal) else values[v]

    consts, init = [value(v) for v in scan.consts], [value(v) for v in scan.init]
    rows = [xs[k] if k in xs else value(v) for k, v in enumerate(scan.xs)]

    def iteration(carry: Any, rows: Any) -> Any:
        results = jax_fun(scan.body)(*consts, *carry, *rows)
        return results[: len(carry)], results[len(carry) :]

    carry, ys = jax.lax.scan(iteration, init, rows, length=scan.length, reverse=scan.reverse, unroll=scan.unroll)
    values.update(zip([*scan.carry, *scan.ys], [*carry, *ys], strict=True))
    if not plan.ahead:
        update()
    return values
