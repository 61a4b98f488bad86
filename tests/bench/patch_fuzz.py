"""Mutated patches through the parser, apply and export: ``python tests/bench/patch_fuzz.py [COUNT] [SEED] [--jobs N]``.

The patches of this repository, and a series of four patches that build on each other in a small tree, are mutated: bytes,
lines and numbers are changed, repeated, moved or removed; patches of the series are moved, repeated or left out. Each input is
parsed. Every second is the first patch of the small series alone, or all of it, and is also applied with git, in normal form
where it can be parsed. What applies is exported, and the exported patches are applied again.

Prints counts and times, and exits with status 1 if an input raised an exception that is no error of sm120kit, took longer than
10 s, changed a file outside its project, left a commit although it was refused, or applied and did not give the same commits
after an export. Inputs come in batches of 1,000 with the seeds SEED, SEED + 1, ...; they do not depend on the number of jobs.

The run needs git and an environment with sm120kit's dependencies; it uses no network and no state directory, and writes below
the directory for temporary files only. On a machine with 16 cores::

    PYTHONPATH=src python tests/bench/patch_fuzz.py 200000 1 --jobs 16
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType

from sm120kit import patches
from sm120kit.core.errors import Sm120kitError
from sm120kit.patches.export import export
from sm120kit.patches.format import parse
from sm120kit.patches.records import PatchedTree, projects_in_tree
from sm120kit.sources.git import Repository
from sm120kit.sources.records import Checkout, GitPin, VendoredProject

LIMIT_S = 10
BATCH = 1000
ROOT = Path(__file__).parents[2] / "patches"
FILE = b"".join(b"line %d\n" % n for n in range(1, 31)) + b"block\na\nb\nc\n" * 3
INSIDE = (VendoredProject("cutlass", "cutlass", "4.2.1"),)
VERSION_H = b"#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 1\n"
TOKENS = [
    *(
        b"\0",
        b"\r",
        b"\n",
        b"\t",
        b"\xff",
        b"\xc3\xa9",
        b"\xe2\x80\xa8",
        b"%s",
        b'"',
        b"\\",
        b" ",
        b"-- \n",
        b"[",
        b"<",
        b">",
        b"=?utf-8?q?a?=",
    ),
    *(b"0", b"1", b"9" * 10, b"9" * 5000, b"-1", b"1e9", b"../", b"/etc/passwd", b".git/config", b"a b/a", b"/dev/null"),
    *(
        b"diff --git a/x b/x\n",
        b"--- a/x\n",
        b"+++ b/x\n",
        b"@@ -1 +1 @@\n",
        b"@@ -0,0 +1 @@\n",
        b"\\ No newline at end of file\n",
    ),
    *(
        b"new file mode 100644\n",
        b"deleted file mode 100644\n",
        b"old mode 100644\n",
        b"new mode 120000\n",
        b"GIT binary patch\n",
    ),
    *(b"rename from x\n", b"index 0..1\n", b"===foo", b">=V0.1", b"!=1," * 3000, b"1!2", b"Applies-To: ", b"From: ", b"Date: "),
]
NUMBER = re.compile(rb"\d+")


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Change a patch at one to four places."""
    for _ in range(chance.randint(1, 4)):
        lines = content.splitlines(keepends=True) or [b""]
        kind, at = chance.randrange(8), chance.randrange(len(lines))
        if kind == 0:
            position = chance.randrange(len(content) + 1)
            content = content[:position] + bytes([chance.randrange(256)]) + content[position + chance.randrange(2) :]
            continue
        if kind == 1:
            position = chance.randrange(len(content) + 1)
            content = content[:position] + chance.choice(TOKENS) + content[position:]
            continue
        if kind == 2:
            numbers = list(NUMBER.finditer(content))
            match = chance.choice(numbers) if numbers else None
            if match:
                number = chance.choice([b"0", b"9" * 20, b"%d" % (int(match[0][:9]) + chance.choice([-1, 1, 2]))])
                content = content[: match.start()] + number + content[match.end() :]
            continue
        if kind == 3:
            del lines[at]
        elif kind == 4:
            lines.insert(chance.randrange(len(lines) + 1), lines[at])
        elif kind == 5:
            lines[at] = chance.choice(TOKENS) + b"\n"
        elif kind == 6:
            lines[at] = chance.choice([b" ", b"+", b"-", b"\\", b""]) + lines[at][1:]
        else:
            del lines[chance.randrange(len(lines)) :]
        content = b"".join(lines)
    return content


