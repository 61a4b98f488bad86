"""Mutated inputs of every parser end in a result or in an error of sm120kit, soon, and write nothing outside their directory.

``SM120KIT_MUTATIONS`` is the number of inputs, by default 20,000, ``SM120KIT_MUTATION_JOBS`` the number of processes, and
``SM120KIT_MUTATION_SEED`` the first seed: 1 by default, so that a commit always has the same result, and a random one for 0.
Inputs come in batches of one parser; a fault names its seed and input::

    export SM120KIT_MUTATION_SEED=0 SM120KIT_MUTATIONS=1000000 SM120KIT_MUTATION_JOBS=2
    nice -n 19 pytest -s tests/slow/integration/test_mutated_inputs.py
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import debian_archive
import httpx2
import layout_images
import mutation
import small_engine
import sweep

from sm12x_lab.ptx import syntax
from sm120kit.bench import _metrics, figures, result_file, sse, workload
from sm120kit.cli import commands, config_file
from sm120kit.cli.tree import Group
from sm120kit.core import retry
from sm120kit.core.errors import Sm120kitError
from sm120kit.core.record_files import read_record, record_json
from sm120kit.core.unpacking import Unpacking
from sm120kit.core.urls import Endpoint, redacted
from sm120kit.core.workspace import Workspace
from sm120kit.hosts import log_rules
from sm120kit.images import _rootfs, _wheel_layers, image_index
from sm120kit.images._bytecode import ImagePython
from sm120kit.images.distribution import RegistryClient
from sm120kit.images.distribution._compression import decompressed
from sm120kit.images.distribution._credentials import stored_credentials
from sm120kit.images.image_records import VerifiedImage
from sm120kit.images.oci import CONFIG, INDEX, LAYER, MANIFEST, Descriptor, Layout
from sm120kit.kernels import cubin
from sm120kit.patches import format, mails
from sm120kit.recipes import bases, configurations, lockfile
from sm120kit.recipes.load import read as read_recipe
from sm120kit.recipes.load import read_toml, validate
from sm120kit.serving import checkpoint
from sm120kit.sources import _archive, debian_files
from sm120kit.sources.source_records import LockedWheel, SdistPin, WheelPin
from sm120kit.wheels import _published_wheels as wheel_builds
from sm120kit.wheels.build_records import BuildPlan

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "unit" / "data"
COUNT = int(os.environ.get("SM120KIT_MUTATIONS", "20000"))
JOBS = int(os.environ.get("SM120KIT_MUTATION_JOBS", "1"))
SEED = int(os.environ.get("SM120KIT_MUTATION_SEED", "1")) or random.SystemRandom().randrange(1, 10**6)
LIMIT_S = 30
"""For one input, also on a busy machine."""
MEMORY_BYTES = 6 * 2**30
BATCH = 500

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where inputs are written: many small files."""

Mutate = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Parser:
    """A parser: its inputs by file name, which are mutated, and a function that parses one of them below a directory."""

    inputs: Callable[[], dict[str, bytes]]
    mutate: Mutate
    parse: Callable[[bytes, str, Path], object]
    weight: int = 4
    """Share of the inputs."""


def files(pattern: str, limit: int = 10**6) -> Callable[[], dict[str, bytes]]:
    """The files of the repository that match a pattern."""
    return lambda: {path.name: path.read_bytes() for path in sorted(ROOT.glob(pattern)) if path.stat().st_size < limit}


def written(parse: Callable[[Path], object]) -> Callable[[bytes, str, Path], object]:
    """Parse an input from its file."""

    def run(content: bytes, name: str, directory: Path) -> object:
        path = directory / name
        path.write_bytes(content)
        return parse(path)

    return run


def of_text(parse: Callable[[str], object]) -> Callable[[bytes, str, Path], object]:
    """Parse an input as text."""
    return lambda content, name, directory: parse(content.decode("utf-8", "replace"))


