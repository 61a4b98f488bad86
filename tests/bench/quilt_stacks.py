"""Series of Debian source packages: ``python tests/bench/quilt_stacks.py DIRECTORY [PACKAGE...] [--jobs N]``.

Each package is a quilt series, which ``dpkg-source`` applies with GNU patch without fuzz. The tree before and after each of its
patches is stored in git. A patch becomes a patch file with its own hunks and message; if these are refused, with the diff of
the two trees, as if the change were imported as a commit. sm120kit parses the file and applies it to the tree before. Patches
that are accepted in a row, at best the whole series, are then applied as a series, exported, and applied again.

Prints a table, and exits with status 1 if

- a tree differs from the one that GNU patch made, or the last one from ``dpkg-source -x``;
- the hunks or the numbers of lines differ from those of git (``git apply --numstat``, blobs);
- an export rewrites a patch file, or applying the exported patches gives other commit ids;
- a call raises an exception that is no error of sm120kit, or writes outside its repository and its series.

Needs apt, dpkg-dev, GNU patch and the machine's package sources, which a private configuration below DIRECTORY uses as sources
of source packages. Downloads are kept in ``DIRECTORY/downloads``.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import groupby
from pathlib import Path

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchedFile, PatchSet

from sm120kit import patches
from sm120kit.core.errors import Sm120kitError
from sm120kit.patches.diff import Hunk
from sm120kit.patches.drift import steps
from sm120kit.patches.export import diff, export, write_back
from sm120kit.patches.format import Patch, parse, render
from sm120kit.patches.records import PatchState, projects_in_tree
from sm120kit.sources.git import Repository
from sm120kit.sources.records import Checkout, GitPin

PACKAGES = """\
acl ant apache2 arj attr audiofile bash bzip2 cdparanoia cowsay cpio cron cups curl cyrus-sasl2 dante dnsmasq e2fsprogs exim4
fontconfig freeimage freetype gawk giflib glew glib2.0 gnupg2 gnutls28 groff id3lib3.8.3 inetutils iproute2 iptables irrlicht
jbigkit jq junit4 krb5 less libgcrypt20 libgd2 libpng1.6 libtool libxml2 libxslt lua5.1 lua5.3 nano ncompress net-tools
netpbm-free nettle openjpeg2 openldap openssh p7zip pam popt ppp procmail rsync screen sed sendmail shadow splint strace
subversion sudo tar tcl8.6 tiff tinyxml tmux unixodbc unzip util-linux wget xterm zsh
""".split()  # noqa: SIM905 - a list of words
"""Source packages of Debian 12 with format ``3.0 (quilt)`` and patches."""

PATCH = "patch -t -F 0 -N -p1 -u -V never -E --no-backup-if-mismatch --reject-file=-".split()  # noqa: SIM905 - reads as on a command line
"""GNU patch as ``dpkg-source`` calls it (Dpkg::Source::Quilt), without its backups."""

PIN = GitPin("debian", "file:///nowhere", "0" * 40, "1")
AUTHOR, DATE = "A Maintainer <maintainer@localhost>", datetime(2026, 1, 1, tzinfo=UTC)
TRAILERS = """\
Applies-To: debian ==1
Upstream-Status: Pending
Origin: a Debian source package
Matters-For: a benchmark
No-Effect-For: builds
Evidence: none
Drop-When: never"""
REASONS = {
    "renamed or copied": "rename",
    "binary file|NUL in a hunk": "binary file",
    "not a plain file|is a link": "symbolic link",
    "changed twice": "two sections for a file",
    "line numbers that contradict": "contradictory line numbers",
    "overlaps the hunk": "overlapping hunks",
    "ends early or has other lines": "malformed hunk",
    "changes nothing": "a hunk without a change",
    "leaves the project|not in its shortest form": "path not in its shortest form",
    "is ambiguous": "ambiguous hunk",
    "already upstream": "reversed patch applies too",
    "does not fit|patch does not apply": "context differs",
    "From is": "no author with name and address",
    "no Subject": "no subject",
}
"""Parts of sm120kit's messages, and how they are counted."""


@dataclass(frozen=True)
class Change:
    """Modes and blob ids of a file in the trees before and after a patch; zeros without the file."""

    old_mode: str
    new_mode: str
    old: str
    new: str