class SmallTree:
    """A tree with a project ``cutlass`` inside, a file outside it, and a series of four patches of the project."""

    def __init__(self, directory: Path, head: bytes) -> None:
        self.root = directory / "patches"
        self.repository = Repository.init(directory / "r")
        edited = (
            FILE.replace(b"line 3\n", b"three\n")
            .replace(b"line 20\n", b"line 20\nmore\n")
            .replace(b"b\nc\nblock\n", b"B\nc\nblock\n", 1)
        )
        extended = edited.replace(b"more\n", b"more\nand more\n").replace(b"three\n", b"3\n")
        versions = [
            {"x": FILE, "gone": b"a\n"},
            {"x": edited, "new": b"n\n"},
            {"x": extended, "new": b"n\nm\n", "below/made": FILE[:50]},
            {"x": extended.replace(b"block\n", b"BLOCK\n"), "below/made": FILE[:50] + b"end"},
            {"x": edited, "below/made": FILE[:50] + b"end\n", "new": b"again\n"},
        ]
        trees = [self.tree(files, executable=number == 3) for number, files in enumerate(versions)]
        form = ["--full-index", "--no-renames", "--relative=cutlass/"]
        self.series = {
            f"step-{number}": head + self.repository.git("diff-tree", "-r", "-p", *form, before, after).raw
            for number, (before, after) in enumerate(pairwise(trees), 1)
        }
        pin = GitPin("flashinfer", "file:///nowhere", "0" * 40, "0.6.6")
        commit = self.repository.commit_tree(trees[0], None, "b")
        self.checkout = Checkout(pin, self.repository.path, commit, trees[0])

    def tree(self, files: dict[str, bytes], executable: bool) -> str:
        """Store a tree; ``executable`` is for ``below/made``."""
        with self.repository.index() as index:
            index.add("outside", b"a\n")
            for path, content in {**files, "include/cutlass/version.h": VERSION_H}.items():
                index.add(f"cutlass/{path}", content)
            if executable:
                blob = self.repository.write(files["below/made"])
                index.git("update-index", "--index-info", stdin=f"100755 {blob}\tcutlass/below/made\n".encode())
            return index.write_tree()

    def apply(self, files: dict[str, bytes], series: bytes) -> PatchedTree:
        """Apply these patch files with a file ``series``."""
        shutil.rmtree(self.root, ignore_errors=True)
        (self.root / "cutlass").mkdir(parents=True)
        (self.root / "cutlass/series").write_bytes(series)
        for slug, content in files.items():
            (self.root / f"cutlass/{slug}.patch").write_bytes(content)
        return patches.apply(self.checkout, INSIDE, self.root, self.root / "no-overrides")

    def outcome(self, files: dict[str, bytes], series: bytes) -> tuple[str, list[str]]:
        """Apply patches, export them and apply them again; returns how the first apply ended, and faults."""
        refs = self.repository.git("for-each-ref").stdout
        try:
            tree = self.apply(files, series)
        except Sm120kitError as error:
            changed = self.repository.git("for-each-ref").stdout != refs
            return type(error).__name__, ["it is refused, but a ref changed"] * changed
        paths = self.repository.changed(self.checkout.tree, tree.tree)
        faults = [f"it changed {path}" for path in paths if not path.startswith("cutlass/")]
        try:
            exported = export(self.repository, self.checkout.commit, tree.commit, projects_in_tree(self.checkout.pin, INSIDE))
            slugs = "".join(f"{commit.patch.slug}\n" for commit in exported)
            again = self.apply({commit.patch.slug: commit.patch.content for commit in exported}, slugs.encode())
        except Sm120kitError as error:
            return "applied", [*faults, f"it applies, but its export fails: {error.message}"]
        return "applied", faults + ["the exported patches give other commits"] * (again.commit != tree.commit)


def mutate_series(content: dict[str, bytes], chance: random.Random) -> tuple[dict[str, bytes], bytes]:
    """Mutate one or two patches of a series, or their order, or both; in one of ten also the bytes of the file ``series``."""
    files, slugs = dict(content), list(content)
    kind = chance.randrange(4)
    if kind < 3:
        for slug in chance.sample(slugs, chance.randint(1, 2)):
            files[slug] = mutate(files[slug], chance)
    if kind > 1:
        at, change = chance.randrange(len(slugs)), chance.randrange(4)
        if change == 0:
            slugs.insert(chance.randrange(len(slugs)), slugs.pop(at))
        elif change == 1:
            del files[slugs.pop(at)]
        elif change == 2:
            files["again"] = files[slugs[at]]
            slugs.insert(chance.randrange(len(slugs) + 1), "again")
        else:
            other = chance.choice(slugs)
            files[slugs[at]], files[other] = files[other], files[slugs[at]]
    lines = "".join(f"{slug}\n" for slug in slugs).encode()
    return files, mutate(lines, chance) if chance.randrange(10) == 0 else lines