def packed(**members: bytes) -> bytes:
    """A tar archive below ``pkg-1.0``."""
    return debian_archive.tar(
        [
            debian_archive.member("pkg-1.0", kind="directory", mode=0o755),
            *(debian_archive.member(f"pkg-1.0/{name}", data) for name, data in members.items()),
            debian_archive.member("pkg-1.0/link", kind="symlink", target="first"),
        ]
    )


def wheel() -> dict[str, bytes]:
    """A wheel with a script, data and entry points."""
    with tempfile.TemporaryDirectory() as directory:
        contents = {
            "engine/__init__.py": b"version = 1\n",
            "engine-1.0.data/scripts/run": b"#!python\nprint('run')\n",
            "engine-1.0.data/data/share/engine.txt": b"data",
            "engine-1.0.dist-info/entry_points.txt": b"[console_scripts]\nserve = engine.cli:main.run\n",
        }
        small_engine.make_wheel(Path(directory), "engine", "1.0", files=contents)
        (path,) = Path(directory).iterdir()
        return {path.name: path.read_bytes()}


def parse_wheel(content: bytes, name: str, directory: Path) -> None:
    """A wheel as image layers and sources read it."""
    path = directory / name
    path.write_bytes(content)
    locked = LockedWheel("engine", "1.0", name, hashlib.sha256(content).hexdigest())
    for parse in (
        lambda: _wheel_layers.read_contents(locked, path, ImagePython("cpython-311", "3.11.2", "a70d0d0a")),
        lambda: drained(
            _archive._stream(WheelPin("p", "engine", "1.0", "0" * 64, name), path, "r", _archive._wheel_members(path))
        ),
    ):
        try:
            parse()
        except (Sm120kitError, zipfile.BadZipFile, NotImplementedError):
            continue


def parse_sdist(content: bytes, name: str, directory: Path) -> None:
    """An sdist, compressed or not, as git imports it."""
    path = directory / name
    path.write_bytes(content if content[:2] == b"\x1f\x8b" or len(content) % 3 == 0 else gzip.compress(content, 1))
    drained(_archive._stream(SdistPin("p", "pkg", "1.0", "0" * 64), path, "r", _archive._sdist_members(path)))


def parse_deb(content: bytes, name: str, directory: Path) -> None:
    """A Debian package, with ``content`` as its files, or damaged as a whole."""
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": CONTROL, "data.tar": content}
    whole = debian_archive.ar(parts)
    if len(content) % 4 == 0:
        whole = mutation.of_bytes(whole, random.Random(zlib.crc32(content)))
    (directory / name).write_bytes(whole)
    (directory / "root").mkdir()
    debian_files.read(directory / name, Unpacking(directory / "root", directory).add, ["usr/share/doc/*"])


def parse_layer(content: bytes, name: str, directory: Path) -> None:
    """A layer of an image."""
    (directory / "tree").mkdir()
    _rootfs.unpack(io.BytesIO(content), directory / "tree", directory / name)


def drained(pieces: Iterator[bytes]) -> None:
    for _ in pieces:
        pass


def parse_events(content: bytes, name: str, directory: Path) -> None:
    """A stream gives the same events wherever reads end."""
    whole, pieces = sse.Reader(), sse.Reader()
    cut = len(content) // 3 + 1
    events = [event for start in range(0, len(content), cut) for event in pieces.feed(content[start : start + cut])]
    assert whole.feed(content) == events
    assert whole.problem == pieces.problem


def safetensors() -> dict[str, bytes]:
    tensors = {
        "__metadata__": {"format": "pt"},
        "model.layers.0.q.weight": {"dtype": "U8", "shape": [4, 8], "data_offsets": [0, 32]},
        "model.layers.0.q.weight_scale": {"dtype": "F8_E4M3", "shape": [4, 1], "data_offsets": [32, 36]},
        "mtp.layers.0.weight": {"dtype": "BF16", "shape": [2], "data_offsets": [36, 40]},
    }
    return {"model.safetensors": json.dumps(tensors).encode()}


