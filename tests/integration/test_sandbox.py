"""Code of foreign patches in a sandbox: what it attempts is refused, and succeeds without a sandbox."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from test_bad_input import Site

from sm120kit.core import process, sandbox, toolchain
from sm120kit.core.errors import RequirementMissing
from sm120kit.core.records import Toolchain
from sm120kit.core.sandbox import Sandbox
from sm120kit.kernels.tiles import introspect

SECRET = "hunter2"

ATTACKS = {
    "read a file in the home directory": "open(V['secret']).read()",
    "write outside its own /tmp": "open(V['mark'], 'w').write('x')",
    "connect to a server of this machine": "import socket; socket.create_connection(('127.0.0.1', V['port'])).close()",
    "write to the tree": "open(globals().get('__file__', V['tree']), 'a').write('#')",
    "read variables": """
import os
texts = [repr(dict(os.environ))]
for number in filter(str.isdigit, os.listdir("/proc")):
    try:
        texts.append(open(f"/proc/{number}/environ").read())
    except OSError:
        pass
if not any(V["value"] in text for text in texts):
    raise SystemExit("no such variable")
""",
    "change settings of the kernel": "open('/proc/sys/kernel/core_pattern', 'a').close()",
}
"""Python code by name. It ends with an error if it is refused."""

REFUSED = {
    "read a file in the home directory": "No such file or directory",
    "write outside its own /tmp": "No such file or directory",
    "connect to a server of this machine": "Connection refused|Network is unreachable",
    "write to the tree": "Read-only file system",
    "read variables": "no such variable",
    "change settings of the kernel": "Read-only file system|Permission denied",
}
SETTINGS = "change settings of the kernel"
"""Without a sandbox, an attack that only root can make."""

LEAVE_A_PROCESS = "import subprocess; subprocess.Popen(['sleep', V['sleep']], start_new_session=True, stdout=-3, stderr=-3)"
SUCCEEDED = "\nraise SystemExit('the attack succeeded')\n"


@dataclass(frozen=True)
class Victim:
    """What attacks aim at, as the variable ``V`` of their code."""

    secret: str
    mark: str
    tree: str
    port: int
    value: str
    sleep: str

    def code(self, attack: str) -> str:
        return f"V = {asdict(self)!r}\n{attack}{SUCCEEDED}"

    def left(self) -> list[int]:
        """The processes of :data:`LEAVE_A_PROCESS` that run."""
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if file.read_bytes() == f"sleep\0{self.sleep}\0".encode():
                    found.append(int(file.parent.name))
        return found

    def require_end(self) -> None:
        """Wait until no process is left: the kernel ends the processes of a namespace after its first one."""
        deadline = time.monotonic() + 60
        while self.left():
            assert time.monotonic() < deadline, "a process is left"
            time.sleep(0.05)


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Victim]:
    home, tree = tmp_path / "home", tmp_path / "tree"
    home.mkdir()
    tree.mkdir()
    (tree / "file.py").touch()
    (home / "secret.h").write_text(f"{SECRET}\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PLANTED", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        left = f"86400.{os.getpid()}{port}"
        victim = Victim(str(home / "secret.h"), str(home / "mark"), str(tree / "file.py"), port, SECRET, left)
        yield victim
    for pid in victim.left():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    return toolchain.find()


@pytest.fixture(params=["bwrap", "unshare"])
def confined(request: pytest.FixtureRequest, tools: Toolchain) -> Sandbox:
    box = Sandbox(request.param)
    argv, _ = sandbox.wrap(["true"], box)
    done = subprocess.run(["sh", "-c", 'exec "$@"', "sh", *map(str, argv)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{request.param} does not work here: {done.stderr.strip()}")
    return box.containing(tools)


@pytest.fixture
def any_sandbox() -> None:
    try:
        sandbox.find()
    except RequirementMissing as error:
        pytest.skip(error.message)


def run(code: str, box: Sandbox | None, victim: Victim) -> process.Completed:
    argv, env = sandbox.wrap([sys.executable, "-c", code], box, read=[Path(victim.tree).parent])
    return process.run(argv, env=env, check=False)


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_refused_in_a_sandbox(name: str, confined: Sandbox, victim: Victim) -> None:
    done = run(victim.code(ATTACKS[name]), confined, victim)
    assert done.returncode == 1
    assert "the attack succeeded" not in done.stderr
    assert re.search(REFUSED[name], done.stderr), done.stderr
    assert not Path(victim.mark).exists()
    assert Path(victim.tree).read_text() == ""


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != SETTINGS or os.geteuid() == 0])
def test_attack_succeeds_without_a_sandbox(name: str, victim: Victim) -> None:
    assert "the attack succeeded" in run(victim.code(ATTACKS[name]), None, victim).stderr


def test_process_does_not_outlive_its_sandbox(confined: Sandbox, victim: Victim) -> None:
    assert "the attack succeeded" in run(victim.code(LEAVE_A_PROCESS), confined, victim).stderr
    victim.require_end()


def test_process_outlives_a_program_without_a_sandbox(victim: Victim) -> None:
    assert "the attack succeeded" in run(victim.code(LEAVE_A_PROCESS), None, victim).stderr
    assert len(victim.left()) == 1


def test_sandbox_ends_with_a_killed_parent(confined: Sandbox, victim: Victim) -> None:
    """The sandbox prints a line when its program runs; its end closes the pipe."""
    argv, _ = sandbox.wrap(["sh", "-c", f"echo runs; sleep {victim.sleep}"], confined)
    start = "import subprocess, sys; subprocess.run(sys.argv[1:], start_new_session=True)"
    parent = subprocess.Popen([sys.executable, "-c", start, *map(str, argv)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"runs\n"
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == b""
    victim.require_end()


def test_program_writes_to_its_own_tmp_and_to_named_directories(confined: Sandbox, tmp_path: Path) -> None:
    named = tmp_path / "a directory"
    named.mkdir()
    program = ["sh", "-c", 'echo 1 > /tmp/file; echo 2 > "$1/file"; cat /tmp/file; echo "$HOME $TMPDIR"', "sh", named]
    argv, env = sandbox.wrap(program, confined, write=[named])
    assert process.run(argv, env=env).stdout == "1\n/tmp /tmp\n"
    assert (named / "file").read_text() == "2\n"
    assert not Path("/tmp/file").exists()


def test_exit_code_output_and_working_directory_are_those_of_the_program(confined: Sandbox, tmp_path: Path) -> None:
    argv, env = sandbox.wrap(["sh", "-c", "pwd; cat; echo err >&2; exit 7"], confined, read=[tmp_path])
    done = process.run(argv, env=env, cwd=tmp_path, stdin=b"in\n", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{tmp_path}\nin\n", "err\n")


def test_compiler_does_not_print_the_users_files(confined: Sandbox, tools: Toolchain, victim: Victim) -> None:
    tree = Path(victim.tree).parent
    (tree / "unit.cpp").write_text(f'#include "{victim.secret}"\n')

    def messages(box: Sandbox | None) -> str:
        return (
            introspect.HostCompiler(tools.host_compiler, (), tree, sandbox=box).run("-fsyntax-only", tree / "unit.cpp").stderr
        )

    assert SECRET in messages(None)
    assert SECRET not in messages(confined)
    assert "No such file or directory" in messages(confined)


GENERATOR = '''\
import os


def generate_gemm_operations(output, architectures):
    os.makedirs(output + "/gemm_grouped/120")
    with open(output + "/gemm_grouped/120/a.cu", "w") as file:
        file.write("""#include "launcher.inl"
INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm120, SafeFP4, SafeFP4, half,
        void, EpilogueOpDefault, NONE, 128, 128, 128, 1, 1, 1, false, false, false, false);
""")
'''
PLACE = "flashinfer/jit/gemm/cutlass/generate_kernels.py"
FILES = {
    "3rdparty/cutlass/include/cutlass/version.h": "".join(
        f"#define CUTLASS_{name} {number}\n" for name, number in (("MAJOR", 4), ("MINOR", 2), ("PATCH", 1))
    ),
    "csrc/fp4.cu": "INSTANTIATE_FP4_GEMM_KERNEL_LAUNCHER(__nv_bfloat16, 128, 128, 128, 1, 1, 1, _1SM)",
    "flashinfer/jit/fused_moe.py": """\
from . import env
from .core import gen_jit_spec
from .gemm.cutlass.generate_kernels import generate_gemm_operations
def gen_cutlass_fused_moe_sm120_module():
    generate_gemm_operations(f"{env.FLASHINFER_GEN_SRC_DIR}/120", "120;120-real")
    return gen_jit_spec("fused_moe_120", [], extra_cuda_cflags=["-DENABLE_FP4"])
""",
    "flashinfer/jit/gemm/core.py": """\
from .. import env
from ..core import gen_jit_spec
def gen_gemm_sm120_module_cutlass_fp4():
    text = (env.FLASHINFER_CSRC_DIR / "fp4.cu").read_text()
    (env.FLASHINFER_GEN_SRC_DIR / "fp4_128.cu").write_text(text)
    return gen_jit_spec("fp4", [], extra_cuda_cflags=["-DENABLE_FP4"])
def gen_gemm_sm120_module():
    return gen_jit_spec("gemm_sm120", [], extra_cuda_cflags=["-DENABLE_FP4"])