@dataclass
class QuiltPatch:
    """A patch of a quilt series, and the trees before and after it. ``refused`` has the reason for each form."""

    name: str
    number: int
    content: bytes
    before: str
    after: str
    option: str = ""
    accepted: Patch | None = None
    own_message: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """Number and name as the slug of a patch file."""
        return f"{self.number:03}-" + (re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:80].strip("-") or "patch")


@dataclass
class Result:
    """Counts of a package, and its faults."""

    package: str
    version: str
    counts: Counter[str] = field(default_factory=Counter)
    patches: list[QuiltPatch] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Apt:
    """apt with a private configuration: the machine's package sources as sources of source packages."""

    def __init__(self, directory: Path) -> None:
        self.downloads = directory / "downloads"
        sources = directory / "apt/sources"
        for path in (self.downloads, sources, directory / "apt/state/lists/partial", directory / "apt/cache/archives/partial"):
            path.mkdir(parents=True, exist_ok=True)
        for file in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")):
            if file.is_file() and file.suffix in (".list", ".sources"):
                form = r"^deb(?=\s)" if file.suffix == ".list" else r"(?<=^Types:).*"
                (sources / file.name).write_text(re.sub(form, " deb-src", file.read_text(), flags=re.MULTILINE))
        settings = {
            "Dir::Etc::SourceList": "/dev/null",
            "Dir::Etc::SourceParts": sources,
            "Dir::State": directory / "apt/state",
            "Dir::State::status": "/var/lib/dpkg/status",
            "Dir::Cache": directory / "apt/cache",
            "APT::Sandbox::User": "root",
        }
        self.options = [argument for name, value in settings.items() for argument in ("-o", f"{name}={value}")]
        if not any((directory / "apt/state/lists").glob("*Sources*")):
            self.run("update")

    def run(self, *arguments: str, cwd: Path | None = None) -> None:
        """Run ``apt-get -q ARGUMENTS``."""
        subprocess.run(["apt-get", "-q", *self.options, *arguments], cwd=cwd, check=True, capture_output=True, text=True)

    def source(self, package: str) -> Path | None:
        """Download a source package; returns its ``.dsc`` file, or None if a file of it cannot be downloaded."""
        target = self.downloads / package
        release = platform.freedesktop_os_release()["VERSION_CODENAME"]
        for name in (package, f"{package}/{release}"):  # an index may list an update that is not there
            if target.is_dir():
                break
            with tempfile.TemporaryDirectory(dir=self.downloads) as temporary, suppress(subprocess.CalledProcessError):
                self.run("source", "--download-only", "--only-source", name, cwd=Path(temporary))
                shutil.copytree(temporary, target)
        return next(target.glob("*.dsc"), None)


def unpack(dsc: Path, directory: Path, *options: str) -> None:
    """Unpack a source package with ``dpkg-source``, which verifies the sums of its files."""
    command = ["dpkg-source", "--no-check", *options, "-x", dsc, directory]
    subprocess.run(command, cwd=directory.parent, check=True, capture_output=True)
    shutil.rmtree(directory / ".pc", ignore_errors=True)


def stored(repository: Repository, directory: Path, index: Path) -> str:
    """Store the files of a directory as a tree, byte by byte; ``index`` is kept between calls."""
    env = {"GIT_INDEX_FILE": str(index)}
    repository.git(f"--work-tree={directory}", "add", "--all", "--force", env=env)
    return repository.git("write-tree", env=env).stdout.strip()


def series(source: Path) -> list[list[str]]:
    """Name and options of the patches of an unpacked package; ``dpkg-source`` ignores options such as ``-p0``."""
    directory = source / "debian/patches"
    file = next((directory / name for name in ("debian.series", "series") if (directory / name).is_file()), None)
    lines = file.read_text().splitlines() if file else []
    return [words for words in (re.sub(r"(^|\s+)#.*", "", line).split() for line in lines) if words]


def quilt_patches(repository: Repository, source: Path, index: Path) -> Iterator[QuiltPatch]:
    """Apply the series of an unpacked package with GNU patch, and store the tree after each patch."""
    before = stored(repository, source, index)
    env = {**os.environ, "LC_ALL": "C", "PATCH_GET": "0"}
    env.pop("POSIXLY_CORRECT", None)
    for number, (name, *options) in enumerate(series(source), 1):
        content = (source / "debian/patches" / name).read_bytes()
        subprocess.run(PATCH, cwd=source, env=env, input=content, check=True, capture_output=True)
        after = stored(repository, source, index)
        if after != before:  # a file without a diff is a comment
            yield QuiltPatch(name, number, content, before, after, " ".join(options))
        before = after


