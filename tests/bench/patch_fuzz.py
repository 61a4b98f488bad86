"""Mutated patches through the parser and apply: ``python tests/bench/patch_fuzz.py [COUNT] [SEED]``.

The patches of this repository and a patch of a small tree are mutated: bytes, lines and numbers are changed, repeated,
moved or removed. Each input is parsed. Every fourth is a mutation of the small patch, which is also applied to its tree with
git, in normal form if it can be parsed. Prints counts and times, and exits with status 1 if an input raised an exception
that is no error of sm120kit, took longer than 10 s, or changed a file outside its project. Inputs depend on COUNT and SEED
alone.
"""

from __future__ import annotations

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
from pathlib import Path
from types import FrameType

from sm120kit import patches
from sm120kit.core.errors import Sm120kitError
from sm120kit.patches.format import parse
from sm120kit.sources.git import Repository
from sm120kit.sources.records import Checkout, GitPin, VendoredProject

LIMIT_S = 10
ROOT = Path(__file__).parents[2] / "patches"
FILE = b"".join(b"line %d\n" % n for n in range(1, 31)) + b"block\na\nb\nc\n" * 3
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
    """A tree with a project ``cutlass`` inside, a file outside it, and a patch of three files of the project."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "patches"
        (self.root / "cutlass").mkdir(parents=True)
        (self.root / "cutlass/series").write_text("edit\n")
        self.repository = Repository.init(directory / "r")
        after = (
            FILE.replace(b"line 3\n", b"three\n")
            .replace(b"line 20\n", b"line 20\nmore\n")
            .replace(b"b\nc\nblock\n", b"B\nc\nblock\n", 1)
        )
        before = self.tree({"cutlass/x": FILE, "cutlass/gone": b"a\n", "outside": b"a\n"})
        changed = self.tree({"cutlass/x": after, "cutlass/new": b"n\n", "outside": b"a\n"})
        form = ["--full-index", "--no-renames", "--relative=cutlass/"]
        self.diff = self.repository.git("diff-tree", "-r", "-p", *form, before, changed).raw
        pin = GitPin("flashinfer", "file:///nowhere", "0" * 40, "0.6.6")
        self.checkout = Checkout(pin, self.repository.path, self.repository.commit_tree(before, None, "b"), before)

    def tree(self, files: dict[str, bytes]) -> str:
        with self.repository.index() as index:
            for path, content in {**files, "cutlass/include/cutlass/version.h": VERSION_H}.items():
                index.add(path, content)
            return index.write_tree()

    def apply(self, content: bytes) -> list[str]:
        """Apply a patch; returns the paths that it changed outside the project."""
        (self.root / "cutlass/edit.patch").write_bytes(content)
        inside = (VendoredProject("cutlass", "cutlass", "4.2.1"),)
        tree = patches.apply(self.checkout, inside, self.root, self.root / "no-overrides")
        return [path for path in self.repository.changed(self.checkout.tree, tree.tree) if not path.startswith("cutlass/")]


def expired(number: int, frame: FrameType | None) -> None:
    """Report a hang as an exception with the stack at that time."""
    raise TimeoutError(f"longer than {LIMIT_S} s")


def main(count: int, seed: int) -> int:
    """Run ``count`` inputs; prints the counts as JSON."""
    chance = random.Random(seed)
    signal.signal(signal.SIGALRM, expired)
    series = [(file.parent.name, file.read_bytes()) for file in sorted(ROOT.glob("*/*.patch"))]
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    slowest, began = 0.0, time.perf_counter()
    directory = Path(tempfile.mkdtemp(prefix="sm120kit-fuzz-"))
    try:
        small = SmallTree(directory)
        head = next(content for project, content in series if project == "cutlass").split(b"diff --git ")[0]
        head = re.sub(rb"Applies-To: .*", b"Applies-To: cutlass >=4.2,<4.3", head)
        if small.apply(head + small.diff):
            raise AssertionError("the patch that is mutated does not apply")
        for number in range(count):
            applies = number % 4 == 0
            project, content = ("cutlass", head + small.diff) if applies else chance.choice(series)
            content = mutate(content, chance)
            start = time.perf_counter()
            signal.alarm(LIMIT_S)
            try:
                patch, problems = parse(project, Path("fuzz.patch"), content)
                outcomes["parsed with problems" if problems else "parsed without problems"] += 1
                if applies:
                    outside = small.apply(patches.normal_form(patch) if patch else content)
                    outcomes["applied"] += 1
                    failures += [f"input {number} changed {path}" for path in outside]
            except Sm120kitError as error:
                outcomes[type(error).__name__] += 1
            except Exception:
                failures.append(f"input {number}: {traceback.format_exc()}")
            finally:
                signal.alarm(0)
            slowest = max(slowest, time.perf_counter() - start)
    finally:
        shutil.rmtree(directory)
    figures = {"inputs": count, "seed": seed, "failures": len(failures), "slowest_s": round(slowest, 3)}
    figures |= {"total_s": round(time.perf_counter() - began, 1)}
    print(json.dumps({**figures, **outcomes}, indent=1))
    for failure in failures[:10]:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in (sys.argv[1:] + ["20000", "1"][len(sys.argv) - 1 :]))))
