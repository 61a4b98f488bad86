"""A patched FlashInfer wheel that carries compiled modules where FlashInfer looks for them first."""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from sm120kit import process
from sm120kit.errors import ExpectationFailed
from sm120kit.records import BuildPlan

EPOCH = "315532800"
"""1980-01-01, the first moment a zip member can have: wheels must not depend on when they are packed."""


def local_version(plan: BuildPlan) -> str:
    """``0.6.6+sm120kit.<first 12 digits of the plan digest>``; a requirement ``==0.6.6`` accepts it (PEP 440)."""
    return f"{plan.version}+sm120kit.{plan.digest[:12]}"


def wheel(plan: BuildPlan, tree: Path, libraries: Mapping[str, Path], out: Path, scratch: Path, record: bytes) -> Path:
    """Build the wheel with FlashInfer's own backend from a copy of ``tree``, then add ``libraries`` and the plan's record.

    The backend copies ``csrc`` and ``include`` itself but knows nothing of compiled modules, hence the second step.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    source = scratch / "source"
    made_by_generators = str(tree / "flashinfer")
    shutil.copytree(
        tree,
        source,
        symlinks=True,
        ignore=lambda folder, names: {"data", "__pycache__"} & {*names} if folder == made_by_generators else (),
    )
    meta = source / "flashinfer" / "_build_meta.py"
    text, count = re.subn(r"^__version__ = .*$", f'__version__ = "{local_version(plan)}"', meta.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise ExpectationFailed(
            f"{meta.name} of {plan.recipe} has {count} lines that set __version__, not 1",
            "this release needs another way to set its version",
        )
    meta.write_text(text)
    env = {"SOURCE_DATE_EPOCH": EPOCH, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    plain = scratch / "plain"
    process.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check", "--outdir", plain, source],
        env=env,
        logfile=scratch / "pack.log",
        tied=True,
    )
    (built,) = plain.glob("*.whl")
    unpacked = scratch / "unpacked"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(unpacked)
    for name, library in libraries.items():
        place = unpacked / "flashinfer" / "data" / "aot" / name
        place.mkdir(parents=True)
        shutil.copyfile(library, place / f"{name}.so")
        (place / f"{name}.so").chmod(0o755)
    (info,) = unpacked.glob("*.dist-info")
    (info / "sm120kit.json").write_bytes(record)
    header = info / "WHEEL"
    platform = "linux_x86_64"
    header.write_text(
        re.sub(r"^Tag: .*$", f"Tag: py3-none-{platform}", header.read_text(), flags=re.MULTILINE).replace(
            "Root-Is-Purelib: true", "Root-Is-Purelib: false"
        )
    )
    process.run(
        [sys.executable, "-m", "wheel", "pack", "--dest-dir", out, unpacked], env=env, logfile=scratch / "pack.log", tied=True
    )
    (packed,) = out.glob("*.whl")
    shutil.rmtree(scratch)
    return packed
