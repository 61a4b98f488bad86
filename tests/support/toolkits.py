"""Directories that look like CUDA toolkits, and a PATH without one."""

from __future__ import annotations

from pathlib import Path

import pytest


def toolkit(home: Path, version: str, headers: tuple[str, ...] = ()) -> Path:
    """A directory with programs that print what those of a CUDA toolkit of ``version`` print."""
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    for name in headers:
        (home / "include" / name).touch()
    nvcc = home / "bin" / "nvcc"
    major_minor = ".".join(version.split(".")[:2])
    nvcc.write_text(
        f"#!/bin/sh\ncase $1 in --version) echo 'Cuda compilation tools, release {major_minor}, V{version}';;\n"
        f"*) echo '#$ _HERE_={home}/bin' >&2;; esac\n"
    )
    nvcc.chmod(0o755)
    return home


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but a C++ compiler, and no CUDA wheels."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "c++").write_text("#!/bin/sh\necho 'c++ 12.2.0'\n")
    (tools / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return tools