def parse_safetensors(content: bytes, name: str, directory: Path) -> None:
    """A safetensors file whose header is ``content``."""
    length = len(content) if len(content) % 8 else len(content) + random.Random(zlib.crc32(content)).choice((-1, 1, 2**40))
    (directory / name).write_bytes(max(length, 0).to_bytes(8, "little") + content + bytes(40))
    checkpoint.header(directory / name)


CONFIG_JSON = {
    "architectures": ["A"],
    "model_type": "a",
    "max_position_embeddings": 4096,
    "text_config": {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 256,
        "layer_types": ["full_attention", "linear_attention"],
        "max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "modelopt",
        "format": "nvfp4",
        "config_groups": {"group_0": {"weights": {"group_size": 16}}},
        "kv_cache_scheme": {"type": "float", "num_bits": 8},
        "weight_block_size": [128, 128],
    },
}


def parse_folder(content: bytes, name: str, directory: Path) -> None:
    """A model folder with a mutated JSON file."""
    parts = {"config.json": json.dumps(CONFIG_JSON).encode(), "hf_quant_config.json": b'{"quantization": {}}'}
    header = safetensors()["model.safetensors"]
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(40))
    for file, data in (parts | {name: content}).items():
        (directory / file).write_bytes(data)
    checkpoint.read(directory)


def registry_documents() -> dict[str, bytes]:
    """A manifest, a config, an index, a token and an error of a registry."""
    layer = {"mediaType": LAYER, "digest": f"sha256:{'a' * 64}", "size": 10}
    config = json.dumps(
        {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": [f"sha256:{'a' * 64}"]}, "config": {"Labels": {}}}
    ).encode()
    described = {"mediaType": CONFIG, "digest": f"sha256:{hashlib.sha256(config).hexdigest()}", "size": len(config)}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": [layer]}).encode()
    listed = {"mediaType": MANIFEST, "digest": f"sha256:{hashlib.sha256(manifest).hexdigest()}", "size": len(manifest)}
    platform = {"platform": {"os": "linux", "architecture": "amd64"}}
    return {
        "manifest": manifest,
        "config": config,
        "index": json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [listed | platform]}).encode(),
        "token": b'{"token": "abc", "access_token": "abc", "expires_in": 60}',
        "error": b'{"errors": [{"code": "DENIED", "message": "no", "detail": {}}]}',
        "challenge": b'Bearer realm="http://127.0.0.1/token",service="registry",scope="repository:a:pull"',
    }


def parse_registry(content: bytes, name: str, directory: Path) -> None:
    """An answer of a registry; digests of mutated documents are those that were requested."""
    documents = registry_documents() | {name: content}
    manifest, config = documents["manifest"], documents["config"]
    if name == "config":
        described = json.loads(manifest)
        described["config"] |= {"digest": f"sha256:{hashlib.sha256(config).hexdigest()}", "size": len(config)}
        manifest = json.dumps(described).encode()

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/token":
            return httpx2.Response(200, content=iter([documents["token"]]))
        if name in ("token", "challenge") and "Authorization" not in request.headers:
            challenge = documents["challenge"].replace(b"\n", b" ").replace(b"\r", b" ")
            return httpx2.Response(401, headers=[(b"WWW-Authenticate", challenge)])
        if name == "error":
            return httpx2.Response(403, content=iter([content]))
        if "/blobs/" in request.url.path:
            return httpx2.Response(200, content=iter([config]))
        if name == "index" and request.url.path.endswith("/latest"):
            return httpx2.Response(200, content=iter([content]))
        return httpx2.Response(200, content=iter([manifest]))

    with RegistryClient("127.0.0.1/a") as client:
        client._session._client = httpx2.Client(transport=httpx2.MockTransport(answer))
        image = client.image("latest")
        _ = image.labels, image.content, client.in_registry("latest")


PLAN = BuildPlan("flashinfer-1.0", "flashinfer", "1.0", "t", "c", groups=("all",), digest="c" * 64)


