"""The disk by itself: whole files by O_DIRECT in threads, and by fio."""

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
THREADS = 8  # a direction: with four a virtual disk read less


def make(path: Path, nbytes: int) -> Path:
    """A file whose blocks have been written, as reading space that was only reserved would not touch the disk."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.posix_fallocate(descriptor, 0, nbytes)
    os.close(descriptor)
    ours(None, path, nbytes)
    return path


def ours(read: Path | None, written: Path | None, nbytes: int) -> float:
    """Seconds for ``nbytes`` of each: eight threads a direction, 8 MiB a call; written bytes synced."""
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
    """The same by fio: eight calls of 8 MiB in flight a direction. Seconds of the direction that took longer."""
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
