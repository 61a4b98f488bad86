"""Errors that users see, each with its own exit code.

``message`` states the fact with its values and ``hint`` the remedy. Any other exception is a bug and keeps its traceback. Exit
codes 0, 1 and 2 are reserved: success, a check that failed, and wrong usage of the command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class Sm120kitError(Exception):
    """Base class of all errors that users see."""

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
    """A lockfile is absent or edited, or does not match its inputs; the message lists every difference."""

    exit_code = 12


class BadConfigFile(Sm120kitError):
    """The user's configuration file cannot be read, is not TOML, or has keys or values that no option accepts."""

    exit_code = 13


class RecipeExists(Sm120kitError):
    """The recipe that is to be made exists already."""

    exit_code = 14


class FetchFailed(Sm120kitError):
    """A source could not be fetched: no index, mirror or repository delivered it."""

    exit_code = 20


class HashMismatch(Sm120kitError):
    """Delivered content does not have the pinned hash."""

    exit_code = 21


class UnsafeArchive(Sm120kitError):
    """An archive is damaged or has a member that would leave its directory."""

    exit_code = 22


class OfflineMiss(Sm120kitError):
    """``--offline`` was given and the source is not in the cache."""

    exit_code = 23


class ResolutionFailed(Sm120kitError):
    """The wheels that a recipe requires contradict each other, or one does not exist for the platform."""

    exit_code = 24


class UnsafeSource(Sm120kitError):
    """A git URL or revision by which a program could be run or a local file be read."""

    exit_code = 25


class WrongSource(Sm120kitError):
    """A fetched source is another project or version than the recipe names."""

    exit_code = 26


class PackageGone(Sm120kitError):
    """A locked Debian package is in no configured archive any longer: a newer version has replaced it."""

    exit_code = 27


class NoPackageArchive(Sm120kitError):
    """No Debian archive is configured: this machine is not Debian, or has no apt, and none was given."""

    exit_code = 28


class ArchiveNotTrusted(Sm120kitError):
    """The index of a Debian archive has no signature of a key in the keyring."""

    exit_code = 29


class BadPatch(Sm120kitError):
    """A patch or a series is not well-formed: trailers, paths, encoding."""

    exit_code = 30


class PatchConflict(Sm120kitError):
    """A patch does not apply to the pinned tree."""

    exit_code = 31


class PatchAlreadyUpstream(Sm120kitError):
    """The pinned tree already contains a patch."""

    exit_code = 32


class EditMismatch(Sm120kitError):
    """A directory that ``patch edit`` did not create, or created from another recipe or an older series."""

    exit_code = 33


class PatchOverwritten(Sm120kitError):
    """A patch file would be replaced: by an import, a new name, or an export for other versions."""

    exit_code = 34


class SandboxMissing(Sm120kitError):
    """The code of a patch that is in no series cannot be run: this system offers no sandbox."""

    exit_code = 35


class PatchFails(Sm120kitError):
    """Code of a patch fails in the sandbox, or its output is malformed."""

    exit_code = 36


class NamespacesMissing(Sm120kitError):
    """The checks of an image cannot be run without a container daemon: this system does not permit namespaces."""

    exit_code = 37


class ToolchainMissing(Sm120kitError):
    """A compiler, another program or a required Python package is absent."""

    exit_code = 40


class ToolchainUnsuitable(Sm120kitError):
    """A compiler does not meet a requirement, such as an nvcc that is too old for the arch."""

    exit_code = 41


class NotEnoughMemory(Sm120kitError):
    """One unit needs more memory than this machine has available."""

    exit_code = 42


class NotEnoughDisk(Sm120kitError):
    """A file system is too small or full."""

    exit_code = 43


class StateUnwritable(Sm120kitError):
    """The state directory cannot be written."""

    exit_code = 44


class NoGpu(Sm120kitError):
    """A GPU is required and CUDA programs detect none."""

    exit_code = 45


class WrongGpu(Sm120kitError):
    """The GPU does not meet a requirement."""

    exit_code = 46


class BadKey(Sm120kitError):
    """A file is not a key, or not of a kind that can sign or be trusted."""

    exit_code = 47


class StateUnsafe(Sm120kitError):
    """The state directory belongs to another user, or others can write it, and files in it are run and delivered."""

    exit_code = 48


class ArtifactChanged(Sm120kitError):
    """A finished result in the state directory differs from its record."""

    exit_code = 49


class CommandFailed(Sm120kitError):
    """Another program failed; the message names its log."""

    exit_code = 50


class CompileFailed(Sm120kitError):
    """The compiler rejected a unit; the message has the first error and names the log."""

    exit_code = 51


class ExpectationFailed(Sm120kitError):
    """A build finished but does not match the recipe, such as a kernel that was silently not built."""

    exit_code = 52


class BadArtifact(Sm120kitError):
    """A file given to ``inspect`` is not a wheel, ELF, fatbin or cubin, or is damaged."""

    exit_code = 53


class ControlMissed(Sm120kitError):
    """A seeded fault was not detected: the verification proves nothing."""

    exit_code = 54


class BadPtx(Sm120kitError):
    """A file is no PTX for SM12x, or has an instruction that has no replacement on Hopper."""

    exit_code = 55


class DaemonUnreachable(Sm120kitError):
    """The container daemon does not respond, or stopped responding."""

    exit_code = 60


class NoSuchImage(Sm120kitError):
    """An image that neither the daemon nor its registry has, or a base that is not named by digest."""

    exit_code = 61


