"""The options of an ``offload`` about streaming, the leaves that they are about, and the order of these leaves."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, Sharding

from jax_offload._program.donation import Home
from jax_offload._program.memory import is_host_aval
from jax_offload._program.paths import leaves_with_paths, matches, names_of
from jax_offload._program.program import Var
from jax_offload._program.shardings import Layouts, Shardings

Order = Sequence[str] | None  # the rules of ``offload``


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of an ``offload``, and the facts that it has seen, about streaming.

    Attributes:
      window, order: its arguments.
      shardings: the known shardings of parameters, by path.
      partitions: the gradients' shardings, by the parameters' paths, where the state is divided further (ZeRO-1).
      on_cores: the numbers of the state's leaves that are updated where they are, by the host's cores.
      on_disk: the numbers of the leaves that are read from disk for the update.
      remembered: the paths of the parameters whose sharding is known from an earlier ``init`` alone.
      unknown: the paths of the parameters that may be divided between devices in an unknown way.
      home: the facts about the state's memory.
    """

    window: int | None = None
    order: tuple[str, ...] | None = None
    shardings: Shardings = dataclasses.field(default_factory=dict[str, Sharding])
    partitions: Layouts = dataclasses.field(default_factory=dict[str, NamedSharding])
    on_cores: frozenset[int] = frozenset()
    on_disk: frozenset[int] = frozenset()
    remembered: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()
    home: Home | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def replicated(self) -> Shardings:
        """The shardings that parameters have themselves where their state is divided further."""
        return {path: self.shardings[path] for path in self.partitions}


@dataclasses.dataclass(frozen=True, eq=False)
class Claim:
    """An ``offload`` in a recipe, and the inputs of the recipe's program that are leaves of its state.

    ``on_cores``: the leaves that the host's cores update; ``on_disk``: the leaves on disk.
    """

    options: Options
    leaves: frozenset[Var]
    on_cores: frozenset[Var] = frozenset()
    on_disk: frozenset[Var] = frozenset()


def merged(options: Sequence[Options]) -> Options:
    """All that any of several offloads knows about the parameters."""
    return Options(
        shardings={path: s for each in options for path, s in each.shardings.items()},
        partitions={path: s for each in options for path, s in each.partitions.items()},
        remembered=frozenset[str]().union(*(each.remembered for each in options)),
        unknown=frozenset[str]().union(*(each.unknown for each in options)),
    )


def claimed(claims: Sequence[Claim]) -> Mapping[Var, Claim]:
    """Map each leaf to the claim that decides: the last of several, as an ``offload`` follows the wrapper around it."""
    return {v: each for each in claims for v in each.leaves}


def apart(claims: Sequence[Claim], inputs: Sequence[Var]) -> list[Claim]:
    """The same with each host leaf claimed once; last, leaves that a wrapper has changed and that nobody claims."""
    of, hosts = claimed(claims), frozenset(v for v in inputs if is_host_aval(v.aval))
    found = [
        Claim(each.options, frozenset(v for v in hosts if of.get(v) is each), each.on_cores & hosts, each.on_disk)
        for each in claims
    ]
    windows = [each.options.window for each in claims if each.options.window]
    return [*found, Claim(Options(window=max(windows, default=None)), hosts - of.keys())]


def backward_ranks(params: Any, rules: Order = None, produced: Sequence[int] | None = None) -> list[int]:
    """Return the place of every parameter in the backward pass: by the rules, else by the trace, else guessed.

    The guess is the natural order of the paths, reversed. ``layers_10`` comes before ``layers_2``: the last layer's
    gradient appears first.

    Args:
      params: arrays or abstract values.
      rules: the ``order`` of an ``offload``.
      produced: for every parameter the time at which its gradient was made, if the trace tells it.
    """
    names = names_of([path for path, _ in leaves_with_paths(params)])
    by_rule = matches("order", rules or (), names) if names else []

    def natural(name: str) -> list[tuple[int, int, str]]:
        return [(0, int(t), "") if t.isdigit() else (1, 0, t) for t in re.split(r"(\d+)", name)]

    order = sorted(range(len(names)), key=lambda i: natural(names[i]), reverse=True)
    times = produced if produced and len(produced) == len(names) and not rules else [0] * len(names)
    order.sort(key=lambda i: (by_rule[i], times[i]))
    ranks = [0] * len(names)
    for rank, i in enumerate(order):
        ranks[i] = rank
    return ranks