def shared_build() -> dict[str, bytes]:
    """A build in a shared cache: the record with its wheel, and the plan."""
    wheel = {"path": "x.whl", "sha256": hashlib.sha256(b"wheel").hexdigest(), "bytes": 5}
    record = record_json({"plan": PLAN.digest, "wheel": wheel, "modules": [], "kernels": 0, "left_out": []}).encode()
    return {"artifacts.json": record, "plan.json": record_json(PLAN).encode()}


def parse_shared(content: bytes, name: str, directory: Path) -> None:
    """An entry of a shared cache."""
    if name == "plan.json":
        (directory / name).write_bytes(content)
        read_record(BuildPlan, directory / name)
        return
    entry, own = directory / "entry", directory / "build" / PLAN.digest
    entry.mkdir()
    for file, text in (shared_build() | {"x.whl": b"wheel", name: content}).items():
        (entry / file).write_bytes(text)
    wheel_builds.fetch(PLAN, entry, own)
    assert not own.exists() or wheel_builds.published(PLAN, own)


def parse_layout(content: bytes, name: str, directory: Path) -> None:
    """An image layout with a mutated index, or a blob of another content under its name."""
    layout = Layout(directory / "oci")
    described = layout.add_blob(b"a", LAYER)
    config = {"os": "linux", "architecture": "amd64", "config": {"Labels": {"a": "b"}}, "history": [{"created_by": "x"}]}
    digest = layout.add_image([described], config).digest
    layout.tag(digest, "a:1")
    path = layout.directory / "index.json" if name == "index.json" else layout.path(digest)
    path.write_bytes(content)
    for manifest, _ in layout.images():
        layout.image(manifest.digest)
        layout.verify(manifest.digest)
    layout.used()


def layout_documents() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as directory:
        layout = Layout(Path(directory))
        described = layout.add_blob(b"a", LAYER)
        config = {"os": "linux", "architecture": "amd64", "config": {"Labels": {"a": "b"}}, "history": [{"created_by": "x"}]}
        digest = layout.add_image([described], config).digest
        layout.tag(digest, "a:1")
        return {"index.json": (layout.directory / "index.json").read_bytes(), "manifest": layout.path(digest).read_bytes()}


def parse_settings(content: bytes, name: str, directory: Path) -> None:
    """The user's configuration file."""
    (directory / name).write_bytes(content)
    with mock.patch.dict(os.environ, {config_file.VARIABLE: str(directory / name)}):
        config_file.values(("build",), BUILD.settable(), {*commands.COMMANDS.commands})


def parse_credentials(content: bytes, name: str, directory: Path) -> None:
    """docker login's configuration file. Helpers are not run: none is on PATH."""
    (directory / "config.json").write_bytes(content)
    with mock.patch.dict(os.environ, {"DOCKER_CONFIG": str(directory), "PATH": ""}):
        stored = stored_credentials("registry.example")
        _ = stored.basic if stored else None


def parse_compressed(content: bytes, name: str, directory: Path) -> None:
    """A compressed layer of a registry."""
    blob = Descriptor(f"{LAYER}+{name}", f"sha256:{'0' * 64}", len(content))
    pieces = iter([content[start : start + 100] for start in range(0, len(content), 100)])
    drained(decompressed(blob, pieces))


def parse_base(content: bytes, name: str, directory: Path) -> None:
    (directory / name).write_bytes(content)
    validate(bases.Base, read_toml(directory / name), directory / name)


def parse_patch(content: bytes, name: str, directory: Path) -> None:
    patch, _ = format.parse("flashinfer", Path(name), content)
    if patch:
        format.normal_form(patch)


def parse_address(text: str) -> None:
    redacted(text)
    endpoint = Endpoint.parse(text)
    endpoint.request_url("/v1/models")


def parse_code(text: str) -> None:
    """PTX."""
    for instruction in syntax.instructions(text):
        _ = instruction.modifiers, str(instruction)
    syntax.register_types(text)


def parse_metrics(text: str) -> None:
    for name in ("vllm:num_requests_running", "sglang:num_running_reqs"):
        _metrics.metric(text, name)


def results() -> dict[str, bytes]:
    return {"result.json": record_json(sweep.SWEEP).encode()}


