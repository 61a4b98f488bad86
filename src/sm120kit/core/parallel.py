"""Jobs in threads, of which the first that fails ends the others."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")


def in_parallel(jobs: Sequence[Callable[[], T]], threads: int, stop: Callable[[], object] = lambda: None) -> list[T]:
    """The results of jobs, in their order, which start in that order.

    After an error, or an interruption, jobs that have not started are left out, and ``stop`` ends those that run.
    """
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]
