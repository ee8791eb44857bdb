"""The values of a step that runs, in its own memory and as the cores have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jax_offload._base.jaxprs import Var
from jax_offload._base.memory import copy_on_host, on_host
from jax_offload._drive.cores import Cores, is_sent, taken_over
from jax_offload._drive.tasks import Task


class Values:
    """The values of a step that runs: ``here`` in the step's own memory, ``there`` for the cores.

    Two names may have one array: the caller passes it twice, or a branch or a loop returns an operand.

    Args:
      cores: where the programs of the cores run.
      given: the arguments.
      kept: the identities of arrays whose buffers are the caller's, whatever name they have.
      aliased: whether two names may have one array.
    """

    def __init__(self, cores: Cores, given: dict[Var, Any], kept: Set[int], aliased: bool) -> None:
        self.here, self._there, self._cores = given, dict[Var, Any](), cores
        self._kept, self._aliased = kept, aliased

    def claim(self, taken: Iterable[Var]) -> None:
        """Makes sure that nobody else has the buffers of these: copies take the place of those that somebody has."""
        if not self._aliased:
            return
        names = Counter(map(id, self.here.values()))
        for v in taken:
            x = self.here.get(v)
            if isinstance(x, jax.Array) and (id(x) in self._kept or names[id(x)] > 1):
                names[id(x)] -= 1
                self.here[v] = new = copy_on_host(x) if on_host(x) else jnp.copy(x)
                if self._there.get(v) is x:
                    self._there[v] = new

    def take(self, own: Sequence[Var]) -> None:
        """Donated host leaves, and what the cores have made, become the step's own memory, for the cores to write."""
        self.claim(own)
        given, made = [v for v in own if v in self.here], [v for v in own if v not in self.here]
        taken = dict(zip(given, taken_over([self.here[v] for v in given]), strict=True))
        self.here |= taken
        self._there |= taken | dict(zip(made, taken_over([self._there[v] for v in made]), strict=True))

    def send(self, task: Task) -> None:
        """What the cores are going to need starts on its way, as far as it is there."""
        for v in task.inputs if task.stage.on_cores else ():
            if v in self.here and v not in self._there:
                self._there[v] = self._cores.sent(self.here[v])

    def operands(self, task: Task, by_parts: bool) -> list[Any]:
        """What it takes: ``by_parts`` as it was sent, else, of the cores, whole."""
        self.send(task)
        if not task.stage.on_cores:
            return [self.here[v] for v in task.inputs]
        return [self._cores.lent(self._there[v], assembled=not by_parts) for v in task.inputs]

    def put(self, task: Task, results: Sequence[Any], place: Callable[[Var], Sharding]) -> None:
        n = len(task.outputs)
        defined, down = dict(zip(task.outputs, results[:n], strict=True)), zip(task.down, results[n:], strict=True)
        if task.stage.on_cores:
            self._there |= defined
            self.here |= {v: self._cores.brought_back(defined[v], place(v)) for v in task.up}
        else:
            self.here |= defined
            self._there |= down

    def free_sent(self, task: Task, donated: Set[Var]) -> None:
        """Frees what a task of the cores has in host memory by now, so that its new values take its place."""
        if task.stage.on_cores:
            sent = [v for v in task.over if is_sent(v.aval) and self._there.get(v) is not self.here.get(v)]
            there = {v: self._there[v] for v in sent}
            self.drop(sent, donated)
            self._there |= there

    def drop(self, over: Sequence[Var], donated: Set[Var]) -> None:
        """Forgets values, and frees those that were donated, unless they are handed on under another name."""
        gone = {v: self.here.pop(v, None) for v in over}
        for v in over:
            self._there.pop(v, None)
        own = [x for v, x in gone.items() if v in donated and isinstance(x, jax.Array) and id(x) not in self._kept]
        left = [x for x in own if not x.is_deleted()]
        if left:
            live = {id(x) for x in (*self.here.values(), *self._there.values())}
            for x in left:
                if id(x) not in live:
                    x.delete()