def changes(repository: Repository, before: str, after: str) -> dict[bytes, Change]:
    """The files in which two trees differ."""
    raw = repository.git("diff-tree", "-r", "-z", "--raw", "--no-renames", "--full-index", before, after).raw.split(b"\0")
    fields = (entry.decode().removeprefix(":").split()[:4] for entry in raw[:-1:2])
    return {path: Change(*values) for path, values in zip(raw[1::2], fields, strict=True)}


def git_diff(content: bytes, changed: dict[bytes, Change]) -> bytes:
    """The hunks of any unified diff below the headers of a git diff. Renames and binary files keep their lines."""
    lines = [line.decode("latin-1") + "\n" for line in content.removesuffix(b"\n").split(b"\n")]
    sections = []
    for file in PatchSet(lines):
        names = [name.partition("/")[2].encode("latin-1") for name in (file.source_file, file.target_file)]
        path = next((name for name in names if name in changed), names[1])
        hunks = [
            "".join([str(hunk).split("\n")[0] + "\n", *(str(line) for line in hunk if line.line_type != "")]) for hunk in file
        ]
        sections.append(section_header(file, path, changed.get(path)) + "".join(hunks).encode("latin-1"))
    return b"".join(sections)


def section_header(file: PatchedFile, path: bytes, change: Change | None) -> bytes:
    """The lines of a git diff above the hunks of a file."""
    lines = [b"diff --git a/%s b/%s" % (path, path)]
    kept = re.compile(r"(rename|copy|similarity|dissimilarity|Binary files|GIT binary patch)\b")
    lines += [line.rstrip("\n").encode("latin-1") for line in file.patch_info or () if kept.match(line)]
    if change:
        created, deleted = not change.old.strip("0"), not change.new.strip("0")
        if created or deleted:
            kind, mode = ("new file", change.new_mode) if created else ("deleted file", change.old_mode)
            lines.append(f"{kind} mode {mode}".encode())
        elif change.old_mode != change.new_mode:
            lines += [f"old mode {change.old_mode}".encode(), f"new mode {change.new_mode}".encode()]
        mode = f" {change.new_mode}" if change.old_mode == change.new_mode else ""
        if change.old != change.new:
            lines.append(f"index {change.old}..{change.new}{mode}".encode())
        if file:
            tab = b"\t" if b" " in path else b""
            lines.append(b"--- " + (b"/dev/null" if created else b"a/" + path + tab))
            lines.append(b"+++ " + (b"/dev/null" if deleted else b"b/" + path + tab))
    return b"".join(line + b"\n" for line in lines)


def message(content: bytes) -> tuple[str, datetime, str, str]:
    """Author, date, subject and text of a patch: the fields of DEP-3 or of ``git format-patch``; the text has all of them."""
    head = re.split(rb"^(?:diff |Index: |--- |===|\*\*\* )", content, maxsplit=1, flags=re.MULTILINE)[0]
    try:
        text = head.decode()
    except UnicodeDecodeError:
        text = head.decode("latin-1")
    lines = [line.rstrip() for line in text.split("\n")]
    fields = {match[1]: match[2] for line in reversed(lines) if (match := re.match(r"([A-Z][A-Za-z-]*): +(.*)", line))}
    subject = re.sub(r"^\[[^]]*PATCH[^]]*\] *", "", fields.get("Subject", fields.get("Description", "")))
    author = re.sub(r'^"(.*)" <', r"\1 <", fields.get("From", fields.get("Author", "")))
    try:
        date = parsedate_to_datetime(fields.get("Date", ""))
    except ValueError:
        date = DATE
    body = "\n".join(line for line in lines if line != "---").strip("\n")
    return author or AUTHOR, date if date.tzinfo else DATE, subject, body


