"""Records that several packages share: CUDA targets, stages, compilers, and omissions of plans."""

import json
import platform
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Arch(StrEnum):
    """CUDA targets whose code runs on SM12x GPUs."""

    SM_120A = "sm_120a"
    SM_120F = "sm_120f"
    SM_121A = "sm_121a"

    @property
    def number(self) -> str:
        """The notation of FlashInfer and torch: ``12.0f``."""
        return f"{self[3:5]}.{self[5:]}"


class Stage(StrEnum):
    """The stages of a build, in order; a build can stop after each."""

    FETCH = "fetch"
    PATCH = "patch"
    PLAN = "plan"
    PACK = "pack"


@dataclass(frozen=True)
class LeftOut:
    """An element that a plan does not contain, with the reason."""

    what: str
    reason: str


@dataclass(frozen=True)
class Toolchain:
    """The compilers of a build. ``cuda_home`` contains ``bin/nvcc`` and ``include``.

    The host compiler's code is for ``machine`` (``x86_64``, ``aarch64``). If that is another than this one, ``libraries`` is
    the directory with CUDA's libraries for it, and ``emulator`` the command that runs its programs.
    """

    cuda_home: Path
    nvcc_version: str
    host_compiler: str
    host_version: str
    machine: str = field(default_factory=platform.machine)
    libraries: Path | None = None
    emulator: tuple[str, ...] = ()


def json_text(value: object, *, sort_keys: bool = False) -> str:
    """A value as an indented JSON document: records become objects, NaN and infinities, which JSON does not have, null."""
    try:
        return json.dumps(value, indent=2, sort_keys=sort_keys, default=json_default, allow_nan=False)
    except ValueError:
        known = json.loads(json.dumps(value, default=json_default), parse_constant=lambda constant: None)
        return json.dumps(known, indent=2, sort_keys=sort_keys, allow_nan=False)


def json_default(value: object) -> Any:
    """The ``default`` function for ``json.dumps``: records become objects, other types text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}  # asdict would copy everything below
    return str(value)
