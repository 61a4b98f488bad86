"""Messages and progress of library code, for the reporter that the program installs: the command line's is
:mod:`sm120kit.core.console`. Without one, nothing is printed.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol


class Advance(Protocol):
    """Count finished parts of a task: units, or bytes of a transfer."""

    def __call__(self, amount: int = 1) -> None: ...


class Reporter(Protocol):
    """Where messages and progress go. The functions of this module describe the methods."""

    def info(self, message: str) -> None: ...
    def detail(self, message: str) -> None: ...
    def warn(self, message: str) -> None: ...
    def step(self, message: str) -> AbstractContextManager[None]: ...
    def working(self, activity: str = "") -> AbstractContextManager[None]: ...
    def task(self, description: str, total: int | None, *, transfer: bool = False) -> AbstractContextManager[Advance]: ...


_reporter: Reporter | None = None


@contextmanager
def use(reporter: Reporter) -> Iterator[None]:
    """Install a reporter for all threads while the block runs."""
    global _reporter
    before, _reporter = _reporter, reporter
    try:
        yield
    finally:
        _reporter = before


def info(message: str) -> None:
    """Report what happens."""
    if _reporter:
        _reporter.info(message)


def detail(message: str) -> None:
    """Report what only interests with ``--verbose``."""
    if _reporter:
        _reporter.detail(message)


def warn(message: str) -> None:
    """Report a risk that does not end the command."""
    if _reporter:
        _reporter.warn(message)


def step(message: str) -> AbstractContextManager[None]:
    """Report the start of a step that may take long and has no parts to count."""
    return _reporter.step(message) if _reporter else nullcontext()


def working(activity: str = "") -> AbstractContextManager[None]:
    """A program or wait that is reported only when it takes long; without a name it belongs to the last message."""
    return _reporter.working(activity) if _reporter else nullcontext()


def task(description: str, total: int | None, *, transfer: bool = False) -> AbstractContextManager[Advance]:
    """Report progress: yields a function that counts finished parts of ``total`` (None: unknown), bytes with ``transfer``."""
    return _reporter.task(description, total, transfer=transfer) if _reporter else nullcontext(lambda amount=1: None)
