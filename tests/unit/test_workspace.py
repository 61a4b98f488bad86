"""The state directory: atomic results, records, ownership, and errors of the file system."""

from __future__ import annotations

import grp
import json
import os
import pwd
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sm120kit.core import archives, console, reporting
from sm120kit.core.atomic_writes import replacing, write_atomic, write_together
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.disk import full, require_new, require_output_directory, require_writable
from sm120kit.core.errors import BadRecord, NotFound, NotTrusted, SystemRefused
from sm120kit.core.locks import host_turn
from sm120kit.core.outside import open_found, parse_json
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.records import LeftOut
from sm120kit.core.temporary import TEMPORARY, owned_directory, publish_directory
from sm120kit.core.workspace import MARKER, Workspace


def test_publish_directory_after_success(tmp_path: Path) -> None:
    target = tmp_path / "results" / "first"
    with publish_directory(target) as directory:
        (directory / "file").write_text("x")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["first"] and (target / "file").read_text() == "x"


def test_publish_directory_after_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), publish_directory(tmp_path / "result") as directory:
        (directory / "file").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_publish_directory_removes_leftovers_of_killed_run(tmp_path: Path) -> None:
    for name in (".result.abcd", ".other.abcd", ".result.of-the-user", ".result.link"):
        (tmp_path / name).mkdir()
    for name in (".result.abcd", ".other.abcd"):
        (tmp_path / name / TEMPORARY).touch()
    (tmp_path / ".result.link" / TEMPORARY).symlink_to(tmp_path / ".other.abcd" / TEMPORARY)
    with publish_directory(tmp_path / "result"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {".other.abcd", ".result.of-the-user", ".result.link", "result"}


@pytest.mark.parametrize("entry", ["scratch/thesis/file", "cache/tiles/.work-mine/file", "locks/in-use.lock", "oci/index.json"])
def test_directory_of_somebody_else_is_no_state_directory(tmp_path: Path, entry: str) -> None:
    file = tmp_path / entry
    file.parent.mkdir(parents=True)
    file.write_text("precious")
    (tmp_path / "state").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    for root in (tmp_path, tmp_path / "link"):
        with pytest.raises(NotTrusted, match="was not made by sm120kit") as error:
            Workspace.open(root)
        assert f"touch {tmp_path / MARKER}" in error.value.hint
        with pytest.raises(NotTrusted), Workspace.at(root).maintenance():
            pass
    assert file.read_text() == "precious" and not (tmp_path / MARKER).exists()


def test_absent_directory_is_not_maintained_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=str(tmp_path / "none")), Workspace.at(tmp_path / "none").maintenance():
        pass
    assert not (tmp_path / "none").exists()


def test_marker_that_is_a_link_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "marked").touch()
    (tmp_path / MARKER).symlink_to(tmp_path / "marked")
    with pytest.raises(NotTrusted, match="was not made by sm120kit"):
        Workspace.open(tmp_path)


def test_leftovers_are_not_removed_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine" / "thesis").mkdir(parents=True)
    root = Workspace.open(tmp_path / "state").root
    (root / "scratch").symlink_to(tmp_path / "mine")
    Workspace.open(root)
    assert (tmp_path / "mine" / "thesis").is_dir()


def test_new_state_directory_is_opened_by_several_processes_at_once(tmp_path: Path) -> None:
    def use(_: int) -> None:
        with Workspace.open(tmp_path / "state").scratch() as directory:
            (directory / "file").touch()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(100)))


