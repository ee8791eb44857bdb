"""Trains through a store in a process that is killed at random moments, again and again.

``python -m tests.disk.kills [N]`` kills N times, 100 by default. After each the store must open at its last commit,
bitwise as the undisturbed run was at that step, and the next process goes on from there.
"""

import multiprocessing
import shutil
import sys
import tempfile
import time
from collections import deque
from itertools import pairwise
from pathlib import Path

import numpy as np

from jax_offload._disk.layout import Entry
from jax_offload._disk.store import Store

SHAPES = [(300, 50), (7000,), (129, 100), (20000,), (64,), (50, 333)]
GROUPS = [[Entry(f"{k}/{name}", shape, "float32") for name in ("mu", "nu")] for k, shape in enumerate(SHAPES)]
ABOUT = {"optimizer": "adam"}
BLOCK = 16384
SETTINGS = [(1, 1), (2, 1), (2, 3), (6, 2)]  # groups read ahead, steps between commits


def updated(arrays, w, step):
    """Adam, in operations that IEEE rounds one way, so that no library decides about bits."""
    mu, nu = arrays
    gradient = w * np.float32(0.1) + np.float32(step % 7 - 3)
    mu = np.float32(0.9) * mu + np.float32(0.1) * gradient
    nu = np.float32(0.99) * nu + np.float32(0.01) * gradient * gradient
    return [mu, nu], w - np.float32(0.01) * mu / (np.sqrt(nu) + np.float32(1e-8))


def first():
    rng = np.random.default_rng(0)
    return [[np.zeros(shape, np.float32)] * 2 for shape in SHAPES], [
        rng.normal(size=shape).astype(np.float32) for shape in SHAPES
    ]


def undisturbed():
    """State and parameters of each step, one after the other."""
    state, params = first()
    step = 0
    while True:
        yield state, params
        step += 1
        both = [updated(arrays, w, step) for arrays, w in zip(state, params, strict=True)]
        state, params = [arrays for arrays, _ in both], [w for _, w in both]


def train(directories, setting):
    """Makes or opens the store and goes on, until something ends the process."""
    depth, every = setting
    if Store.exists(directories):
        store = Store.open(directories, about=ABOUT)
        extra = store.extra()
        params = [extra[f"w{k}"] for k in range(len(SHAPES))]
    else:
        store = Store.create(directories, GROUPS, about=ABOUT, block=BLOCK)
        state, params = first()
        for group, arrays in enumerate(state):
            store.write(group, arrays)
        store.commit(0, named(params)).result()
    step, count = store.step, len(SHAPES)
    reads = deque(store.read(group) for group in range(depth))
    while True:
        step += 1
        params = list(params)
        for group in range(count):
            new, params[group] = updated(reads.popleft().result(), params[group], step)
            store.write(group, new)
            reads.append(store.read((group + depth) % count))
        if step % every == 0:
            store.commit(step, named(params))


def named(params):
    return {f"w{k}": w for k, w in enumerate(params)}


def check(directories, runs, last):
    """The step that the store opens at: not before the last one, and bitwise as it was undisturbed."""
    with Store.open(directories, about=ABOUT) as store:
        assert store.step >= last["step"], f"step {store.step} after {last['step']}"
        while last["step"] < store.step:
            last["values"], last["step"] = next(runs), last["step"] + 1
        state, params = last["values"]
        for group, wanted in enumerate(state):
            found = store.read(group).result()
            assert all(np.array_equal(x, y) for x, y in zip(found, wanted, strict=True)), f"group {group}"
        extra = store.extra()
        assert all(np.array_equal(extra[f"w{k}"], w) for k, w in enumerate(params)), "parameters"
        return store.step


def kill(times, folder, seed=0):
    """Kills ``times`` times. The steps at which the store opened after each; None where it had no commit yet."""
    rng = np.random.default_rng(seed)
    directories = [Path(folder) / "x", Path(folder) / "y"]
    runs, found = undisturbed(), []
    last = {"step": 0, "values": next(runs)}
    for _ in range(times):
        setting = SETTINGS[rng.integers(len(SETTINGS))]
        process = multiprocessing.get_context("fork").Process(target=train, args=(directories, setting))
        process.start()
        # now and then within the first moments, when it is made or opened
        time.sleep(rng.uniform(0, 0.02 if rng.random() < 0.2 else 0.3))
        assert process.is_alive(), "it ended by itself"
        process.kill()
        process.join()
        found.append(check(directories, runs, last) if Store.exists(directories) else None)
    return found


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    place = tempfile.mkdtemp()
    try:
        steps = kill(count, place, seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    finally:
        shutil.rmtree(place)
    moved = sum(one != other for one, other in pairwise(steps))
    print(f"{count} kills: each time whole, at its last commit; {moved} times further than before, to step {steps[-1]}")
