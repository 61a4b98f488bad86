"""Shell completion, installed and run in a real Bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs Bash")

SCRIPT = """
set -e
sm120kit --install-completion
source ~/.bashrc
complete -p sm120kit >/dev/null
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_sm120kit_completion sm120kit
echo "completions: ${COMPREPLY[*]}"
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("sm120kit", "b"), {"build", "bench"}),
        (("sm120kit", "patch", "p"), {"prove"}),
        (("sm120kit", "build", "--of"), {"--offline"}),
        (("sm120kit", "build", "--j"), {"--jobs", "--json"}),
        (("sm120kit", "build", "flashinfer-0.7.2"), {"flashinfer-0.7.2", "flashinfer-0.7.2.post1"}),
        (("sm120kit", "config", "show", "kimi"), {"kimi-k2.5-8x-rtx-pro-6000"}),
        (("sm120kit", "patch", "drop", "vllm/no-cu"), {"vllm/no-cutlass-int8-on-sm12x"}),
        (("sm120kit", "build", "--output", ""), set()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bash_completes(words: tuple[str, ...], expected: set[str], tmp_path: Path) -> None:
    """Run with an empty home directory. The configuration file is invalid: completion does not read it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sm120kit").write_text(f"#!{sys.executable}\nfrom sm120kit.cli import main\nmain()\n")
    (programs / "sm120kit").chmod(0o755)
    (tmp_path / "broken.toml").write_text("=")
    env = os.environ | {
        "HOME": str(tmp_path),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SM120KIT_CONFIG": str(tmp_path / "broken.toml"),
    }
    done = subprocess.run(["bash", "--norc", "-c", SCRIPT, "bash", *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("completions:"))
    assert set(line.split()[1:]) == expected
