"""Drafts of recipes: the template, pins in METADATA, the TOML that is written, and parts of wheels that a server sends."""

from __future__ import annotations

import errno
import http.server
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hostile_server import hostile_server
from loopback import http_served
from packaging.requirements import Requirement
from small_engine import make_wheel

from sm120kit import recipes
from sm120kit.core.errors import FetchFailed, NotTrusted, ResourceUnavailable
from sm120kit.recipes import _toml_text, drafts, lockfile
from sm120kit.recipes.drafts import Python, Template
from sm120kit.recipes.recipe_records import Lock
from sm120kit.sources import Origin
from sm120kit.sources.index import ListedFile, Location
from sm120kit.sources.wheel_metadata import WheelMetadata, read_contents
from sm120kit.wheels import new_recipe

RELEASES = ["0.19.1", "0.20.0", "0.31.0", "0.32.0", "0.33.0", "0.34.0"]
LINUX = Python("3.11", "manylinux_2_35_x86_64")


@pytest.mark.parametrize(
    ("version", "template"),
    [("0.32.0", "0.33.0"), ("0.34.0", "0.33.0"), ("0.20.0.post1", "0.20.0"), ("0.18.0", "0.19.1")],
)
def test_template_is_the_recipe_with_the_fewest_releases_between(version: str, template: str) -> None:
    assert drafts.nearest(version, ["0.19.1", "0.20.0", "0.33.0"], RELEASES) == template


def test_requirements_are_those_of_the_environment() -> None:
    lines = (
        "flashinfer_python[cu13]==0.7.1",
        "b12x==1.5.1; extra == 'b12x'",
        "torch==2.1; platform_machine == 'aarch64'",
        "torch==2.2; platform_machine == 'x86_64' and python_version >= '3.10'",
        "not a requirement",
    )
    required = drafts.requirements(WheelMetadata(lines, (), ()), LINUX)
    assert {name: str(each.specifier) for name, each in required.items()} == {"flashinfer-python": "==0.7.1", "torch": "==2.2"}


@pytest.mark.parametrize(("text", "version"), [("a==1.2", "1.2"), ("a==1.*", ""), ("a>=1", ""), ("a==1,!=2", ""), ("a", "")])
def test_pin_is_one_exact_version(text: str, version: str) -> None:
    assert drafts.exact(Requirement(text)) == version


@pytest.mark.parametrize("name", recipes.names())
def test_written_recipe_has_the_content_of_its_template(name: str) -> None:
    data = tomllib.loads(recipes.locate(name).read_text())
    written = _toml_text.write(data, "head")
    assert tomllib.loads(written) == data and written.startswith("# head\n")


def test_versions_are_replaced_as_a_whole() -> None:
    text = "its version 0.7.2+sm120kit.<plan> satisfies ==0.7.2, not 0.7.2.post1 or 10.7.2."
    assert (
        drafts._versions(text, {"0.7.2": "0.8"})
        == "its version 0.8+sm120kit.<plan> satisfies ==0.8, not 0.7.2.post1 or 10.7.2."
    )


def test_files_left_out_are_taken_over_for_review_where_the_wheel_has_them() -> None:
    path = recipes.locate("vllm-0.33.0")
    template = Template(path.stem, tomllib.loads(path.read_text()))
    wheel = ListedFile("0.34.0", Location("index"), filename="vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl")
    kernels = recipes.locate("flashinfer-0.7.2.post1")
    flashinfer = Template(kernels.stem, tomllib.loads(kernels.read_text()))
    fa3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
    for members, expected in (((fa3,), True), (("vllm/__init__.py",), False)):
        contents = WheelMetadata((), (), members)
        draft = drafts.draft_engine(template, wheel, (contents, contents), flashinfer)
        left_out = {entry["distribution"]: entry["files"] for entry in draft.data["leave_out"]}
        assert (left_out.get("vllm") == [fa3]) is expected and "triton" in left_out
        assert [text for text in draft.decisions if text.startswith("leave_out, wrong_record: those of vllm-0.33.0;")]
        written = tomllib.loads(draft.toml())
        assert written["leave_out"] == draft.data["leave_out"]
        assert [*written][-2:] == ["leave_out", "wrong_record"], "in the order of the template"