class ImageBuildFailed(Sm120kitError):
    """A step of a Dockerfile failed."""

    exit_code = 62


class NotVerified(Sm120kitError):
    """An image did not pass its checks, or is not the image that did."""

    exit_code = 63


class TagTaken(Sm120kitError):
    """A registry or the daemon has another image with the tag. Tags are never moved."""

    exit_code = 64


class RegistryFailed(Sm120kitError):
    """A registry does not respond, or rejects a request."""

    exit_code = 65


class BadIndex(Sm120kitError):
    """An ``images.json`` cannot be read, or does not list the image."""

    exit_code = 66


class NoModel(Sm120kitError):
    """A model directory does not exist, cannot be read, or has a model of another architecture."""

    exit_code = 67


class NotACheckpoint(Sm120kitError):
    """A directory without ``config.json`` or safetensors files, or with an invalid one."""

    exit_code = 68


class ShardMissing(Sm120kitError):
    """A checkpoint lacks a file or tensor that its index lists."""

    exit_code = 69


class ShardDamaged(Sm120kitError):
    """A safetensors file is truncated or has no header."""

    exit_code = 71


class MtpMissing(Sm120kitError):
    """A configuration uses MTP tensors that the checkpoint does not have."""

    exit_code = 72


class TooFewGpus(Sm120kitError):
    """A configuration requires more GPUs, or others."""

    exit_code = 73


class DoesNotFit(Sm120kitError):
    """Weights and KV cache do not fit into the GPUs' memory."""

    exit_code = 74


class WrongImage(Sm120kitError):
    """A verified image of another engine, or with a version that is known to be bad for the configuration."""

    exit_code = 75


class ServerDied(Sm120kitError):
    """A launched server exited by itself."""

    exit_code = 76


class NotHealthy(Sm120kitError):
    """A launched server did not become healthy in time."""

    exit_code = 77


class PortTaken(Sm120kitError):
    """A server that is to be launched cannot listen: its port is in use, or the host does not have its address."""

    exit_code = 78


class NotAttested(Sm120kitError):
    """An image has no signed statement, or the statement is not trusted, was changed, or is about another image."""

    exit_code = 79


class HostUnreadable(Sm120kitError):
    """A host's facts cannot be read: no /proc or /sys, or no such recorded host."""

    exit_code = 80


class LogUnreadable(Sm120kitError):
    """A log given to ``explain`` cannot be read."""

    exit_code = 81


class CannotMeasure(Sm120kitError):
    """A measurement lacks a requirement: GPUs, torch or NCCL, or a server that returns log-probabilities."""

    exit_code = 82


class GpusTaken(Sm120kitError):
    """A server that was launched before still uses GPUs that are required."""

    exit_code = 83


class RolledBack(Sm120kitError):
    """An index lists an image that is older than one that was pulled before, or than the requested one."""

    exit_code = 85


class BadUrl(Sm120kitError):
    """A URL that is malformed, or has credentials that cannot be sent together."""

    exit_code = 84


class ServerUnreachable(Sm120kitError):
    """No OpenAI-compatible server responds at the URL."""

    exit_code = 90


class WrongModel(Sm120kitError):
    """The server does not offer the model that is to be measured."""

    exit_code = 91


class BadResult(Sm120kitError):
    """A result cannot be read, or has a format that this version does not support."""

    exit_code = 92


class NothingMeasured(Sm120kitError):
    """Every request of a run failed."""

    exit_code = 93


class NotComparable(Sm120kitError):
    """Two results differ in a fact of their environment on which a figure depends."""

    exit_code = 94


class BelowPublished(Sm120kitError):
    """A comparable figure is below the published one."""

    exit_code = 95


class NotAsPublished(Sm120kitError):
    """No published figure can be compared with the measurement."""

    exit_code = 96


class SystemRefused(Sm120kitError):
    """The operating system refused access to a file, a directory or a connection."""

    exit_code = 97


class Unreadable(Sm120kitError):
    """Text that is not UTF-8 or not in the terminal's encoding, or input that is nested too deeply."""

    exit_code = 98


class OutputLost(Sm120kitError):
    """Standard output is closed, or its file system is full."""

    exit_code = 99


class BadRecord(Sm120kitError, ValueError):
    """A record in the state directory, or given as a file, is damaged or of another version."""

    exit_code = 100


class DataMissing(Sm120kitError):
    """``SM120KIT_DATA`` does not name a directory with recipes and patches."""

    exit_code = 101


class NotSigned(Sm120kitError):
    """A keyless signature could not be made: no identity is available, or a service of Sigstore failed."""

    exit_code = 102


class NoSuchModel(Sm120kitError):
    """The Hub has no such model, or no such revision of it."""

    exit_code = 103


class ModelRefused(Sm120kitError):
    """The Hub refuses access to a model: it requires a token, or the token is wrong or lacks permission."""

    exit_code = 104


class NoAnswer(Sm120kitError):
    """A launched server is healthy and does not answer a request."""

    exit_code = 105


class NoSuchServer(Sm120kitError):
    """No server of this host has the name, or more than one has."""

    exit_code = 106


class NoApiKey(Sm120kitError):
    """A server is to listen where other machines reach it, without an API key."""

    exit_code = 107


class WrongNodes(Sm120kitError):
    """A configuration is for another number of machines than a server is to span."""

    exit_code = 108


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """The suffix ``; did you mean 'NAME'?`` with the most similar known name; empty if none is similar."""
    near = difflib.get_close_matches(str(word), [str(name) for name in known], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