def patch_file(patch: QuiltPatch, content: bytes) -> tuple[Patch | None, list[str], bool]:
    """Parse a patch file with this diff: the patch, its problems, and whether its message is that of the quilt patch."""
    author, date, subject, text = message(patch.content)
    for own, name, day, title, body in (
        (True, author, date, subject, f"{text}\n\n{TRAILERS}"),
        (False, AUTHOR, DATE, patch.name, TRAILERS),
    ):
        if " <" not in name:
            patch.refused["its message"] = REASONS["From is"]
            continue
        rendered = render(name, day, title, body, content)
        parsed, problems = parse("debian", Path(f"{patch.slug}.patch"), rendered)
        lines = rendered[: len(rendered) - len(content)].count(b"\n")
        in_message = [problem.text for problem in problems if problem.line <= lines]
        if not in_message or not own:
            break
        patch.refused["its message"] = reason(in_message[0])
    return parsed, [problem.text for problem in problems], own


def features(patch: QuiltPatch, changed: dict[bytes, Change]) -> Iterator[str]:
    """What a patch has that not every patch has."""
    start = re.search(rb"^--- ", patch.content, re.MULTILINE)
    head, content = (patch.content[: start.start()], patch.content[start.start() :]) if start else (patch.content, b"")
    created = [change for change in changed.values() if not change.old.strip("0")]
    deleted = [change for change in changed.values() if not change.new.strip("0")]
    modes = [change for change in changed.values() if "000000" not in (change.old_mode, change.new_mode)]
    found = {
        "fields of DEP-3 or git": re.search(rb"^(From|Author|Description|Subject|Origin): ", head, re.MULTILINE),
        "no git header": not re.search(rb"^diff --git ", patch.content, re.MULTILINE),
        "CR at the end of lines": b"\r\n" in content,
        "bytes that are not UTF-8": not _is_utf8(patch.content),
        "new files": created,
        "deleted files": deleted,
        "changed modes": any(change.old_mode != change.new_mode for change in modes),
        "a file without newline at its end": b"\n\\ No newline" in content,
        "more than 50 hunks": len(re.findall(rb"^@@ ", content, re.MULTILINE)) > 50,
        "an option in series": patch.option,
    }
    return (f"with {name}" for name, value in found.items() if value)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def reason(text: str) -> str:
    """The kind of a refusal."""
    return next((kind for pattern, kind in REASONS.items() if re.search(pattern, text)), text.strip().splitlines()[0])


def checkout_of(repository: Repository, tree: str) -> Checkout:
    """A checkout of a tree."""
    return Checkout(PIN, repository.path, repository.commit_tree(tree, None, "base"), tree)


def accept(repository: Repository, patch: QuiltPatch, counts: Counter[str]) -> Iterator[str]:
    """Parse and apply a patch in one of its forms; yields faults."""
    changed = changes(repository, patch.before, patch.after)
    counts.update(features(patch, changed))
    forms: dict[str, Callable[[], bytes]] = {
        "as it is": lambda: git_diff(patch.content, changed),
        "as a commit": lambda: diff(repository, patch.before, patch.after),
    }
    for form, content in forms.items():
        try:
            parsed, problems, own_message = patch_file(patch, content())
        except UnidiffParseError as error:
            parsed, problems, own_message = None, [f"unidiff: {error}"], False
        if parsed is None or problems:
            patch.refused[form] = reason(problems[0] if problems else "no diff")
            continue
        yield from (f"{patch.name} {form}: {text}" for text in compared(repository, patch, parsed, changed, form, counts))
        try:
            (step,) = steps(checkout_of(repository, patch.before), (), [parsed], patch.before)
            state, detail = step.status.state, step.status.detail
        except Sm120kitError as error:
            patch.refused[form] = reason(error.message.partition("\n")[2] or error.message)
            continue
        if state is not PatchState.APPLIES:
            patch.refused[form] = reason(detail if state is PatchState.CONFLICTS else state)
            continue
        counts["with an offset"] += bool(detail)
        if step.tree != patch.after:
            yield f"{patch.name} {form}: its tree differs in {' '.join(repository.changed(step.tree, patch.after))}"
        if not detail:
            yield from (f"{patch.name} {form}: {text}" for text in rebuilt(repository, parsed, changed, counts))
        counts[form] += 1
        counts["own message"] += own_message
        patch.accepted, patch.own_message = parsed, own_message
        return