def verified() -> dict[str, bytes]:
    """The record of a checked image."""
    with tempfile.TemporaryDirectory() as directory:
        layout_images.add_image(Workspace(Path(directory)), (1, 2), size=100)
        (record,) = Path(directory).glob("images/verified/*.json")
        return {"record.json": record.read_bytes()}


def images() -> dict[str, bytes]:
    """An index with a published image."""
    entry = {
        "repository": "registry.example/a/b",
        "tag": "1",
        "digest": f"sha256:{'a' * 64}",
        "recipe": "vllm-0.19.1",
        "build_id": "b" * 64,
        "verified": json.loads(verified()["record.json"]),
        "attested": None,
        "published": "2026-11-23T00:00:00Z",
    }
    return {"images.json": json.dumps({"format": image_index.FORMAT, "images": [entry]}).encode()}


def compressed() -> dict[str, bytes]:
    import zstandard

    content = random.Random(1).randbytes(300) + bytes(3000)
    return {"zstd": zstandard.compress(content)}


CONTROL = lzma.compress(debian_archive.tar([debian_archive.member("./control", debian_archive.control("pkg").encode())]))
BUILD: Any = Group(branch=commands.COMMANDS, path=()).get_command(None, "build")
PTX = b"""\
.version 9.0
.target sm_120a
.visible .entry kernel(.param .u64 a) {
  .reg .b32 %r<8>; .reg .pred %p<2>;
L: @%p1 mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 {%r1,%r2}, {%r3}, {%r4}, 1;
  // comment
  ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%r5+16]; bra L; ret;
}
"""
EVENTS = (
    b'\xef\xbb\xbfdata: {"choices": [{"delta": {"content": "a"}}]}\r\n\r\n'
    b"event: error\ndata: x\ndata\n\n: ping\n\ndata: [DONE]\n\n"
)
METRICS = (
    b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model="m"} 3.0\nsglang:num_running_reqs 2\n'
)
URLS = {"url": b"https://user:secret@[::1]:8000/v1?a=b#c", "host": b"127.0.0.1:8000", "plain": b"http://localhost/prefix/"}
CONFIG_TOML = (
    b'offline = true\njobs = 2\n[build]\nkernels = "all"\nmemory = 8.5\n[patch.drift]\nmirror = "https://example.org"\n'
)
DOCKER_LOGIN = b'{"auths": {"https://registry.example/v1/": {"auth": "YTpi"}}, "credHelpers": {}, "credsStore": ""}'
LOG = b"""\
2026-11-23 10:00:00 INFO vllm 0.19.1
RuntimeError: CUDA error: no kernel image is available for execution on the device
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
ImportError: libcudart.so.13: cannot open shared object file: No such file or directory
\x1b[31mNCCL WARN Cuda failure 'peer access is not supported between these two devices'\x1b[0m
Capturing CUDA graphs: 0%|          | 0/35 [00:00<?, ?it/s]
"""
DIFF = b"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
CHANGE = b"Subject\n\ndiff --git a/x b/x\nindex 1..2 100644\n" + DIFF

