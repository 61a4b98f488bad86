"""The compiled programs of a verification as a directory: compiled on one machine, without a GPU, and run on another.

The directory has the executables and a record of what they were compiled from and by, so that a receipt names their compilers.
The other machine needs neither the engine's sources nor a compiler for them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sm12x_lab.gpu_tests.faults import SeededFault
from sm12x_lab.gpu_tests.programs import EngineTree, Program, sources_digest
from sm12x_lab.gpu_tests.verified_kernels import Matrix, VerificationScope
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadRecord, CompileFailed
from sm120kit.core.records import Toolchain

FORMAT = 2
RECORD = "programs.json"
COMPILE_AGAIN = "compile them again: sm120kit verify kernels RECIPE --compile-only --programs DIR"


@dataclass(frozen=True)
class CompiledVerification:
    """The record of a directory: kernels, seeded faults and programs of a verification, and the compilers of the programs.

    ``inputs`` is the digest of what determines ``tree``, so that a machine without the sources can compare it. ``captured``:
    the programs have no code for the kernels of the build. ``digests`` are the sha256 of the executables by program name,
    ``failed`` message and hint of those that do not compile.
    """

    format: int
    engine: str
    sources: str
    scope: VerificationScope
    captured: bool
    arch: str
    toolchain: Toolchain
    inputs: str
    tree: EngineTree
    matrix: Matrix
    seeded: tuple[SeededFault, ...]
    digests: dict[str, str]
    failed: dict[str, tuple[str, str]]
    compile_seconds: float


class CompiledPrograms:
    """The programs in a directory that :func:`save` wrote."""

    def __init__(self, directory: Path, record: CompiledVerification) -> None:
        self.directory, self.record = directory, record
        self.arch, self.toolchain = record.arch, record.toolchain

    @contextmanager
    def compile_all(self, programs: Sequence[Program]) -> Iterator[Iterator[tuple[Program, Path | CompileFailed]]]:
        """Yield each program with its executable, or with its compile error.

        Raises:
            BadRecord: an executable is missing or is another file than the one that was compiled.
        """

        def given() -> Iterator[tuple[Program, Path | CompileFailed]]:
            for program in programs:
                failed = self.record.failed.get(program.name)
                yield program, CompileFailed(*failed) if failed else self._executable(program.name)

        yield given()

    def seconds(self, programs: Sequence[Program]) -> float:
        """The sum of the times of the compilers."""
        return self.record.compile_seconds

    def _executable(self, name: str) -> Path:
        path = self.directory / name
        if not path.is_file() or file_sha256(path) != self.record.digests.get(name):
            raise BadRecord(f"{path} is not the program that was compiled", COMPILE_AGAIN)
        if not os.access(path, os.X_OK):
            raise BadRecord(f"{path} is not executable", f"copy the programs with their modes, or: chmod +x {path}")
        return path


def save(directory: Path, record: CompiledVerification, built: Mapping[Program, Path | CompileFailed]) -> None:
    """Copy executables to a directory, and write ``record`` with their digests and errors beside them."""
    from dataclasses import replace

    from pydantic import TypeAdapter

    directory.mkdir(parents=True, exist_ok=True)
    executables = {program.name: path for program, path in built.items() if isinstance(path, Path)}
    for name, path in executables.items():
        (directory / name).unlink(missing_ok=True)
        shutil.copy2(path, directory / name)
    complete = replace(
        record,
        digests={name: file_sha256(directory / name) for name in executables},
        failed={
            program.name: (error.message, error.hint) for program, error in built.items() if isinstance(error, CompileFailed)
        },
    )
    write_atomic(directory / RECORD, TypeAdapter(CompiledVerification).dump_json(complete, indent=1))


def load(directory: Path, engine: str, inputs: str, scope: VerificationScope, arch: str, *, captured: bool) -> CompiledPrograms:
    """The programs in a directory, if they are those of this verification of a tree from ``inputs`` for the target ``arch``.

    Raises:
        BadRecord: there is no record, it is of other programs or of another verification, or it is damaged.
    """
    from pydantic import TypeAdapter, ValidationError

    directory = directory.resolve()
    try:
        record = TypeAdapter(CompiledVerification).validate_json((directory / RECORD).read_bytes())
    except OSError as error:
        raise BadRecord(f"{directory} has no record of compiled programs: {error.strerror}", COMPILE_AGAIN) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadRecord(
            f"{directory / RECORD} is damaged: {where + ': ' if where else ''}{first['msg']}", COMPILE_AGAIN
        ) from error
    differ = {
        f"format {record.format}": record.format != FORMAT,
        f"recipe {record.engine}": record.engine != engine,
        "other programs than this version of sm120kit has": record.sources != sources_digest(),
        "another version of the source, or other patches, than the recipe's": record.inputs != inputs,
        f"target {record.arch}, and this GPU's is {arch}": record.arch != arch,
        "--device, --only and --quick": record.scope != scope,
        "--ptx": record.captured != captured,
    }
    if reasons := [reason for reason, applies in differ.items() if applies]:
        raise BadRecord(f"{directory} was compiled for another verification: {', '.join(reasons)}", COMPILE_AGAIN)
    return CompiledPrograms(directory, record)