def compared(
    repository: Repository, patch: QuiltPatch, parsed: Patch, changed: dict[bytes, Change], form: str, counts: Counter[str]
) -> Iterator[str]:
    """Compare the numbers of added and removed lines with those that git reads in the quilt patch, or in the diff."""
    content = patch.content if form == "as it is" else parsed.diff
    result = repository.git("apply", "--numstat", "-z", "-p1", "-", stdin=content, check=False)
    if result.returncode != 0:
        counts["patches that git does not parse"] += 1
        return
    ours = {file.path: [0, 0] for file in parsed.files}
    lines = parsed.content.split(b"\n")
    for hunk in parsed.hunks:
        old, new = len(hunk.old), len(hunk.new)
        for line in lines[hunk.line :]:
            if not old and not new:
                break
            old, new = old - line.startswith((b" ", b"-")), new - line.startswith((b" ", b"+"))
            ours[hunk.path][0] += line.startswith(b"+")
            ours[hunk.path][1] += line.startswith(b"-")
    theirs: dict[str, list[int]] = {}
    for added, removed, path in (entry.split("\t", 2) for entry in result.raw.decode().split("\0") if entry):
        theirs[path] = [int(added), int(removed)]
    counts["hunks"] += len(parsed.hunks)
    counts["patches with the numbers of git"] += ours == theirs
    if ours != theirs:
        yield f"the parser counts {ours}, git {theirs}"


def rebuilt(repository: Repository, patch: Patch, changed: dict[bytes, Change], counts: Counter[str]) -> Iterator[str]:
    """Make each file from its hunks, at their own lines, and compare it with the blob after the patch."""
    by_path: dict[str, list[Hunk]] = {}
    for hunk in patch.hunks:
        by_path.setdefault(hunk.path, []).append(hunk)
    for path, hunks in by_path.items():
        change = changed[path.encode()]
        content, expected = (
            repository.git("cat-file", "blob", blob).raw if blob.strip("0") else b"" for blob in (change.old, change.new)
        )
        lines = re.findall(rb"[^\n]*\n|[^\n]+", content)
        for hunk in reversed(hunks):
            first = hunk.start - 1 if hunk.old else hunk.start
            if lines[first : first + len(hunk.old)] != [*hunk.old]:
                yield f"the lines of hunk {hunk.number} of {path} are not those of the file"
            lines[first : first + len(hunk.old)] = hunk.new
        counts["files rebuilt from hunks"] += 1
        if b"".join(lines) != expected:
            yield f"{path}: its hunks do not make its blob"


def round_trip(repository: Repository, run: Sequence[QuiltPatch], directory: Path) -> Iterator[str]:
    """Apply patches that follow each other as a series, export the commits, and apply the exported patches; yields faults."""
    names = f"{run[0].name} to {run[-1].name}"
    checkout, projects = checkout_of(repository, run[0].before), projects_in_tree(PIN, ())
    contents = {patch.slug: patch.accepted.content for patch in run if patch.accepted}
    root = write_series(directory / "series", contents)
    first = patches.apply(checkout, (), root, directory / "no-overrides")
    if first.tree != run[-1].after:
        yield f"{names}: the series differs in {' '.join(repository.changed(first.tree, run[-1].after))}"
    exported = export(repository, checkout.commit, first.commit, projects)
    if rewritten := write_back(repository, exported, projects, root):
        yield f"{names}: export rewrites {' '.join(path.name for path in rewritten)}"
    root = write_series(directory / "exported", {commit.patch.slug: commit.patch.content for commit in exported})
    second = patches.apply(checkout, (), root, directory / "no-overrides")
    if second.commit != first.commit:
        yield f"{names}: the exported patches give commit {second.commit}, not {first.commit}"


def write_series(root: Path, contents: dict[str, bytes]) -> Path:
    """Write patch files and their series below ``root``."""
    shutil.rmtree(root, ignore_errors=True)
    (root / "debian").mkdir(parents=True)
    (root / "debian/series").write_text("".join(f"{slug}\n" for slug in contents))
    for slug, content in contents.items():
        (root / f"debian/{slug}.patch").write_bytes(content)
    return root


def snapshot(*directories: Path) -> dict[Path, tuple[int, int, int]]:
    """Mode, size and time of each file and directory below directories."""
    paths = [path for directory in directories for path in directory.rglob("*")]
    return {path: (stat.st_mode, stat.st_size, stat.st_mtime_ns) for path in paths for stat in (path.lstat(),)}