PARSERS: dict[str, Parser] = {
    "recipe": Parser(files("recipes/engines/*.toml"), mutation.of_toml, written(read_recipe)),
    "configuration": Parser(
        files("recipes/configurations/*.toml"), mutation.of_toml, written(lambda path: configurations.load(str(path)))
    ),
    "base": Parser(files("recipes/bases/*.toml"), mutation.of_toml, parse_base),
    "workload": Parser(files("recipes/workloads/*.toml"), mutation.of_toml, written(lambda path: workload.load(str(path)))),
    "settings": Parser(lambda: {"config.toml": CONFIG_TOML}, mutation.of_toml, parse_settings, 1),
    "lockfile": Parser(files("recipes/engines/flashinfer-*.lock.json", 60_000), mutation.of_json, written(lockfile.read), 2),
    "patch": Parser(files("patches/*/*.patch"), mutation.of_bytes, parse_patch, 6),
    "diff": Parser(lambda: {"a.diff": CHANGE}, mutation.of_bytes, written(mails.read_diffs), 3),
    "result": Parser(results, mutation.of_json, written(lambda path: figures.notes(result_file.read(path)))),
    "index of images": Parser(images, mutation.of_json, written(image_index.read_index)),
    "record": Parser(verified, mutation.of_json, written(lambda path: read_record(VerifiedImage, path))),
    "image layout": Parser(layout_documents, mutation.of_json, parse_layout, 2),
    "registry": Parser(
        registry_documents,
        lambda content, chance: (
            mutation.of_json(content, chance) if content[:1] == b"{" else mutation.of_bytes(content, chance)
        ),
        parse_registry,
        3,
    ),
    "shared build": Parser(shared_build, mutation.of_json, parse_shared, 1),
    "credentials": Parser(lambda: {"config.json": DOCKER_LOGIN}, mutation.of_json, parse_credentials),
    "compressed layer": Parser(compressed, mutation.of_bytes, parse_compressed),
    "layer": Parser(lambda: {"layer.tar": packed(first=b"1", second=b"2" * 600)}, mutation.of_tar, parse_layer, 5),
    "Debian package": Parser(lambda: {"pkg.deb": packed(first=b"1", second=b"2" * 600)}, mutation.of_tar, parse_deb, 4),
    "sdist": Parser(lambda: {"pkg-1.0.tar.gz": packed(first=b"1", second=b"2" * 600)}, mutation.of_tar, parse_sdist, 5),
    "wheel": Parser(wheel, mutation.of_zip, parse_wheel, 5),
    "safetensors header": Parser(safetensors, mutation.of_json, parse_safetensors, 5),
    "model folder": Parser(
        lambda: {
            "config.json": json.dumps(CONFIG_JSON).encode(),
            "hf_quant_config.json": b'{"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}',
            "model.safetensors.index.json": b'{"metadata": {}, "weight_map": {"mtp.layers.0.weight": "model.safetensors"}}',
        },
        mutation.of_json,
        parse_folder,
        4,
    ),
    "device code": Parser(
        lambda: {path.name: path.read_bytes() for path in sorted((DATA / "cubin").iterdir()) if path.suffix in CODE},
        mutation.of_bytes,
        written(cubin.read),
        6,
    ),
    "server-sent events": Parser(lambda: {"events": EVENTS}, mutation.of_bytes, parse_events, 8),
    "metrics": Parser(lambda: {"metrics": METRICS}, mutation.of_bytes, of_text(parse_metrics)),
    "URL": Parser(lambda: URLS, mutation.of_bytes, of_text(parse_address), 6),
    "log": Parser(
        lambda: {"log": LOG}, mutation.of_bytes, lambda content, name, directory: log_rules.explain(io.BytesIO(content)), 4
    ),
    "PTX": Parser(lambda: {"ptx": PTX}, mutation.of_bytes, of_text(parse_code)),
}
CODE = (".cubin", ".fatbin", ".so", ".o")


@dataclass
class Outcomes:
    """What a batch gave: results by kind, faults, and the longest time for one input in seconds."""

    parser: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0


def expired(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"longer than {LIMIT_S} s")


class _Writes:
    """Audit hook (PEP 578) that reports changes of the file system outside a directory, and connections."""

    def __init__(self) -> None:
        self.directory = ""
        self.faults: list[str] = []

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.directory:
            return
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event in ("os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.chown", "os.truncate", "os.utime"):
            beside = arguments[-1] if event in ("os.remove", "os.rmdir") else -1
            self._require_inside(event, arguments[0], beside)
        elif event in ("os.rename", "os.link", "os.symlink"):
            self._require_inside(event, arguments[1])
        elif event in ("socket.connect", "os.system", "os.exec"):
            self.faults.append(f"{event} {arguments[1:]!r}")

    def _require_inside(self, event: str, path: Any, beside: int = -1) -> None:
        """``beside`` is the descriptor of the directory that a relative path is in, as shutil.rmtree removes files."""
        if isinstance(path, int) or os.fspath(path) in (os.devnull, b"/dev/null"):
            return
        parent, name = os.path.split(os.fsdecode(path))
        start = "." if beside < 0 else f"/proc/self/fd/{beside}"
        if not f"{os.path.realpath(Path(start, parent))}/{name}".startswith(f"{self.directory}/"):
            self.faults.append(f"{event} {path!r}")


