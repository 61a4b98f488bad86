"""Every failure that a user can meet, each with its own exit code.

An error states the fact with its values in ``message`` and the way out in ``hint``. Anything else that escapes is a bug
and keeps its traceback. Exit codes 0, 1 and 2 are taken: success, a check that answered no, and bad command line usage.
"""

from __future__ import annotations

from typing import ClassVar


class Sm120kitError(Exception):
    """Base of all failures a user can meet."""

    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UnknownName(Sm120kitError):
    """A recipe, project, patch, group or stage that does not exist."""

    exit_code = 10


class BadRecipe(Sm120kitError):
    """A recipe that is not well-formed; the message lists every problem."""

    exit_code = 11


class LockDiffers(Sm120kitError):
    """A lock is absent, edited, or not made of what is there now; the message lists every difference."""

    exit_code = 12


class FetchFailed(Sm120kitError):
    """A source could not be had: index, mirror or repository did not deliver it."""

    exit_code = 20


class HashMismatch(Sm120kitError):
    """What was delivered is not what is pinned."""

    exit_code = 21


class UnsafeArchive(Sm120kitError):
    """An archive is damaged or has a member that would leave its directory."""

    exit_code = 22


class OfflineMiss(Sm120kitError):
    """``--offline`` was given and the source is not in the cache."""

    exit_code = 23


class ResolutionFailed(Sm120kitError):
    """The wheels that a recipe asks for contradict each other, or one does not exist for the platform."""

    exit_code = 24


class BadPatch(Sm120kitError):
    """A patch or a series is not well-formed: trailers, paths, encoding."""

    exit_code = 30


class PatchConflict(Sm120kitError):
    """A patch does not apply to the pinned tree."""

    exit_code = 31


class PatchAlreadyUpstream(Sm120kitError):
    """The pinned tree already has what a patch does."""

    exit_code = 32


class ToolchainMissing(Sm120kitError):
    """No compiler, or a needed Python package is absent."""

    exit_code = 40


class ToolchainUnsuitable(Sm120kitError):
    """A compiler is there but cannot do what is asked, such as an nvcc too old for the arch."""

    exit_code = 41


class NotEnoughMemory(Sm120kitError):
    """One unit needs more memory than this machine can give."""

    exit_code = 42


class NotEnoughDisk(Sm120kitError):
    """The state directory's file system is too small or full."""

    exit_code = 43


class StateUnwritable(Sm120kitError):
    """The state directory cannot be written."""

    exit_code = 44


class NoGpu(Sm120kitError):
    """Something must run on a GPU and CUDA programs see none."""

    exit_code = 45


class WrongGpu(Sm120kitError):
    """The GPU at hand cannot do what is asked."""

    exit_code = 46


class BadKey(Sm120kitError):
    """A file that is not a key which can sign, or be trusted."""

    exit_code = 47


class CommandFailed(Sm120kitError):
    """A foreign program failed; its log is named."""

    exit_code = 50


class CompileFailed(Sm120kitError):
    """The compiler refused a unit; the first error and the log are named."""

    exit_code = 51


class ExpectationFailed(Sm120kitError):
    """A build finished but is not what the recipe expects, such as a kernel that was silently not built."""

    exit_code = 52


class BadArtifact(Sm120kitError):
    """A file handed to ``inspect`` is not a wheel, ELF, fatbin or cubin, or is damaged."""

    exit_code = 53


class ControlMissed(Sm120kitError):
    """A fault that was planted on purpose was not found: the verification proves nothing."""

    exit_code = 54


class DaemonUnreachable(Sm120kitError):
    """No container daemon answers, or it went away at work."""

    exit_code = 60


class NoSuchImage(Sm120kitError):
    """An image that is neither here nor in its registry, or a base that is not named by digest."""

    exit_code = 61


class ImageBuildFailed(Sm120kitError):
    """A step of a Dockerfile failed."""

    exit_code = 62


class NotVerified(Sm120kitError):
    """An image that did not pass its checks, or is not the one that did."""

    exit_code = 63


class TagTaken(Sm120kitError):
    """A registry has the tag already. Tags are never moved."""

    exit_code = 64


class RegistryFailed(Sm120kitError):
    """A registry does not answer, or refuses."""

    exit_code = 65


class BadIndex(Sm120kitError):
    """An ``images.json`` that cannot be read, or has no such image."""

    exit_code = 66


class NoModel(Sm120kitError):
    """A model folder that is not there or cannot be read."""

    exit_code = 67


class NotACheckpoint(Sm120kitError):
    """A folder without ``config.json`` or safetensors files, or with one that is not what it should be."""

    exit_code = 68


class ShardMissing(Sm120kitError):
    """A checkpoint lacks a file or tensor that its index lists."""

    exit_code = 69


class ShardDamaged(Sm120kitError):
    """A safetensors file is truncated or has no header."""

    exit_code = 71


class MtpMissing(Sm120kitError):
    """A configuration speculates with MTP tensors that the checkpoint does not have."""

    exit_code = 72


class TooFewGpus(Sm120kitError):
    """A configuration needs more GPUs, or others."""

    exit_code = 73


class DoesNotFit(Sm120kitError):
    """Weights and KV cache do not fit into the GPUs' memory."""

    exit_code = 74


class WrongImage(Sm120kitError):
    """A verified image of another engine, or with a version that is known to be bad for the configuration."""

    exit_code = 75


class ServerDied(Sm120kitError):
    """A launched server ended by itself."""

    exit_code = 76


class NotHealthy(Sm120kitError):
    """A launched server did not become healthy in time."""

    exit_code = 77


class PortTaken(Sm120kitError):
    """Something listens already where a server is to be launched."""

    exit_code = 78


class NotAttested(Sm120kitError):
    """No signed statement says what an image is made of, or it is not trusted, was changed, or is about another image."""

    exit_code = 79


class HostUnreadable(Sm120kitError):
    """A host's facts cannot be read at all: no /proc or /sys, or no such recorded host."""

    exit_code = 80


class LogUnreadable(Sm120kitError):
    """A log handed to ``explain`` cannot be read."""

    exit_code = 81


class CannotMeasure(Sm120kitError):
    """What a measurement needs is not there: GPUs, torch or NCCL, or a server that gives log-probabilities."""

    exit_code = 82


class GpusTaken(Sm120kitError):
    """A server that was launched before still has GPUs that are to be used."""

    exit_code = 83


class ServerUnreachable(Sm120kitError):
    """Nothing at the URL answers as an OpenAI-compatible server does."""

    exit_code = 90


class WrongModel(Sm120kitError):
    """The server does not offer the model that is to be measured."""

    exit_code = 91


class BadReceipt(Sm120kitError):
    """A receipt that cannot be read, or is of a format that this version does not know."""

    exit_code = 92


class NothingMeasured(Sm120kitError):
    """Every request of a run failed."""

    exit_code = 93


class NotComparable(Sm120kitError):
    """Two receipts differ in what a figure depends on."""

    exit_code = 94


class BelowPublished(Sm120kitError):
    """A figure that can be compared stayed below what was published."""

    exit_code = 95


class NotAsPublished(Sm120kitError):
    """No published figure can be compared with what was measured."""

    exit_code = 96