def test_destination_below_an_unreadable_directory_is_unwritable(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    user = os.geteuid()
    if user == 0:  # root can read every directory
        os.seteuid(65534)
    try:
        for path in (tmp_path / "closed" / "file", tmp_path / "closed" / "below" / "file"):
            for require in (
                require_writable,
                require_output_directory,
                lambda path: require_new(path, "--output", overwrite=False),
                lambda path: write_atomic(path, b""),
            ):
                with pytest.raises(SystemRefused, match="closed"):
                    require(path)
    finally:
        os.seteuid(user)


def test_write_atomic_replaces_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", b"old")
    write_atomic(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == b"new"


def test_record_round_trip(tmp_path: Path) -> None:
    write_record(tmp_path / "r.json", LeftOut("what", "problem"))
    assert read_record(LeftOut, tmp_path / "r.json") == LeftOut("what", "problem")
    write_record(tmp_path / "many.json", {"all": [LeftOut("what", "problem")], "where": tmp_path})
    assert json.loads((tmp_path / "many.json").read_text()) == {
        "all": [{"what": "what", "reason": "problem"}],
        "where": str(tmp_path),
    }
    write_record(tmp_path / "r.json", LeftOut("half a character \ud800", "\U0001f600"))
    assert read_record(LeftOut, tmp_path / "r.json") == LeftOut("half a character ?", "\U0001f600")
    assert digest_of({"b": 1, "a": (LeftOut("x", "y"),)}) == digest_of({"a": [{"what": "x", "reason": "y"}], "b": 1})


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"what": 1, "reason": "problem"}'])
def test_damaged_record_error_names_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(BadRecord, match=r"r\.json is not a LeftOut record: ") as failure:
        read_record(LeftOut, tmp_path / "r.json")
    assert "remove it" in failure.value.hint


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, b"\xff"])
def test_invalid_foreign_json(content: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(content)


def test_new_state_directory_is_private(tmp_path: Path) -> None:
    root = Workspace.open(tmp_path / "deep" / "state").root
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_state_directory_writable_by_others_is_rejected(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(NotTrusted, match=rf"{tmp_path} can be written by others \(mode {mode:04o}\)") as error:
        Workspace.open(tmp_path)
    assert error.value.hint == f"if nobody else wrote into it: chmod 700 {tmp_path}"
    tmp_path.chmod(0o700)
    assert Workspace.open(tmp_path)


def test_subdirectory_writable_by_others_is_rejected(tmp_path: Path) -> None:
    (tmp_path / MARKER).touch()
    (tmp_path / "checkouts").mkdir()
    (tmp_path / "checkouts").chmod(0o777)
    tmp_path.chmod(0o755)
    with pytest.raises(NotTrusted, match=r"checkouts can be written by others"):
        Workspace.open(tmp_path)
    tmp_path.chmod(0o700)  # others cannot enter, so modes below do not matter
    assert Workspace.open(tmp_path)


def test_group_writable_is_rejected_unless_private_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o775)
    user, gid = pwd.getpwuid(os.geteuid()).pw_name, tmp_path.stat().st_gid
    groups = {"own": (user, []), "of two": (user, ["somebody"]), "another": ("users", [])}
    for kind, (name, members) in groups.items():
        entry = grp.struct_group((name, "x", gid, members))
        monkeypatch.setattr(grp, "getgrgid", lambda gid, entry=entry: entry)
        if kind == "own":
            assert Workspace.open(tmp_path)
        else:
            with pytest.raises(NotTrusted, match=r"can be written by others \(mode 0775\)"):
                Workspace.open(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("entry", ["", "checkouts", "costs.json"])
def test_state_directory_of_another_user_is_rejected(tmp_path: Path, entry: str) -> None:
    """Such as a volume in a container that runs as root, or a directory that an attacker prepared."""
    (tmp_path / MARKER).touch()
    (tmp_path / "checkouts").mkdir()
    (tmp_path / "costs.json").touch()
    os.chown(tmp_path / entry, 12345, 12345)
    with pytest.raises(NotTrusted, match=rf"{tmp_path / entry} belongs to user 12345, not to user root \(0\)") as error:
        Workspace.open(tmp_path)
    assert "--user 12345" in error.value.hint and f"chown -R 0 {tmp_path}" in error.value.hint


def test_files_of_root_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / MARKER).touch()
    (tmp_path / "checkouts").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid)
    assert Workspace.open(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if tmp_path.stat().st_uid == 0:
        assert Workspace.open(tmp_path)
    else:
        with pytest.raises(NotTrusted, match="not to user 12345"):
            Workspace.open(tmp_path)


def test_state_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "state", Path("/proc/sm120kit")):
        with pytest.raises(SystemRefused, match="cannot write below"):
            Workspace.open(path)


OWNER = """
import sys, time
from sm120kit.core.temporary import publish_directory
from sm120kit.core.workspace import Workspace
workspace = Workspace.open()
with workspace.scratch() as scratch, publish_directory(workspace.build("engine", "digest")) as directory:
    (scratch / "file").touch()
    (directory / "file").touch()
    print("ready", flush=True)
    time.sleep(60)
"""


def test_owned_directory_of_killed_process_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120KIT_STATE", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        workspace = Workspace.open()
        with publish_directory(workspace.build("engine", "digest")):
            pass
        assert len(list(tmp_path.rglob("file"))) == 2, "its owner lives"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    Workspace.open()
    assert not list((tmp_path / "scratch").iterdir())
    (tmp_path / "build" / "engine" / "digest").rmdir()
    with publish_directory(workspace.build("engine", "digest")):
        pass
    assert not list(tmp_path.rglob("file"))


def test_concurrent_owned_directories(tmp_path: Path) -> None:
    def use(number: int) -> None:
        with owned_directory(tmp_path, ".work-") as directory:
            (directory / "file").write_text(str(number))
            assert (directory / "file").read_text() == str(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(400)))
    assert not list(tmp_path.iterdir())


def test_other_entries_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".work-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".work-file").touch()
    with owned_directory(tmp_path, ".work-"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".work-file", ".work-link", "elsewhere"]