WRITES = _Writes()


def start_worker() -> None:
    """Limit the memory of a worker, and watch what it writes."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.addaudithook(WRITES)


def batch(name: str, count: int, seed: int) -> Outcomes:
    """Parse ``count`` mutated inputs of a parser."""
    parser, chance, outcomes = PARSERS[name], random.Random(f"{name} {seed}"), Outcomes(name)
    inputs = parser.inputs()
    signal.signal(signal.SIGALRM, expired)
    with (
        tempfile.TemporaryDirectory(prefix="sm120kit-mutations-", dir=MEMORY) as scratch,
        mock.patch.object(retry, "pause", lambda _: 0),
    ):
        parent = Path(os.path.realpath(scratch))
        tempfile.tempdir = str(parent)
        warnings.simplefilter("ignore")  # zipfile's for members that occur twice
        for number in range(count):
            file = chance.choice([*inputs])
            content = parser.mutate(inputs[file], chance)
            directory = parent / "input"
            directory.mkdir()
            started = time.perf_counter()
            signal.alarm(LIMIT_S)
            WRITES.directory, WRITES.faults = str(parent), []
            where = f"{name}, seed {seed}, input {number} ({file})"
            try:
                parser.parse(content, file, directory)
                outcomes.counts["parsed"] += 1
            except Sm120kitError as error:
                outcomes.counts[type(error).__name__] += 1
                str(error.message).encode("utf-8", "backslashreplace")
            except Exception:
                outcomes.faults.append(f"{where}: {traceback.format_exc(limit=-4)}")
            finally:
                signal.alarm(0)
                WRITES.directory = ""
            outcomes.faults += [f"{where}: {fault}" for fault in WRITES.faults]
            outcomes.slowest = max(outcomes.slowest, time.perf_counter() - started)
            shutil.rmtree(directory)
        left = [path.name for path in parent.iterdir()]
        outcomes.faults += [f"{name}, seed {seed}: left {path}" for path in left]
        tempfile.tempdir = None
    return outcomes


def run(count: int, seed: int, jobs: int, names: Sequence[str] = ()) -> dict[str, Outcomes]:
    """Run batches in processes; the sum of the outcomes of each parser."""
    names = names or [*PARSERS]
    weights = sum(PARSERS[name].weight for name in names)
    work = []
    for name in names:
        left = max(1, round(count * PARSERS[name].weight / weights))
        sizes = [min(BATCH, left - done) for done in range(0, left, BATCH)]
        work += [(name, size, seed + number) for number, size in enumerate(sizes)]
    totals = {name: Outcomes(name) for name in names}
    with ProcessPoolExecutor(jobs, initializer=start_worker) as pool:
        for outcomes in pool.map(batch, *zip(*work, strict=True)):
            total = totals[outcomes.parser]
            total.counts += outcomes.counts
            total.faults += outcomes.faults
            total.slowest = max(total.slowest, outcomes.slowest)
    return totals


def test_mutated_inputs_end_in_results_or_errors() -> None:
    print(f"SM120KIT_MUTATION_SEED={SEED}")
    totals = run(COUNT, SEED, JOBS)
    for name, total in totals.items():
        counts = ", ".join(f"{kind} {count}" for kind, count in total.counts.most_common())
        print(f"{name}: {counts}, faults {len(total.faults)}; at most {total.slowest:.2f} s")
    print(f"{sum(total.counts.total() + len(total.faults) for total in totals.values())} inputs")
    faults = [fault for total in totals.values() for fault in total.faults]
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:10])
    assert all(total.counts["parsed"] or total.counts.total() < 100 for total in totals.values()), "an input always fails"