""",
    PLACE: GENERATOR,
}


class Engine(Site):
    """A small FlashInfer whose kernel generator works, and patches that change it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.pack(FILES)
        self.pin(hashlib.sha256(self.sdist.read_bytes()).hexdigest())
        inside = '[sources.cutlass]\ninside = "flashinfer"\npath = "3rdparty/cutlass"\nversion = "4.2.1"\n'
        self.recipe.write_text(self.recipe.read_text().replace("[modules.m]", f"{inside}[modules.m]"))
        self.foreign = root / "foreign.patch"

    def prove(self, code: str, *options: str, **settings: object) -> subprocess.CompletedProcess[str]:
        """Prove a patch that adds code to the end of the generator."""
        old, new = GENERATOR.splitlines(keepends=True), (GENERATOR + code).splitlines(keepends=True)
        diff = difflib.unified_diff(old, new, f"a/{PLACE}", f"b/{PLACE}")
        self.foreign.write_text(f"diff --git a/{PLACE} b/{PLACE}\n{''.join(diff)}")
        words = (
            "patch",
            "prove",
            str(self.foreign),
            "--recipe",
            "flashinfer-1.0",
            "--probe",
            "collective grouped nvfp4 generated",
            "--mirror",
            str(self.mirror),
        )
        return self.run(*words, *options, **settings)  # type: ignore[arg-type]


@pytest.fixture
def engine(tmp_path: Path, tools: Toolchain) -> Engine:
    return Engine(tmp_path)


ALL = f"""
import json
results = {{}}
for name, attack in {ATTACKS!r}.items():
    try:
        exec(attack)
        results[name] = "the attack succeeded"
    except (Exception, SystemExit) as error:
        results[name] = str(error)
{LEAVE_A_PROCESS}
raise SystemExit(json.dumps(results))
"""


def test_foreign_patch_is_proven_in_a_sandbox(any_sandbox: None, engine: Engine, victim: Victim) -> None:
    def results(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
        (line,) = (line for line in done.stderr.splitlines() if line.startswith("{"))
        return json.loads(line)

    done = engine.prove(victim.code(ALL))
    assert done.returncode == 30, done.stderr
    assert "the code of flashinfer/foreign fails in the sandbox" in done.stderr
    refused = results(done)
    assert [name for name in ATTACKS if not re.search(REFUSED[name], refused[name])] == [], refused
    assert not Path(victim.mark).exists()
    victim.require_end()
    trusted = results(engine.prove(victim.code(ALL), "--trust-patch"))
    succeeded = {name for name, result in trusted.items() if result == "the attack succeeded"}
    assert succeeded >= {name for name in ATTACKS if name != SETTINGS}, "without a sandbox, the same code succeeds"
    assert len(victim.left()) == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def generate_gemm_operations(output, architectures):\n    os.write(1, b'[]')\n    os._exit(0)\n", "malformed"),
        ("def generate_gemm_operations(output, architectures):\n    os._exit(0)\n", "malformed"),
        ("os.kill(os.getpid(), 9)\n", "exit code 137"),
    ],
)
def test_malformed_output_is_an_error_of_the_patch(any_sandbox: None, engine: Engine, code: str, message: str) -> None:
    done = engine.prove(code)
    assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (30, True, False), done.stderr


def test_without_a_sandbox_a_foreign_patch_must_be_trusted(engine: Engine, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "empty").mkdir()
    code = f"open({str(mark)!r}, 'w')\nraise SystemExit('it ran')\n"
    done = engine.prove(code, env={"PATH": str(tmp_path / "empty")})
    assert done.returncode == 40, done.stderr
    for part in ("no sandbox", "program not found: bwrap", "install bubblewrap", "--trust-patch"):
        assert part in done.stderr
    assert not mark.exists()
    assert not (engine.state / "checkouts").exists(), "reported before a source is fetched"
    assert "it ran" in engine.prove(code, "--trust-patch").stderr
    assert mark.exists()


def test_system_without_user_namespaces_is_named(engine: Engine) -> None:
    """A user namespace in which no further one can be created, without capabilities."""
    setup = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    prefix = ("unshare", "--user", "--map-root-user", "sh", "-euc", setup, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("this system has no user namespaces, or no util-linux")
    done = engine.prove("", prefix=prefix)
    assert done.returncode == 40, done.stderr
    for part in ("unshare: ", "sysctl user.max_user_namespaces", "--trust-patch"):
        assert part in done.stderr


def test_wrap_without_a_sandbox_changes_nothing() -> None:
    assert sandbox.wrap(["a", "b"], None, env={"C": "d"}) == (["a", "b"], {"C": "d"})
