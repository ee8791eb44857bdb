"""Breaks the package in one place after the other, and says whether the daily tests notice.

    python -m tests.mutations [--only WORD ...] [--seconds 90]

Works on a copy: nothing here is changed. For each mutation the daily tests of the files that it
names run, then the unit tests, until one fails. Prints a table in Markdown, a row as soon as it is known.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """In ``file`` the one place that is ``old`` becomes ``new``; ``tests`` should notice, beside the unit tests."""

    what: str
    file: str
    old: str
    new: str
    tests: str


STREAM = "test_stream.py -k rows"
DISK, TOGETHER = "disk/test_faults.py", "disk/test_together.py"
MUTATIONS = [
    Mutation("host leaves are any in size", "_placement/placement.py", "if np.ndim(x) == 0:", "if np.ndim(x) < 0:", "test_placement.py"),
    Mutation("PRNG keys move", "_placement/placement.py", "jax.dtypes.prng_key", "jnp.complexfloating", "test_placement.py test_plan.py"),
    Mutation("min_bytes is off by one", "_placement/placement.py", "if nbytes(x) < min_bytes else", "if nbytes(x) <= min_bytes else", "test_placement.py"),
    Mutation("a fraction takes the last leaves", "_placement/placement.py", "sorted(chosen, key=lambda k: leaves[k].rank)", "sorted(chosen, key=lambda k: -leaves[k].rank)", "test_placement.py"),
    Mutation("a fraction takes one leaf less", "_placement/placement.py", "* sums[-1])))", "* sums[-1])) - 1)", "test_placement.py test_trees.py"),
    Mutation("names in the order of the forward pass", "_plan/order.py", "reverse=True)", "reverse=False)", "test_placement.py"),
    Mutation("layers_10 before layers_2", "_plan/order.py", "(0, int(t), \"\") if t.isdigit() else", "(0, 0, t) if t.isdigit() else", "test_placement.py"),
    Mutation("order= says nothing", "_plan/order.py", "            by_rule[i],\n", "            0,\n", "test_placement.py"),
    Mutation("chunks are not cut at tiles", "_plan/transfers.py", "max(1, rows // tile) * tile", "max(1, rows)", "test_stream.py -k tiles"),
    Mutation("a chunk fills the window", "_plan/transfers.py", "window // 2 * size // total", "window * size // total", "test_stream.py -k tiles"),
    Mutation("two results in one buffer", "_plan/transfers.py", "or old in taken or", "or", STREAM),
    Mutation("buffers of another memory", "_plan/transfers.py", "return x.shape, x.dtype, is_host_aval(x), spec", "return x.shape, x.dtype, spec", "test_sharded.py"),
    Mutation("a window of one slice more", "_plan/decide.py", "in_flight + sizes[i] <= window", "in_flight <= window", "test_plan.py -k adamw"),
    Mutation("no slice waits for a store", "_plan/decide.py", "    return i\n\n\ndef _token", "    return -1\n\n\ndef _token", "test_plan.py -k adamw"),
    Mutation("slices in any order", "_plan/decide.py", "min(map(rank, p.slice.loads), default=0)", "0", "test_plan.py -k adamw"),
    Mutation("no gradient is waited for", "_plan/decide.py", "k if p.in_chunks else done if done < k else None", "None", "test_plan.py -k adamw"),
    Mutation("float16 in a loop", "_plan/decide.py", "jnp.float16 for p", "jnp.float64 for p", "test_stream.py -k small test_trees.py"),
    Mutation("the largest window counts", "_plan/decide.py", "math.inf if r.window is None else r.window", "-math.inf if r.window is None else -r.window", "test_region.py"),
    Mutation("leaves share no loop", "_plan/decide.py", "if (others := shared.get(rows)) is not None:", "if (others := shared.get(-rows)) is not None:", "test_stream.py -k independent"),
    Mutation("the first chunk is stored twice", "_emit/chunks.py", "loop.exchange(*state, (full - 1) * rows, None)", "loop.exchange(*state, 0, None)", STREAM),
    Mutation("the tail is left out", "_emit/chunks.py", "first = (full * rows, rest) if rest else (0, rows)", "first = (0, rows)", STREAM),
    Mutation("a loop of two runs once", "_emit/chunks.py", "jnp.int32(2)) if full == 2", "jnp.int32(1)) if full == 2", "test_stream.py"),
    Mutation("rows read after they are overwritten", "_emit/chunks.py", "read_once([given[i] for i in held])", "[given[i] for i in held]", "aot/test_peak.py -k stacked"),
    Mutation("shards are read from the first one", "_base/arrays.py", "(size // shards) + start", "(size // shards) * 0 + start", "test_sharded.py -k chunks_know"),
    Mutation("a skipped update is +0", "_update/skip.py", "-jnp.zeros((), x.dtype)", "jnp.zeros((), x.dtype)", "test_skip.py -k sign"),
    Mutation("skip is taken the other way", "_update/skip.py", "jnp.where(skip, kept, ", "jnp.where(~skip, kept, ", "test_skip.py"),
    Mutation("skip takes any shape", "_update/skip.py", "skip.shape != () or", "", "test_skip.py"),
    Mutation("donated buffers cross memories", "_base/donation.py", "    take_back_aliases(context, memory.DEVICE_KIND)\n", "", "test_donation.py -k crosses_no"),
    Mutation("ZeRO-1 on the layers first", "_placement/zero.py", "[*range(1, len(shape)), 0]", "[0, *range(1, len(shape))]", "test_sharded.py -k zero"),
    Mutation("ZeRO-1 where nothing divides", "_placement/zero.py", "if shape[axis] % (shards[axis] * parts) == 0:", "if shape[axis] >= shards[axis] * parts:", "test_sharded.py"),
    Mutation("specs end with None", "_placement/zero.py", "while spec[-1] is None:", "while False:", "test_sharded.py"),
    Mutation("needs of a cond are dropped", "_ir/propagate.py", "return [total | effect] * inner[0].first +", "return [0] * inner[0].first +", "test_visits.py test_stream.py -k finite"),
    Mutation("groups are not joined", "_ir/propagate.py", "        for other in roots[1:]:\n            parent[other] = root\n", "", "unit/test_propagate.py"),
    Mutation("all leaves are rounded alike", "_precision/storage.py", "number = jax.lax.add(number, np.uint32(0x9E3779B9))", "number = jax.lax.add(number, np.uint32(0))", "test_storage.py -k seeds"),
    Mutation("every step is rounded alike", "_precision/storage.py", "return StoredState(state.rounds + 1,", "return StoredState(state.rounds,", "test_storage.py -k 'increments or accumulation or equal'"),
    Mutation("untouched leaves are encoded again", "_precision/storage.py", "is_encoded(old) and x is not was", "is_encoded(old)", "test_storage.py -k 'again or drift'"),
    Mutation("nothing but zero becomes zero, but it does", "_precision/elements.py", "return jnp.maximum(jnp.floor(code + (0.5 if noise is None else noise)), 1)", "return jnp.floor(code + (0.5 if noise is None else noise))", "test_formats.py -k only_zero"),
    Mutation("a scale too small by one binade", "_precision/elements.py", "- SCALED[dtype].largest, 126)", "- SCALED[dtype].largest - 1, 126)", "test_formats.py"),
    Mutation("a uint8 block forgets that it has negative numbers", "_precision/elements.py", "return _where(negative > 0, -largest, largest)", "return largest", "test_storage.py -k negative"),
    Mutation("leaves that belong together are parted", "_placement/placement.py", "[share(leaf.owner) if leaf.host else None for leaf in leaves], _whose(leaves))", "[share(leaf.owner) if leaf.host else None for leaf in leaves], range(len(leaves)))", "test_cores.py -k which_leaves"),
    Mutation("an abstract state is in device memory", "_base/memory.py", "on_host = sharding is not None and sharding.memory_kind == HOST_KIND", "on_host = False", "test_state.py -k lowers"),
    Mutation("donated moments in each other's buffers", "_drive/tasks.py", "inputs, defined = _side_by_side(stage.reads, defined, step.next_of)", "inputs = stage.reads", "test_cores.py -k in_place"),
    Mutation("what a skipped step hands on is freed", "_drive/run.py", "if id(x) not in live:", "if True:", "test_cores.py -k skipped"),
    Mutation("what was not donated is taken", "_drive/tasks.py", "others = {*step.inputs} - donated | {", "others = {", "test_cores.py -k in_place"),
    Mutation("an update by the cores runs on the device", "_emit/region.py", "if self.on_cores:\n            raise UpdatedOnCores", "if False:\n            raise UpdatedOnCores", "test_cores.py -k in_place"),
    Mutation("old parameters are written over before another reads them", "_drive/kernel.py", " and times[v] == 1}", "}", "test_one_pass.py -k still_read"),
    Mutation("a NumPy array of the user's is written", "_drive/run.py", "                values.take(self._written)\n", "                pass\n", "test_one_pass.py -k not_ours"),
    Mutation("state is written that XLA has not handed over", "_drive/cores.py", "return _handed_over(tuple(x.sharding for x in arrays))(*arrays) if arrays else ()", "return arrays", "test_cores.py -k in_place"),
    Mutation("replicas keep the old state", "_drive/kernel.py", "cores.memory_of(other)[...] = cores.memory_of(replicas[0])", "pass", "test_cores.py -k sharded"),
    Mutation("a kernel's maximum loses NaN", "_drive/kernel.py", '({0} > {1}) or ({0} != {0})', "({0} > {1})", "test_one_pass.py -k special"),
    Mutation("an array is written over the last commit", "_disk/store.py", "k: 1 - self._last.state[k][1].slot if", "k: self._last.state[k][1].slot if", DISK),
    Mutation("a failed commit stops nothing", "_disk/store.py", "        self._stopped = self._stopped or error", "        pass", DISK),
    Mutation("files are not synced", "_disk/store.py", "if new != old}", "if new is old}", DISK),
    Mutation("a swap is not synced", "_disk/store.py", "self._files.sync_directory(self.directory)\n            self._last, self._next", "self._last, self._next", DISK),
    Mutation("one manifest, written over", "_disk/store.py", "temporary = path.with_name(f\"{path.name}.new\")", "temporary = path", DISK),
    Mutation("buffers that are given back too early", "_disk/files.py", "weakref.finalize(lent, self._returned.append, found).atexit = False", "self._returned.append(found)", "test_disk.py"),
    Mutation("a short read goes on anywhere", "_disk/files.py", "now -= now % PAGE", "now -= 0", DISK),
    Mutation("damage to a block is not noticed", "_disk/files.py", "(found := checksum_of(memory)) != checksum", "(found := checksum_of(memory)) < 0", DISK),
    Mutation("a read does not wait for the write before it", "_disk/disk.py", "if not committed and (writing := self._writing.get(k)) is not None:", "if (writing := None) is not None:", "test_disk.py"),
    Mutation("a process swaps before all have prepared", "_disk/commits.py", "[everywhere(lambda: _whole(lambda: store.prepare(step, arrays, run)), \"disk.commit\")]", "[_whole(lambda: store.prepare(step, arrays, run))]", TOGETHER),
    Mutation("a commit that another process has not", "_disk/commits.py", "set[Commit].intersection(", "set[Commit].union(", TOGETHER),
    Mutation("two runs' commits of one number are one", "_disk/commits.py", "[[each.number, each.run, each.step]", "[[each.number, \"\", each.step]", TOGETHER),
    Mutation("orbax reads what has gone on", "_disk/disk.py", "if not committed or _version(token) != self._committed:", "if not committed:", "test_disk_moves.py"),
    Mutation("a leaf restored onto a disk is not checked", "_interop/checkpoint.py", "if got != sums[name]", "if False", "test_disk_moves.py"),
    Mutation("what is saved is what training writes over", "_interop/checkpoint.py", "[memory.copy_on_host(x) for x in host]", "host", "test_checkpoint.py -k written_is_the_copy"),
    Mutation("a checkpoint of another dtype is converted", "_interop/stored.py", "if got != (tuple(x.shape), np.dtype(x.dtype)):", "if got[0] != tuple(x.shape):", "test_checkpoint.py -k wrong_with_the_call"),
    Mutation("restored without a target, counts are in host memory", "_interop/stored.py", "memory.HOST_KIND if stored.shape else memory.DEVICE_KIND", "memory.HOST_KIND", "test_checkpoint.py -k without_a_target"),
    Mutation("a checksum of each replica", "_interop/stored.py", "if shard.replica_id == 0:", "if True:", "test_damage.py test_checkpoint.py -k 'checksum or placement or sums'"),
    Mutation("a gradient waits divided as what is divided least", "_interop/pending.py", "if n == max(parts)]", "if n == min(parts)]", "pipelined/test_pending.py"),
    Mutation("bfloat16 gradients wait in float32", "_interop/pending.py", "<= nbytes(out.aval):", "> nbytes(out.aval):", "pipelined/test_pending.py -k bfloat16"),
    Mutation("gradients that wait on the host are planned for the device", "_interop/rotated.py", "with_kind(sharding, HOST_KIND) if sharding is not None and name in hosts", "with_kind(sharding, HOST_KIND) if sharding is None and name in hosts", "pipelined/test_pending.py"),
    Mutation("new parameters divided as XLA likes", "_interop/rotated.py", "return place if is_divisible else None", "return None", "pipelined/test_sharded.py -k divided"),
    Mutation("a carry is finished twice", "_interop/pipelined.py", "        program = self._of(carry)\n        carry.used = True\n", "        program = self._of(carry)\n", "pipelined/test_errors.py -k used_once"),
    Mutation("unknown of a parameter is what another offload knows", "_report/report.py", "known.unknown - known.shardings.keys()", "known.unknown", "test_guessed.py"),
    Mutation("a wrapper's order counts, not that of the offload in it", "_report/report.py", "claimed(update.claims).items() if", "[(v, c) for c in update.claims for v in c.leaves] if", "test_guessed.py"),
    Mutation("a leaf that stays behind on the device", "_analysis/inspection.py", "if times > given_back[dtype, shape]:", "if times < given_back[dtype, shape]:", "analysis/test_inspect.py"),
    Mutation("hidden is what is waited for", "_analysis/inspection.py", "1 - waited / seconds if seconds", "waited / seconds if seconds", "analysis/test_inspect.py"),
    Mutation("loaded is what is stored", "_analysis/inspection.py", "for t in self.transfers if t.loads)", "for t in self.transfers if not t.loads)", "analysis/test_inspect.py analysis/test_inspect_sharded.py analysis/test_cli.py"),
    Mutation("NaN passes the self-test", "_analysis/doctor.py", "if not off <= TOLERANCE:", "if off > TOLERANCE:", "analysis/test_doctor.py"),
    Mutation("both directions of the link make up its time", "_analysis/timeline.py", "link=max(clock.busy[LOAD], clock.busy[STORE])", "link=clock.busy[LOAD] + clock.busy[STORE]", "aot/test_timeline.py"),
    Mutation("a copy has the speed of both directions", "_analysis/timeline.py", "2 * nbytes / self.chip.host_link_both", "nbytes / self.chip.host_link_both", "aot/test_timeline.py"),
    Mutation("the simulation is off the other way", "_analysis/profiled.py", "self.simulated.step / self.step - 1", "self.step / self.simulated.step - 1", "analysis/test_profile.py"),
    Mutation("a group before another that it reads from", "_drive/segments.py", "        made_by.update(dict.fromkeys(group.makes, ready[-1]))\n", "", "test_segments.py"),
    Mutation("the device waits for the file", "_drive/segments.py", "bisect.bisect_left(cuts, at) + 1, len", "bisect.bisect_left(cuts, at), len", "test_segments.py -k disk"),
    Mutation("the state stays on the device", "_offload.py", "[leaf.host for leaf in plan]))", "[False for leaf in plan]))", "test_equivalence.py"),
    Mutation("what fills no tile is not stored", "_plan/plan.py", "else ((0, full), (full, rows))", "else ((0, full),)", "test_plan.py -k tile"),
    Mutation("a second norm is in one piece", "_ir/conds.py", "on | reduced))  # what", "on))  # what", "unit/test_branches.py"),
]  # fmt: skip


def files_of(tests: str) -> list[str]:
    return [f"tests/{name}" for name in tests.partition(" -k ")[0].split() if name.endswith(".py")]


def noticed(folder: Path, tests: str, seconds: float) -> str:
    """The test that fails; empty where none does."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    _, _, words = tests.partition(" -k ")
    chosen = ["-k", words.split(" test_")[0].strip("'")] if words else []
    for what in ([*files_of(tests), *chosen], ["tests/unit"]):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--daily", "-p", "no:cacheprovider", *what]
        try:
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return "not done in time"
        if done.returncode == 5:  # what is broken would seem to be noticed
            raise SystemExit(f"{' '.join(what)}: no such test; mend the table.")
        if done.returncode:
            failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return (failed or [f"exit status {done.returncode}"])[0].removeprefix("tests/")
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="of which the description or the file has one of these")
    parser.add_argument("--seconds", type=float, default=600, help="for each run of tests")
    args = parser.parse_args()
    caught, chosen = 0, [m for m in MUTATIONS if any(word in f"{m.what} {m.file}" for word in args.only)]
    print("| broken | in | noticed by |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder, start = Path(temporary) / "copy", time.monotonic()
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".hypothesis"))
        for m in chosen:
            path = folder / "jax_offload" / m.file
            before = path.read_text()
            if before.count(m.old) != 1:
                raise SystemExit(f"{m.what}: {m.file} has {before.count(m.old)} times {m.old!r}; mend the table.")
            path.write_text(before.replace(m.old, m.new))
            by = noticed(folder, m.tests, args.seconds)
            path.write_text(before)
            caught += bool(by)
            print(f"| {m.what} | `{m.file}` | {f'`{by}`' if by else '**nothing**'} |", flush=True)
        print(f"\n{caught} of {len(chosen)} noticed, in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