def normal(content: bytes) -> bytes:
    """A mutated patch in normal form, or as it is if it cannot be parsed."""
    patch, _ = parse("cutlass", Path("fuzz.patch"), content)
    return patches.normal_form(patch) if patch else content


def expired(number: int, frame: FrameType | None) -> None:
    """Report a hang as an exception with the stack at that time."""
    raise TimeoutError(f"longer than {LIMIT_S} s")


@dataclass
class Figures:
    """Counts and faults of a batch of inputs; ``slowest`` is in seconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0


def batch(count: int, seed: int) -> Figures:
    """Run ``count`` inputs."""
    chance, figures = random.Random(seed), Figures()
    signal.signal(signal.SIGALRM, expired)
    upstream = [(file.parent.name, file.read_bytes()) for file in sorted(ROOT.glob("*/*.patch"))]
    head = next(content for project, content in upstream if project == "cutlass").split(b"diff --git ")[0]
    head = re.sub(rb"Applies-To: .*", b"Applies-To: cutlass >=4.2,<4.3", head)
    with tempfile.TemporaryDirectory(prefix="sm120kit-fuzz-") as name:
        directory = Path(name)
        (directory / "tmp").mkdir()
        tempfile.tempdir = str(directory / "tmp")
        small = SmallTree(directory, head)
        state, faults = small.outcome(small.series, "".join(f"{slug}\n" for slug in small.series).encode())
        if state != "applied" or faults:
            raise AssertionError(f"the series that is mutated does not apply: {state} {faults}")
        for number in range(count):
            start = time.perf_counter()
            signal.alarm(LIMIT_S)
            try:
                faults = run_input(number, chance, upstream, small, figures.outcomes)
            except Exception:
                faults = [traceback.format_exc()]
            finally:
                signal.alarm(0)
            figures.faults += [f"seed {seed}, input {number}: {fault}" for fault in faults]
            figures.slowest = max(figures.slowest, time.perf_counter() - start)
        if left := [path.name for path in (*directory.iterdir(), *(directory / "tmp").iterdir())]:
            left = sorted({*left} - {"patches", "r", "tmp"})
            figures.faults += [f"seed {seed}: {path} was written beside the repository" for path in left]
        tempfile.tempdir = None
    return figures


def run_input(
    number: int, chance: random.Random, upstream: list[tuple[str, bytes]], small: SmallTree, outcomes: Counter[str]
) -> list[str]:
    """Mutate, parse and, every second time, apply; returns faults."""
    if number % 4 == 2:
        files, series = mutate_series(small.series, chance)
        state, faults = small.outcome({slug: normal(content) for slug, content in files.items()}, series)
        outcomes[f"series: {state}"] += 1
        return faults
    project, content = chance.choice(upstream) if number % 4 else ("cutlass", small.series["step-1"])
    content = mutate(content, chance)
    problems = parse(project, Path("fuzz.patch"), content)[1]
    outcomes["parsed with problems" if problems else "parsed without problems"] += 1
    if number % 4:
        return []
    state, faults = small.outcome({"edit": normal(content)}, b"edit\n")
    outcomes[f"patch: {state}"] += 1
    return faults


def main() -> int:
    """Run batches of inputs in parallel; prints the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", nargs="?", type=int, default=20_000, help="number of inputs")
    parser.add_argument("seed", nargs="?", type=int, default=1, help="seed of the first batch")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    arguments = parser.parse_args()
    began = time.perf_counter()
    sizes = [min(BATCH, arguments.count - done) for done in range(0, arguments.count, BATCH)]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(batch, sizes, range(arguments.seed, arguments.seed + len(sizes))))
    faults = [fault for figures in results for fault in figures.faults]
    summary = {"inputs": arguments.count, "seed": arguments.seed, "jobs": arguments.jobs, "faults": len(faults)}
    summary |= {"slowest_s": round(max((figures.slowest for figures in results), default=0), 3)}
    summary |= {"total_s": round(time.perf_counter() - began, 1)}
    print(json.dumps({**summary, **dict(sorted(sum((figures.outcomes for figures in results), Counter()).items()))}, indent=1))
    for fault in faults[:10]:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