def measure(dsc: Path, directory: Path) -> Result:
    """Take a package through conversion, apply, export and apply."""
    package, _, version = dsc.stem.partition("_")
    result = Result(package, version)
    source, expected, home = directory / "source", directory / "expected", directory / "home"
    home.mkdir()
    unpack(dsc, source, "--skip-patches")
    unpack(dsc, expected)
    repository = Repository.init(directory / "repository")
    base = stored(repository, source, directory / "index")
    result.patches = list(quilt_patches(repository, source, directory / "index"))
    last = result.patches[-1].after if result.patches else base
    tree = stored(repository, expected, directory / "index")
    if tree != last:
        result.faults.append(f"GNU patch and dpkg-source differ in {' '.join(repository.changed(last, tree))}")
    os.environ["HOME"] = tempfile.tempdir = str(home)
    os.chdir(home)
    before = snapshot(source, expected, home)
    try:
        for patch in result.patches:
            result.faults += accept(repository, patch, result.counts)
        runs = [[*run] for ok, run in groupby(result.patches, lambda patch: patch.accepted is not None) if ok]
        for run in runs:
            result.faults += round_trip(repository, run, directory)
            result.counts["series"] += 1
    except Exception:
        result.faults.append(traceback.format_exc())
    after = snapshot(source, expected, home)
    if written := sorted(str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path)):
        result.faults.append(f"written outside of the repository and the series: {' '.join(written)}")
    return result


def row(result: Result) -> str:
    """The row of a package in the table."""
    counts, refused = result.counts, sum(patch.accepted is None for patch in result.patches)
    whole = "equal" if not result.faults else "FAULT"
    cells = [result.package, result.version, len(result.patches), counts["as it is"], counts["as a commit"], refused]
    return "| " + " | ".join(map(str, [*cells, counts["series"], whole if refused == 0 else f"{whole} in parts"])) + " |"


def result_of(apt: Apt, package: str, directory: Path) -> Result | None:
    """Download and measure a package in a temporary directory; None if it cannot be downloaded."""
    if (dsc := apt.source(package)) is None:
        return None
    work = Path(tempfile.mkdtemp(prefix=f"{package}-", dir=directory))
    try:
        return measure(dsc, work)
    except (subprocess.CalledProcessError, Sm120kitError) as error:
        output = getattr(error, "stderr", b"") or b""
        return Result(package, "", faults=[f"not unpacked: {error}\n{output.decode(errors='replace')}"])
    finally:
        os.chdir(directory)
        tempfile.tempdir = None
        shutil.rmtree(work)


def main() -> int:
    """Measure packages; the exit status is 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="for downloads and unpacked packages")
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="source packages")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    arguments = parser.parse_args()
    directory, results, missing, began = arguments.directory.absolute(), list[Result](), list[str](), time.monotonic()
    columns = ["package", "version", "patches", "as they are", "as commits", "refused", "series applied", "trees"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    apt = Apt(directory)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        measured = pool.map(partial(result_of, apt, directory=directory), arguments.packages)
        for package, result in zip(arguments.packages, measured, strict=True):
            if result is None:
                missing.append(package)
                continue
            results.append(result)
            print(row(result), flush=True)
    print(f"\n{time.monotonic() - began:.0f} s; not to be downloaded: {' '.join(missing) or 'none'}")
    return report(results)


def report(results: list[Result]) -> int:
    """Print totals, the reasons of refusals and the faults."""
    total = sum((result.counts for result in results), Counter[str]())
    every = [(result.package, patch) for result in results for patch in result.patches]
    whole = [result for result in results if all(patch.accepted for patch in result.patches) and not result.faults]
    total["packages"], total["patches"] = len(results), len(every)
    total["faults"] = sum(len(result.faults) for result in results)
    total["packages with every patch accepted and the tree of dpkg-source"] = len(whole)
    total["refused in both forms"] = sum(patch.accepted is None for _, patch in every)
    for name, count in sorted(total.items()):
        print(f"{count:8} {name}")
    for form in ("its message", "as it is", "as a commit"):
        kinds = sorted((patch.refused[form], f"{package}/{patch.name}") for package, patch in every if form in patch.refused)
        for kind, group in groupby(kinds, lambda pair: pair[0]):
            names = [name for _, name in group]
            print(f"refused {form}: {len(names):4} {kind}: {' '.join(names)}")
    for result in results:
        for fault in result.faults:
            print(f"{result.package}: {fault}", file=sys.stderr)
    return 1 if total["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
