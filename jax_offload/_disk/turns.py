"""Operations on groups, each after the one before on the same group, without a thread that waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")


def together(pool: Executor, jobs: Sequence[Callable[[], T]]) -> Future[list[T]]:
    """The results of ``jobs``, run by ``pool``; the first error of them, when none runs any more."""
    result: Future[list[T]] = Future()
    futures = [pool.submit(job) for job in jobs]

    def finish() -> None:
        errors = [future.exception() for future in futures]
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result([future.result() for future in futures])

    when_done(futures, finish)
    return result


def when_done(futures: Sequence[Future], start: Callable[[], None] | None) -> None:
    """Calls ``start`` when all are done, well or not: now, or in the thread that finishes the last.

    It is forgotten then. Futures keep their callbacks, and with them would keep the arrays that ``start`` writes.
    """
    left = len(futures)
    lock = Lock()

    def one(_: Future) -> None:
        nonlocal left, start
        with lock:
            left -= 1
            last = left == 0
        if last:
            begin, start = start, None
            if begin is not None:
                begin()

    if start is not None and not futures:
        start()
    for future in futures:
        future.add_done_callback(one)


class Turns:
    """Who is last in the queue of each group. Asked one at a time."""

    def __init__(self) -> None:
        self._last: dict[int, Future[None]] = {}

    def under_way(self) -> list[Future[None]]:
        """What to wait for, to know that all that was asked for is over. They raise nothing."""
        return list(self._last.values())

    def after(
        self,
        group: int,
        others: Sequence[Future],
        start: Callable[[], Future[S]],
        finish: Callable[[S], T],
        fail: Callable[[BaseException], Any],
    ) -> Future[T]:
        """What ``start`` begins when the group's last is done and ``others`` are, then what ``finish`` makes of it."""
        result: Future[T] = Future()
        over: Future[None] = Future()  # without the result, which would be held until the group's next
        before = [*others, *([self._last[group]] if group in self._last else [])]
        self._last[group] = over

        def ended(inner: Future[S]) -> None:
            error = inner.exception()
            if error is None:
                try:
                    result.set_result(finish(inner.result()))
                except BaseException as unexpected:
                    error = unexpected
            if error is not None:
                fail(error)
                result.set_exception(error)
            over.set_result(None)

        def begin() -> None:
            try:
                inner = start()
            except BaseException as error:
                inner = Future()
                inner.set_exception(error)
            inner.add_done_callback(ended)

        when_done(before, begin)
        return result
