"""The forecast of a training step by how its optimizer may be offloaded: each way is traced, as it would run."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from jax_offload._analysis.advice import changes, chosen
from jax_offload._analysis.compiled_ways import DRIVEN
from jax_offload._analysis.driven import in_memory, on_abstract
from jax_offload._analysis.estimated_ways import is_hosted
from jax_offload._analysis.forecast import Forecast
from jax_offload._analysis.measured import MANY_LEAVES
from jax_offload._analysis.option import Option, smallest
from jax_offload._analysis.setting import Setting
from jax_offload._analysis.ways import (
    Known,
    Way,
    eight_bits,
    has_wide,
    inner_of,
    replicated_axes,
    way,
    ways,
    without_cores,
)
from jax_offload._analysis.whole_step import AHEAD, OWN, SOLVES, of_step
from jax_offload._plan.decide import LEAST_WINDOW

CALLED = "inner"
TRIES = 3  # at the smallest fraction, each a trace of the step
ITS_ROWS = "pipelined", "gradients too"  # that the forecast of one step has by itself


def of_each_way(make: Callable[[Any], Any], tx: Any, setting: Setting, target: str | None = None) -> Forecast:
    """The rows of ``make(tx)``, a step and its arguments, with ``tx`` offloaded; and one for each other way."""
    inner, given = inner_of(tx)
    first = way("as given" if given else "offload", inner, CALLED, given)
    step, args = _step_of(make, first.tx)
    base = of_step(step, args, setting, target)
    ahead, notes = any(option.name == AHEAD for option in base.options), [note for note in base.notes if note != SOLVES]

    def row(each: Way) -> Option:
        step, args = _step_of(make, each.tx)
        try:
            found = of_step(step, args, setting, target)
        except ValueError as error:
            if not str(error).startswith("state: "):
                raise
            raise ValueError(
                f"plan(make, tx): make(tx) is called once for each way, with another tx, here for {each.name!r}; the "
                f"state that it returns is not that one's: jo.abstract_state(tx, params). {error}"
            ) from error
        said = (_of(each.name, note) for note in found.notes if note != SOLVES)
        notes.extend(note for note in said if note not in notes)
        names = [option.name for option in found.options]
        own = found[DRIVEN if DRIVEN in names else AHEAD if ahead else OWN]
        why = own.why_not.replace(own.name, each.name, 1)
        return dataclasses.replace(own, name=each.name, code=each.code, why_not=why, same_numbers=each.same_numbers)

    def moving(each: Way) -> Option | None:
        """``None`` where nothing would move: of few large leaves a small fraction is none of them."""
        leaves = jax.tree.leaves(in_memory(_step_of(make, each.tx)[1]))
        return row(each) if any(map(is_hosted, leaves)) else None

    others = [each for each in ways(inner, given, CALLED, _known(args, base, ahead)) if each.name not in ITS_ROWS]
    tx_is = first.code.partition("; ")[0]
    options = [o if o.name == "resident" else dataclasses.replace(o, code=f"{tx_is}; {o.code}") for o in base.options]
    options += map(row, others)
    if (solved := _solved(moving, inner, given, base, ahead, setting.budget)) is not None:
        options.insert(1, solved)
    memory = base.device_memory
    best = chosen(options, memory)
    return dataclasses.replace(
        base, options=tuple(options), recommended=best, notes=tuple(notes),
        changes=changes(options, best or smallest(options, memory), base.compute, memory),
    )  # fmt: skip


def _of(name: str, note: str) -> str:
    """A note on the row that a forecast of one step calls as given."""
    return note.replace(repr(DRIVEN), repr(name)).replace(f"{DRIVEN}: ", f"{name}: ")


def _step_of(make: Callable[[Any], Any], tx: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    got = make(tx)
    if not isinstance(got, tuple | list) or len(got) < 2 or not callable(got[0]):
        raise TypeError(
            f"plan(make, tx): make(tx) is to return (step, *args), the step and its arguments, with the state from "
            f"jo.abstract_state(tx, params); got a {type(got).__name__}"
            f"{f' that begins with a {type(got[0]).__name__}' if isinstance(got, tuple | list) and got else ''}."
        )
    step, *args = got
    try:
        inspect.signature(step).bind(*args)
    except TypeError as error:
        raise TypeError(
            f"plan(make, tx): make(tx) returned a step that cannot be called with the {len(args)} argument(s) beside "
            f"it: {error}. Fix: return step, params, state, batch, not one tuple of them."
        ) from error
    except ValueError:  # of a builtin
        pass
    return step, tuple(args)


def _known(args: Any, base: Forecast, norm: bool) -> Known:
    """Of the step's arguments: the state is what is on the host, parameters what has the shapes of that."""
    leaves = jax.tree_util.tree_flatten_with_path(in_memory(args))[0]
    state = {keystr(path, simple=True, separator="/"): x for path, x in leaves if is_hosted(x)}
    shapes = {np.shape(x) for x in state.values()}
    axes = replicated_axes(x for _, x in leaves if not is_hosted(x) and np.shape(x) in shapes)
    alone = base.devices[0] == base.devices[1] and not any(on_abstract(x) for _, x in leaves)
    return Known(norm, alone and len(state) <= MANY_LEAVES, has_wide(state), eight_bits(state), axes)


def _solved(
    row: Callable[[Way], Option | None], inner: Any, given: dict[str, Any], base: Forecast, ahead: bool, budget: bool
) -> Option | None:
    """The smallest fraction that fits, to 0.01, as far as it is found, with the largest window that fits with it, in
    a budget; or that alone, where the default one does not. ``None`` where all fits, or nothing does."""
    memory, own, options = base.device_memory, base[AHEAD if ahead else OWN], without_cores(given)
    if memory is None or base["resident"].fits or not own.host:
        return None

    def tried(name: str, **more: Any) -> Option | None:
        return row(way(name, inner, CALLED, {**options, **more}, ahead=ahead))

    def through(option: Option, name: str, **more: Any) -> Option | None:
        window = min(option.host, option.window + memory - option.peak_range[1]) >> 20 << 20
        if "window" in given or window < LEAST_WINDOW or window == option.window:
            return None
        found = tried(name, **more, window=window)
        if found is None or not found.fits or found.window == option.window:
            return None
        # of a loop the first chunk comes alone, and the last goes alone: larger ones take longer
        return None if option.fits and (found.exposed or 0.0) > (option.exposed or 0.0) else found

    if not own.fits:
        return through(own, "window")
    low, share = 0.0, 1 - (memory - own.peak_range[1]) / own.host
    for _ in range(0 if "fraction" in given else TRIES):
        share = math.ceil(100 * max(share, low + 0.01)) / 100
        if share >= 1:
            return None
        option = tried("fraction", fraction=share)
        if option is None or (option.fits and option.host == own.host):  # of few leaves it is none of them, or all
            return through(own, "window") if budget else None
        if option.fits:
            return (budget and through(option, "fraction", fraction=share)) or option
        low, share = share, share + (option.peak_range[1] - memory) / own.host
    return None