def test_file_larger_than_the_limit_of_the_shell(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    program = (
        "import resource, sys; from pathlib import Path; from sm120kit.core.atomic_writes import write_atomic, write_together;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20));"
        "path = Path(sys.argv[1]); content = bytes(2**21);"
        "write_atomic(path, content) if sys.argv[2] == 'one' else write_together({path: content})"
    )
    for way in ("one", "together"):
        done = subprocess.run([sys.executable, "-c", program, tmp_path / "file", way], capture_output=True, text=True)
        assert "ResourceUnavailable" in done.stderr and "1.0 MiB" in done.stderr
    assert (tmp_path / "file").read_bytes() == b"before" and [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("inodes", "lacks"), [((1000, 0, 0), "inodes"), ((1000, 5, 0), "inodes"), ((1000, 9, 9), "space"), ((0, 0, 0), "space")]
)
def test_full_file_system(inodes: tuple[int, int, int], lacks: str) -> None:
    """Some, such as btrfs, have no fixed number of inodes: they state zero of all."""
    status = os.statvfs_result((4096, 4096, 10**6, 10**5, 256, *inodes, 0, 255))
    assert full(Path("file"), status).startswith(f"no {lacks} left on the file system of file")


HOLDS = """
import fcntl, os, sys, time
lock = os.open("/run", os.O_RDONLY | os.O_DIRECTORY)
fcntl.flock(lock, fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_lock_that_another_keeps_hinders_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
        with reporting.use(console), host_turn("work", patience_seconds=0.1):
            holder.kill()
    assert f"process {holder.pid} of user" in capsys.readouterr().err


def test_host_lock_excludes_others_until_it_is_released() -> None:
    order = []

    def wait() -> None:
        with host_turn("work"):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with host_turn("work"):
            waiting = pool.submit(wait)
            time.sleep(0.3)
            order.append("first")
        waiting.result()
    assert order == ["first", "second"]


@pytest.mark.parametrize(("umask", "expected"), [(0, 0o022), (0o002, 0o002), (0o027, 0o027)])
def test_first_run_creates_nothing_that_everybody_can_write(tmp_path: Path, umask: int, expected: int) -> None:
    command = [sys.executable, "-m", "sm120kit", "image", "list"]
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "XDG_STATE_HOME": str(tmp_path / "home/share/state")}
    environment.pop("SM120KIT_STATE", None)
    subprocess.run(command, env=environment, umask=umask, check=True, capture_output=True)
    created = list((tmp_path / "home").rglob("*"))
    assert (tmp_path / "home/share/state/sm120kit" / MARKER) in created
    assert {path for path in created if path.stat().st_mode & expected} == set()


def test_key_of_a_state_directory(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "state")
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: workspace.key(), range(50)))
    assert len(keys) == 1 and len(keys.pop()) == 32
    assert stat.S_IMODE((workspace.root / "key").stat().st_mode) == 0o600
    assert Workspace.open(tmp_path / "other").key() != workspace.key()


def test_write_atomic_to_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, b"content")
    assert os.read(reader, 100) == b"content" and pipe.is_fifo()
    os.close(reader)


@pytest.mark.parametrize("name", ["dev/stdout", "link/stdout", "link/../dev/stdout"])
def test_standard_output_in_a_file_is_appended_to(name: str, tmp_path: Path) -> None:
    """Whoever may write in /dev: the link there stays. The directory is another, so that a fault does not harm the machine."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/stdout").symlink_to("/proc/self/fd/1")
    (tmp_path / "link").symlink_to("dev")
    program = f"""
from pathlib import Path
from sm120kit.core import atomic_writes
atomic_writes.STREAMS = (Path("dev").resolve(), Path("/proc"))
atomic_writes.write_atomic(Path({name!r}), b"content")
with atomic_writes.replacing(Path({name!r})) as file:
    file.write(b" and more")
"""
    (tmp_path / "output").write_bytes(b"before; ")
    with (tmp_path / "output").open("ab") as output:
        subprocess.run([sys.executable, "-c", program], stdout=output, check=True, cwd=tmp_path)
    assert (tmp_path / "output").read_bytes() == b"before; content and more"
    assert (tmp_path / "dev/stdout").is_symlink()


def test_what_replaces_a_file_is_written_to_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "image.tar"
    os.mkfifo(pipe)
    with pytest.raises(SystemRefused, match="cannot write"), replacing(pipe):
        pass
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with replacing(pipe) as file:
        file.write(b"content")
    assert os.read(reader, 100) == b"content" and pipe.is_fifo() and [*tmp_path.iterdir()] == [pipe]
    os.close(reader)


@pytest.mark.parametrize("write", [write_atomic, lambda path, content: write_together({path: content})])
def test_write_to_a_pipe_that_nobody_reads_is_refused(tmp_path: Path, write: Callable[[Path, bytes], None]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SystemRefused, match="cannot write"):
        write(tmp_path / "pipe", b"content")
    assert [path.is_fifo() for path in tmp_path.iterdir()] == [True]


@pytest.mark.parametrize("read", [open_found, file_sha256, lambda path: archives.open_wheel(path).__enter__()])
def test_pipes_and_devices_in_place_of_found_files_are_refused(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for path in tmp_path.iterdir():
        with pytest.raises(OSError, match="not a regular file"):
            read(path)


def test_memory_for_a_small_input_does_not_depend_on_the_limit(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"content")
    program = (
        "import resource, sys; from pathlib import Path; from sm120kit.core.outside import read_input;"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); print(read_input(Path(sys.argv[1])).decode())"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "small"], capture_output=True, text=True, check=True)
    assert done.stdout == "content\n"
