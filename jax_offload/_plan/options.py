"""The options of an ``offload`` and its facts about streaming, and the owner of each state leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.sharding import NamedSharding, Sharding

from jax_offload._base.donation import Home
from jax_offload._base.memory import is_host_aval
from jax_offload._base.shardings import Layouts, Shardings
from jax_offload._ir.program import Var
from jax_offload._plan.decide import Region
from jax_offload._plan.order import Order


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
    order: Order = None
    shardings: Shardings = dataclasses.field(default_factory=dict[str, Sharding])
    partitions: Layouts = dataclasses.field(default_factory=dict[str, NamedSharding])
    on_cores: frozenset[int] = frozenset()
    on_disk: frozenset[int] = frozenset()
    remembered: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()
    home: Home | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def order_key(self) -> tuple[str, ...] | None:
        return None if self.order is None else tuple(self.order)

    @property
    def replicated(self) -> Shardings:
        """The own shardings of the parameters whose state is sharded further."""
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
    """Whose a leaf is: of several claims the last, of an ``offload`` and not of the wrapper around it."""
    return {v: each for each in claims for v in each.leaves}


def regions(claims: Sequence[Claim], inputs: Sequence[Var]) -> list[Region]:
    """The host leaves of each ``offload``; last, leaves that a wrapper has changed and that nobody claims."""
    of, hosts = claimed(claims), [v for v in inputs if is_host_aval(v.aval)]
    found = [Region(frozenset(v for v in hosts if of.get(v) is each), each.options.window) for each in claims]
    windows = [each.options.window for each in claims if each.options.window]
    return [*found, Region(frozenset(v for v in hosts if v not in of), max(windows, default=None))]
