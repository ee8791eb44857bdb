"""Measure the disk alone: whole files with O_DIRECT in threads, and with fio."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

BLOCK = 8 * 2**20
THREADS = 8  # threads in each direction; with four, a virtual disk read more slowly


def make(path: Path, nbytes: int) -> Path:
    """Make a file and write its blocks, because reading space that is only reserved does not touch the disk."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.posix_fallocate(descriptor, 0, nbytes)
    os.close(descriptor)
    ours(None, path, nbytes)
    return path


def ours(read: Path | None, written: Path | None, nbytes: int) -> float:
    """Return the seconds for ``nbytes`` of each, with eight threads in each direction and 8 MiB per call."""
    jobs: list[tuple[Callable, int, mmap.mmap, range]] = []
    opened = []
    for path, call in ((read, os.preadv), (written, os.pwritev)):
        if path is not None:
            descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
            opened.append(descriptor)
            for k in range(THREADS):
                memory = mmap.mmap(-1, BLOCK)
                memory.write(os.urandom(2**16) * (BLOCK // 2**16))
                jobs.append((call, descriptor, memory, range(k * BLOCK, nbytes, THREADS * BLOCK)))

    def work(call: Callable, descriptor: int, memory: mmap.mmap, offsets: range) -> None:
        for offset in offsets:
            moved = call(descriptor, [memory], offset)
            assert moved == BLOCK, f"{moved} bytes of {BLOCK}"

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if written is not None:
        os.fdatasync(opened[-1])
    taken = time.perf_counter() - begin
    for descriptor in opened:
        os.close(descriptor)
    return taken


def fio(read: Path | None, written: Path | None, nbytes: int) -> float:
    """Do the same with fio, with eight calls in flight; return the seconds of the slower direction."""
    command = ["fio", "--output-format=json", "--direct=1", "--ioengine=libaio", "--iodepth=8", "--bs=8m"]
    command += [f"--size={nbytes}", "--group_reporting=0"]
    for path, kind in ((read, "read"), (written, "write")):
        if path is not None:
            command += [f"--name={kind}", f"--filename={path}", f"--rw={kind}"]
            command += ["--end_fsync=1"] if kind == "write" else []
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    jobs = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"]
    return max(job[kind]["runtime"] / 1e3 for job in jobs for kind in ("read", "write") if job[kind]["io_bytes"])


def has_fio() -> bool:
    return shutil.which("fio") is not None
