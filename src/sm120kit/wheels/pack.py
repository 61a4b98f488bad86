"""Pack a patched FlashInfer wheel with compiled modules in the directory that FlashInfer searches first."""

from __future__ import annotations

import platform
import re
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from sm120kit.core import process
from sm120kit.core.archives import SOURCE_DATE_EPOCH
from sm120kit.core.errors import ExpectationFailed
from sm120kit.wheels.records import BuildPlan


def local_version(plan: BuildPlan) -> str:
    """``0.6.6+sm120kit.<first 12 digits of the plan digest>``; a requirement ``==0.6.6`` accepts it (PEP 440)."""
    return f"{plan.version}+sm120kit.{plan.digest[:12]}"


def pack_wheel(plan: BuildPlan, tree: Path, libraries: Mapping[str, Path], out: Path, scratch: Path, record: bytes) -> Path:
    """Build the wheel with FlashInfer's own backend from a copy of ``tree``, then add ``libraries`` and ``record``.

    The backend copies ``csrc`` and ``include``, but cannot add compiled modules: hence the second step. ``libraries`` are by
    module name; ``record`` is the text of ``sm120kit.json``. Returns the wheel in ``out``; ``scratch`` is removed.

    Raises:
        ExpectationFailed: the version of the package cannot be set.
        CommandFailed: the backend failed.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    source = scratch / "source"
    generated = str(tree / "flashinfer")
    shutil.copytree(
        tree,
        source,
        symlinks=True,
        ignore=lambda folder, names: {"data", "__pycache__"} & {*names} if folder == generated else (),
    )
    meta = source / "flashinfer" / "_build_meta.py"
    text, count = re.subn(r"^__version__ = .*$", f'__version__ = "{local_version(plan)}"', meta.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise ExpectationFailed(
            f"{meta.name} of {plan.recipe} has {count} lines that set __version__, not 1",
            "this release needs another way to set its version",
        )
    meta.write_text(text)
    env = {"SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
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
        directory = unpacked / "flashinfer" / "data" / "aot" / name
        directory.mkdir(parents=True)
        shutil.copyfile(library, directory / f"{name}.so")
        (directory / f"{name}.so").chmod(0o755)
    (info,) = unpacked.glob("*.dist-info")
    (info / "sm120kit.json").write_bytes(record)
    if libraries:  # otherwise it stays a wheel for any machine
        header = info / "WHEEL"
        tag = f"Tag: py3-none-linux_{platform.machine()}"
        text = re.sub(r"^Tag: .*$", tag, header.read_text(), flags=re.MULTILINE)
        header.write_text(text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false"))
    process.run(
        [sys.executable, "-m", "wheel", "pack", "--dest-dir", out, unpacked], env=env, logfile=scratch / "pack.log", tied=True
    )
    (packed,) = out.glob("*.whl")
    shutil.rmtree(scratch)
    return packed
