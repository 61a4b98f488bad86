"""Checks that pass without kernels run in a view of an image that has none, and once for all images with that view."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import layers
import pytest

from sm120kit.core.state import Workspace
from sm120kit.images import checks, kernel_free, rootfs
from sm120kit.images.records import CheckResult, ContainerResult, Image, KernelFreeImage
from sm120kit.images.rootfs import UnpackedLayer

SITE = "opt/venv/lib/python3.11/site-packages"
LOCAL, OTHER = "+sm120kit.0123456789ab", "+sm120kit.ba9876543210"


def unpacked(directory: Path, files: Mapping[str, bytes], **attributes: int) -> UnpackedLayer:
    tree = directory / "tree"
    tree.mkdir(parents=True)
    members: list[layers.Member] = [(path, content, {"mode": 0o644, **attributes}) for path, content in files.items()]
    record, digests = rootfs.unpack(io.BytesIO(layers.packed(*members)), tree, Path("blob"))
    (directory / "digests.json").write_text(json.dumps(digests))
    return UnpackedLayer(tree, record)


def wheel(local: str, **others: bytes) -> dict[str, bytes]:
    """The files of a FlashInfer wheel with a local version, and others by path, in which ``__`` is a slash."""
    info = f"{SITE}/flashinfer_python-0.6.6{local}.dist-info"
    return {
        f"{info}/METADATA": f"Name: flashinfer-python\nVersion: 0.6.6{local}\n".encode(),
        f"{info}/RECORD": f"of {local}".encode(),
        f"{info}/sm120kit.json": f"of {local}".encode(),
        f"{info}/top_level.txt": b"flashinfer\n",
        f"{SITE}/flashinfer/_build_meta.py": f'__version__ = "0.6.6{local}"\n'.encode(),
        f"{SITE}/flashinfer/__pycache__/_build_meta.cpython-311.pyc": local.encode(),
        f"{SITE}/flashinfer/jit.py": b"pass",
        f"{SITE}/flashinfer/data/cutlass/gemm.hpp": local.encode(),
        f"{SITE}/flashinfer/data/aot/sampling/sampling.so": local.encode(),
        **{f"{SITE}/{path.replace('__', '/')}": content for path, content in others.items()},
    }


def view(directory: Path, files: Mapping[str, bytes], **attributes: int) -> tuple[Path, str]:
    """The files of the view of an image with three layers, of which one has FlashInfer, and the digest of the view."""
    base = unpacked(directory / "base", {"etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n"})
    user = unpacked(directory / "user", {"opt/sm120kit/run.py": b"1"})
    (directory / "view").mkdir()
    made = kernel_free.view([base, unpacked(directory / "wheel", files, **attributes), user], SITE, directory / "view")
    assert made is not None and [made.layers[0], made.layers[2]] == [base, user]
    return made.layers[1].tree / SITE, made.digest


def test_a_view_has_neither_kernels_nor_the_digest_of_the_build(tmp_path: Path) -> None:
    site, digest = view(tmp_path / "one", wheel(LOCAL))
    files = {str(path.relative_to(site)): path.read_bytes() for path in site.rglob("*") if path.is_file()}
    assert files == {
        "flashinfer_python-0.6.6.dist-info/METADATA": b"Name: flashinfer-python\nVersion: 0.6.6\n",
        "flashinfer_python-0.6.6.dist-info/top_level.txt": b"flashinfer\n",
        "flashinfer/_build_meta.py": b'__version__ = "0.6.6"\n',
        "flashinfer/jit.py": b"pass",
    }
    unchanged = tmp_path / "one" / "wheel" / "tree" / SITE / "flashinfer"
    assert LOCAL in (unchanged / "_build_meta.py").read_text() and (unchanged / "data" / "aot").is_dir()
    assert view(tmp_path / "two", wheel(OTHER, flashinfer__data__csrc__new=b"1"))[1] == digest


def test_a_view_can_keep_the_sources_of_modules(tmp_path: Path) -> None:
    digests = set()
    for name, source in (("one", b"1"), ("two", b"2")):
        layer = unpacked(tmp_path / name, wheel(LOCAL, flashinfer__data__csrc__source=source))
        (tmp_path / f"view of {name}").mkdir()
        made = kernel_free.view([layer], SITE, tmp_path / f"view of {name}", ("csrc",))
        assert made is not None and (made.layers[0].tree / SITE / "flashinfer/data/csrc/source").read_bytes() == source
        assert [path.name for path in (made.layers[0].tree / SITE / "flashinfer/data").iterdir()] == ["csrc"]
        digests.add(made.digest)
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("files", "attributes"),
    [
        (wheel(LOCAL, flashinfer__jit=b"1"), {}),
        ({**wheel(LOCAL), f"{SITE}/flashinfer/jit.py": b"other"}, {}),
        ({**wheel(LOCAL), f"{SITE}/flashinfer/data.py": b"no directory of kernels"}, {}),
        (wheel(LOCAL, other__data__file=b"of another package"), {}),
        (wheel(LOCAL), {"mode": 0o755}),
        (wheel(LOCAL), {"uid": 7}),
    ],
)
def test_every_other_difference_is_in_the_digest(tmp_path: Path, files: dict[str, bytes], attributes: dict[str, int]) -> None:
    assert view(tmp_path / "one", wheel(LOCAL))[1] != view(tmp_path / "two", files, **attributes)[1]


def test_a_file_with_the_digest_of_the_build_makes_another_view(tmp_path: Path) -> None:
    first, second = (wheel(local, flashinfer__built=local.encode()) for local in (LOCAL, OTHER))
    assert view(tmp_path / "one", first)[1] != view(tmp_path / "two", second)[1]


def test_images_with_other_layers_have_another_view(tmp_path: Path) -> None:
    layer = unpacked(tmp_path / "wheel", wheel(LOCAL))
    digests = set()
    for name in ("base", "other"):
        (tmp_path / f"of {name}").mkdir()
        made = kernel_free.view([unpacked(tmp_path / name, {"etc/os": b"1"}), layer], SITE, tmp_path / f"of {name}")
        digests.add(made.digest if made else "")
    assert len(digests) == 2 and "" not in digests


@pytest.mark.parametrize("change", ["no FlashInfer", "official", "removes files"])
def test_an_image_without_our_flashinfer_has_no_view(tmp_path: Path, change: str) -> None:
    files = {"no FlashInfer": {"etc/passwd": b""}, "official": wheel(""), "removes files": wheel(LOCAL, **{".wh.x": b""})}[
        change
    ]
    assert kernel_free.view([unpacked(tmp_path / "layer", files)], SITE, tmp_path) is None


IMAGE = Image("sha256:1", "c", "linux/amd64", (), {"sm120kit.kind": "vllm"}, "1000:1000", 0)


class Store:
    """A store of one image whose programs print results of checks: ``parts`` are those that were run."""

    def __init__(self, digest: str, verdict: str = "passed", of_sources: str = "") -> None:
        self.digest, self.verdict, self.of_sources = digest, verdict, of_sources
        self.parts: list[str] = []

    def run(self, image: str, argv: Sequence[str], files: Mapping[str, bytes]) -> ContainerResult:
        expected: dict[str, Any] = json.loads(files["checks/expected.json"])
        self.parts.append(expected["part"] or f"whole image but {len(expected['elsewhere'])} views")
        in_view = bool(expected["part"])
        assert (expected["version"] == "0.6.6", expected["modules"] == []) == (in_view, in_view)
        name = {"without kernels": "command", "with sources": "modules_requested"}.get(expected["part"], "import")
        verdict = self.verdict if name == "command" else "passed"
        line = {"suite": "vllm", "name": name, "verdict": verdict, "detail": "", "facts": {f"fact of {name}": "1"}}
        return ContainerResult(0, json.dumps(line) + "\n", "", "chroot")

    def owners(self, image: str) -> dict[str, str]:
        return {}

    @contextmanager
    def kernel_free(self, image: str, keeps: Sequence[str] = ()) -> Iterator[KernelFreeImage]:
        digest = self.digest if not keeps else self.of_sources or self.digest
        yield KernelFreeImage(digest, lambda argv, files: self.run(image, argv, files))


def results(store: Store, kept: Path | None, image: Image = IMAGE) -> dict[str, Any]:
    """The facts of the checks inside an image, and the verdict of each check."""
    expected = checks.ExpectedImage("vllm", "r", f"0.6.6{LOCAL}", "c", "t", "p", (), ("sampling",), (), {})
    lines = [*checks._inside(image, ("engine", "vllm"), expected, store, kept, None)]  # type: ignore[arg-type]
    facts = {key: value for _, reported in lines for key, value in reported.items()}
    return facts | {check.name: check.verdict for check, _ in lines}


REST = "whole image but 2 views"
ALL = ["without kernels", "with sources", REST]


def test_checks_that_pass_without_kernels_run_once_for_a_view(tmp_path: Path) -> None:
    kept = Workspace.open(tmp_path / "state").cache / "checks"
    first, same, other_sources, other = Store("a"), Store("a"), Store("a", of_sources="b"), Store("b")
    reported = results(first, kept)
    assert first.parts == ALL and checks.OTHER_IMAGES not in reported
    again = results(same, kept, Image("sha256:2", "d", "linux/amd64", (), {}, "", 0))
    assert same.parts == [REST]
    note = "vllm/command: those of sha256:1; vllm/modules_requested: those of sha256:1"
    assert again == reported | {checks.OTHER_IMAGES: note}
    results(other_sources, kept)
    assert other_sources.parts == ["with sources", REST]
    results(other, kept)
    assert other.parts == ["without kernels", REST]
    all_run = Store("a")
    results(all_run, None)
    assert all_run.parts == ["whole image but 0 views"]


def test_results_of_a_failed_check_are_not_kept(tmp_path: Path) -> None:
    for expected in (ALL, ["without kernels", REST]):
        store = Store("a", "failed")
        assert results(store, tmp_path)["command"] is CheckResult.FAILED
        assert store.parts == expected


def test_a_damaged_record_of_results_is_not_used(tmp_path: Path) -> None:
    results(Store("a"), tmp_path)
    for record in tmp_path.iterdir():
        record.write_text("{")
    store = Store("a")
    assert results(store, tmp_path)["command"] is CheckResult.PASSED and store.parts == ALL
