"""Errors that users see: families with an exit code each, and a name that ``--json`` prints.

``message`` states the fact with its values and ``hint`` the remedy. Any other exception is a bug and keeps its traceback. Exit
codes 0, 1 and 2 are reserved: success, a result that is negative, and wrong usage of the command line. The first line of a
family's docstring is its line in the table of docs/configuration.md. Subclasses are for code that treats them differently.
"""

import difflib
from collections.abc import Iterable
from typing import ClassVar


class Sm120kitError(Exception):
    """Base class of all errors that users see."""

    exit_code: ClassVar[int]
    kind: ClassVar[str]

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class NotFound(Sm120kitError):
    """What an argument names does not exist: a recipe, patch, configuration, model, image, server or package."""

    exit_code = 10
    kind = "not-found"


class BadInput(Sm120kitError):
    """A file, URL or text is malformed; the message lists every problem."""

    exit_code = 11
    kind = "bad-input"


class BadRecord(BadInput, ValueError):
    """A record in the state directory, or given as a file, is damaged or of another version."""


class Mismatch(Sm120kitError):
    """Something is not what it has to belong to: a lockfile, an edited series, a finished result, an image's version."""

    exit_code = 12
    kind = "mismatch"


class AlreadyExists(Sm120kitError):
    """A recipe, patch file or tag would be replaced."""

    exit_code = 13
    kind = "already-exists"


class FetchFailed(Sm120kitError):
    """No index, mirror, repository, registry or hub delivered what was requested, or it may not be."""

    exit_code = 20
    kind = "fetch-failed"


class HubUnreachable(FetchFailed):
    """The Hugging Face Hub does not answer, or with an error of its own."""


class OfflineMiss(FetchFailed):
    """``--offline`` was given and the source is not in the cache."""


class RegistryFailed(FetchFailed):
    """A registry does not respond, or rejects a request."""


class NotTrusted(Sm120kitError):
    """A hash, a signature, a check or an owner is missing or wrong, or an archive or URL could do harm."""

    exit_code = 21
    kind = "not-trusted"


class NotVerified(NotTrusted):
    """An image did not pass its checks, or is not the image that did."""


class NotAttested(NotTrusted):
    """An image has no signed statement, or the statement is not trusted, was changed, or is about another image."""


class ResolutionFailed(Sm120kitError):
    """The packages that a recipe requires contradict each other, or one does not exist for the platform."""

    exit_code = 22
    kind = "resolution-failed"


class PatchConflict(Sm120kitError):
    """A patch does not apply, is contained already, or its code fails."""

    exit_code = 30
    kind = "patch-conflict"


class RequirementMissing(Sm120kitError):
    """A program, compiler, package, sandbox or key is absent or does not meet a requirement."""

    exit_code = 40
    kind = "requirement-missing"


class ResourceUnavailable(Sm120kitError):
    """Memory, disk space, GPUs or a port are absent, too small, of the wrong kind or in use."""

    exit_code = 41
    kind = "resource-unavailable"


class SystemRefused(Sm120kitError):
    """The operating system refused access to a file, a directory, standard output or a connection."""

    exit_code = 42
    kind = "system-refused"


class CommandFailed(Sm120kitError):
    """Another program failed, such as a compiler or the build of an image; the message names its log."""

    exit_code = 50
    kind = "command-failed"


class CompileFailed(CommandFailed):
    """The compiler rejected a unit; the message has the first error and names the log."""


class CheckFailed(Sm120kitError):
    """A result is not what was expected: a kernel that was not built, a fault that was not detected, a low rate."""

    exit_code = 51
    kind = "check-failed"


class DaemonUnreachable(Sm120kitError):
    """The container daemon does not respond, or stopped responding."""

    exit_code = 60
    kind = "daemon-unreachable"


class ServerFailed(Sm120kitError):
    """A server exited, did not become healthy, does not respond, has another model, or failed every request."""

    exit_code = 70
    kind = "server-failed"


class NoAnswer(ServerFailed):
    """A launched server is healthy and does not answer a request."""


class NotComparable(Sm120kitError):
    """Two results differ in what a figure depends on, or no published figure can be compared with a measurement."""

    exit_code = 80
    kind = "not-comparable"


def families() -> list[type[Sm120kitError]]:
    """The families by exit code."""
    own = [family for family in Sm120kitError.__subclasses__() if family.__module__ == __name__]
    return sorted(own, key=lambda family: family.exit_code)


def nearest(word: str, known: Iterable[str]) -> str:
    """The three most similar known names, the most similar first; ``none`` if nothing is known."""
    return ", ".join(difflib.get_close_matches(word, list(known), n=3, cutoff=0)) or "none"


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """The suffix ``; did you mean 'NAME'?`` with the most similar known name; empty if none is similar."""
    near = difflib.get_close_matches(str(word), [str(name) for name in known], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


class InvalidOption(ValueError):
    """The value of a command's option is malformed, or contradicts another; commands report it as wrong usage."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(reason)
        self.option = option
