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


class Queues:
    """Who is last in the queue of each group, and which commit later writes wait for. Any thread may ask."""

    def __init__(self) -> None:
        self._last: dict[int, Future[None]] = {}
        self._commit: Future[None] | None = None
        self._lock = Lock()

    def under_way(self) -> list[Future[None]]:
        """What to wait for, to know that all that was asked for is over. They raise nothing."""
        with self._lock:
            return self._all()

    def after(
        self,
        group: int,
        start: Callable[[], Future[S]],
        finish: Callable[[S], T],
        fail: Callable[[BaseException], Any],
        *,
        writes: bool,
    ) -> Future[T]:
        """What ``start`` begins when all that was asked of the group is done, then what ``finish`` makes of it.

        ``writes``: after the last commit too, as that is in the slots that are written next.
        """
        over: Future[None] = Future()  # without the result, which would be held until the group's next
        with self._lock:
            before = [self._last[group]] if group in self._last else []
            before += [self._commit] if writes and self._commit else []
            self._last[group] = over
        return _run(before, over, start, finish, fail)

    def commit(self, start: Callable[[], Future[T]]) -> Future[T]:
        """What ``start`` begins when all that was asked for is done."""
        over: Future[None] = Future()
        with self._lock:
            before = self._all()
            self._commit = over
        return _run(before, over, start, lambda x: x, lambda error: None)

    def _all(self) -> list[Future[None]]:
        return [*self._last.values(), *([self._commit] if self._commit else [])]


def _run(
    before: Sequence[Future],
    over: Future[None],
    start: Callable[[], Future[S]],
    finish: Callable[[S], T],
    fail: Callable[[BaseException], Any],
) -> Future[T]:
    result: Future[T] = Future()

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