def test_recipes_appear_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in ("recipes/engines", "patches", "cutlass_overrides", "made"):
        (tmp_path / directory).mkdir(parents=True)
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    staged = []
    for name in ("flashinfer-1.0", "vllm-9.0"):
        path = tmp_path / "made" / f"{name}.toml"
        path.write_text("")
        recipes.lock_path(path).write_text(lockfile.text(Lock(lockfile.FORMAT, {}, (), (), (), ())))
        staged.append(SimpleNamespace(target=SimpleNamespace(path=path)))
    real, renamed = Path.replace, []

    def replace(path: Path, target: Path) -> Path:
        renamed.append(target)
        if len(renamed) == 3:
            raise OSError(errno.ENOSPC, "no space")
        return real(path, target)

    with monkeypatch.context() as full:
        full.setattr(Path, "replace", replace)
        with pytest.raises(ResourceUnavailable):
            new_recipe.publish(staged)  # type: ignore[arg-type]  # its paths are all that matters
    assert not [*(tmp_path / "recipes" / "engines").iterdir()]
    files = new_recipe.publish(staged)  # type: ignore[arg-type]
    names = [f"{n}.{s}" for n in ("flashinfer-1.0", "vllm-9.0") for s in ("lock.json", "toml")]
    assert [file.name for file in files] == names


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The URL of a directory on a server with range requests, and the ranges that were requested."""
    ranges: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path))  # type: ignore[arg-type]

        def do_GET(self) -> None:
            content = (tmp_path / self.path.strip("/")).read_bytes()
            requested = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
            if "whole" in self.path or requested is None:
                self.send_response(200)
            else:
                first, last = (int(part) for part in requested.groups())
                ranges.append(self.headers["Range"])
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
                content = content[first : last + 1]
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    with http_served(Handler) as url:
        yield url, ranges


def test_metadata_is_read_without_the_rest_of_the_wheel(tmp_path: Path, served: tuple[str, list[str]]) -> None:
    url, ranges = served
    files = {"vllm/_C.abi3.so": bytes(2**22), "vllm/__init__.py": b""}
    make_wheel(tmp_path, "vllm", "9.0", requires=["torch==2.0"], files=files)
    (wheel,) = tmp_path.glob("*.whl")
    remote = read_contents(wheel.name, Location(f"{url}/{wheel.name}", url=f"{url}/{wheel.name}"), Origin())
    assert remote == read_contents(wheel.name, Location("file", wheel), Origin())
    assert remote.requires == ("torch==2.0",)
    assert drafts.extension_modules(remote) == {"vllm._C"}
    read = sum(int(last) + 1 - int(first) for first, last in (each.removeprefix("bytes=").split("-") for each in ranges))
    assert read < 2**19 < wheel.stat().st_size


@pytest.mark.parametrize(("name", "kind"), [("whole.whl", FetchFailed), ("damaged.whl", NotTrusted), ("empty.whl", NotTrusted)])
def test_wheel_that_cannot_be_read_is_an_error(
    tmp_path: Path, served: tuple[str, list[str]], name: str, kind: type[Exception]
) -> None:
    (tmp_path / name).write_bytes(b"" if name == "empty.whl" else b"not a zip file" * 100)
    url = f"{served[0]}/{name}"
    with pytest.raises(kind, match=name):
        read_contents(name, Location(url, url=url), Origin())


def test_server_that_sends_more_than_the_part_of_a_wheel_is_refused(tmp_path: Path) -> None:
    """It states that the wheel has a byte."""
    with hostile_server() as server:
        server.respond("/a.whl", bytes(2**16), 206, endless=True, Content_Range="bytes 0-0/1")
        location = Location(f"{server.url}/a.whl", url=f"{server.url}/a.whl")
        with pytest.raises(FetchFailed, match=r"a\.whl: it sends more than the part"):
            read_contents("a.whl", location, Origin())


@pytest.mark.parametrize(("at", "value"), [(8, 1), (10, 99)], ids=["encrypted", "compressed by an unknown method"])
def test_metadata_that_zipfile_does_not_decode_is_an_error(tmp_path: Path, at: int, value: int) -> None:
    make_wheel(tmp_path, "vllm", "9.0")
    (wheel,) = tmp_path.glob("*.whl")
    content = bytearray(wheel.read_bytes())
    for entry in re.finditer(b"PK\x01\x02", bytes(content)):  # the list of members
        content[entry.start() + at] = value
    wheel.write_bytes(content)
    with pytest.raises(NotTrusted, match=re.escape(f"{wheel.name} is not a wheel: ")):
        read_contents(wheel.name, Location(str(wheel), wheel), Origin())
