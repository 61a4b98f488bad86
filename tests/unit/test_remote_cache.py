"""The cache of builds in a registry (``--cache``), with a registry whose responses the tests replace."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import layout_images
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from registry_server import Handler, RegistryServer, digest_of, registry_server

from sm120kit.core import reporting
from sm120kit.core.errors import BadInput, RegistryFailed
from sm120kit.core.record_files import record_json, write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks
from sm120kit.images.attestation import _signature
from sm120kit.images.image_inputs import context_of
from sm120kit.images.image_records import BuiltWheel
from sm120kit.images.oci import Layout
from sm120kit.images.remote_cache import ARTIFACT, CacheAccess, RegistryCache
from sm120kit.sources.source_records import LockedWheel
from sm120kit.wheels.build_records import Artifacts, BuildPlan
from sm120kit.wheels.published_wheels import published, push, remote_key, shared

KEY = "flashinfer-" + "a" * 64
FILES = {"one.whl": b"wheel" * 1000, "logs/compile.log": b"compiled"}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RegistryServer]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-docker"))
    monkeypatch.setattr("sm120kit.core.retry.PAUSE_SECONDS", 0)
    with registry_server() as server:
        yield server


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(reporting, "warn", lines.append)
    return lines


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    """Files of two pairs of keys: ours.pem, ours.pub, other.pem, other.pub."""
    files = {}
    for name in ("ours", "other"):
        key, pem = ed25519.Ed25519PrivateKey.generate(), serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        for suffix, content in (("pem", private), ("pub", public)):
            files[f"{name}.{suffix}"] = tmp_path / f"{name}.{suffix}"
            files[f"{name}.{suffix}"].write_bytes(content)
    return files


def cache(registry: RegistryServer, access: CacheAccess | None = None) -> RegistryCache:
    return RegistryCache(f"{registry.address}/team/cache", access or CacheAccess())


def signing(keys: dict[str, Path], name: str = "ours") -> CacheAccess:
    return CacheAccess(keys["ours.pub"], True, _signature.signer(keys[f"{name}.pem"]))


def written(directory: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def fetched(cache: RegistryCache, directory: Path, key: str = KEY) -> dict[str, bytes] | None:
    """The files of an entry; None if it is not used."""
    directory.mkdir(exist_ok=True)
    if not cache.fetch(key, directory):
        return None
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def manifest(registry: RegistryServer, key: str = KEY) -> dict[str, object]:
    return dict(json.loads(registry.manifests["team/cache", key][1]))


def replace_manifest(registry: RegistryServer, document: object, key: str = KEY) -> None:
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    kind = registry.manifests["team/cache", key][0]
    registry.manifests["team/cache", key] = registry.manifests["team/cache", digest_of(content)] = (kind, content)


def test_entry_is_fetched_as_it_was_pushed(registry: RegistryServer, warnings: list[str], tmp_path: Path) -> None:
    source = written(tmp_path / "build")
    pushing = cache(registry, CacheAccess(push=True))
    pushing.push(KEY, source)
    assert manifest(registry)["artifactType"] == ARTIFACT
    assert fetched(cache(registry), tmp_path / "copy") == FILES
    assert len(warnings) == 1 and "signature not verified; pass `--trust KEY`" in warnings[0]
    puts = registry.count("PUT")
    pushing.push(KEY, source)
    assert registry.count("PUT") == puts, "what the registry has is not sent again"


def test_entry_is_pushed_on_request_only(registry: RegistryServer, tmp_path: Path) -> None:
    cache(registry).push(KEY, written(tmp_path / "build"))
    assert not registry.requests and fetched(cache(registry), tmp_path / "copy") is None


def test_only_signed_entries_are_used_with_a_key(
    registry: RegistryServer, keys: dict[str, Path], warnings: list[str], tmp_path: Path
) -> None:
    source, trusting = written(tmp_path / "build"), CacheAccess(keys["ours.pub"])
    cache(registry, CacheAccess(push=True)).push(KEY, source)
    assert fetched(cache(registry, trusting), tmp_path / "unsigned") is None
    assert "is not signed" in warnings[-1]
    cache(registry, dataclasses.replace(signing(keys, "other"), trusted=None)).push("other-" + "b" * 64, source)
    assert fetched(cache(registry, trusting), tmp_path / "foreign", "other-" + "b" * 64) is None
    assert "is not signed with" in warnings[-1]
    cache(registry, signing(keys)).push(KEY, source)  # replaces the one that is not signed
    del warnings[:]
    assert fetched(cache(registry, trusting), tmp_path / "signed") == FILES
    assert not warnings


def test_signature_is_of_this_entry_and_these_files(
    registry: RegistryServer, keys: dict[str, Path], warnings: list[str], tmp_path: Path
) -> None:
    cache(registry, signing(keys)).push(KEY, written(tmp_path / "build"))
    registry.manifests["team/cache", "vllm-1"] = registry.manifests["team/cache", KEY]
    assert fetched(cache(registry, signing(keys)), tmp_path / "moved", "vllm-1") is None
    assert "other files or another entry" in warnings[-1]
    changed = manifest(registry)
    evil = b"evil"
    changed["layers"][0] |= {"digest": digest_of(evil), "size": len(evil)}  # type: ignore[index]
    registry.blobs[digest_of(evil)], registry.owners[digest_of(evil)] = evil, {"team/cache"}
    replace_manifest(registry, changed)
    assert fetched(cache(registry, signing(keys)), tmp_path / "evil") is None
    assert "other files or another entry" in warnings[-1]
    assert not list((tmp_path / "evil").iterdir())


def _without_layers(document: dict[str, object]) -> object:
    return {**document, "layers": []}


def _without_titles(document: dict[str, object]) -> object:
    return {**document, "layers": [{**layer, "annotations": {}} for layer in document["layers"]]}  # type: ignore[attr-defined]


def _named(name: str) -> Callable[[dict[str, object]], object]:
    def rename(document: dict[str, object]) -> object:
        (first, *rest) = document["layers"]  # type: ignore[misc]
        return {**document, "layers": [{**first, "annotations": {"org.opencontainers.image.title": name}}, *rest]}  # type: ignore[has-type]

    return rename


@pytest.mark.parametrize(
    "change",
    [
        _without_layers,
        _without_titles,
        _named("../evil"),
        _named("/etc/evil"),
        _named("logs/../../evil"),
        _named(".hidden"),
        _named("two.whl"),
        _named("two.whl/one.whl"),
        lambda document: {**document, "artifactType": "application/vnd.other"},
        lambda document: {key: value for key, value in document.items() if key != "artifactType"},
        lambda document: {**document, "layers": [{"digest": "sha256:1"}]},
        lambda document: {**document, "layers": [{**layer, "size": 2**40} for layer in document["layers"]]},
        lambda document: {**document, "layers": 500 * document["layers"]},
        lambda document: [document],
        lambda document: b"\xff",
    ],
)
def test_malformed_entry_is_not_used(
    registry: RegistryServer,
    warnings: list[str],
    tmp_path: Path,
    change: Callable[[dict[str, object]], object],
) -> None:
    cache(registry, CacheAccess(push=True)).push(KEY, written(tmp_path / "build", {"two.whl": b"2", "one.whl": b"1"}))
    replace_manifest(registry, change(manifest(registry)))
    assert fetched(cache(registry), tmp_path / "copy") is None
    assert warnings and not list((tmp_path / "copy").iterdir())


def test_changed_file_is_not_used(registry: RegistryServer, warnings: list[str], tmp_path: Path) -> None:
    cache(registry, CacheAccess(push=True)).push(KEY, written(tmp_path / "build"))
    registry.blobs[digest_of(FILES["one.whl"])] = b"x" + FILES["one.whl"][1:]
    assert fetched(cache(registry), tmp_path / "copy") is None
    assert "the registry's copy has the digest" in warnings[-1]


def test_registry_that_fails_is_not_used_again(registry: RegistryServer, warnings: list[str], tmp_path: Path) -> None:
    cache(registry, CacheAccess(push=True)).push(KEY, written(tmp_path / "build"))

    def fault(handler: Handler) -> bool:
        if digest_of(FILES["one.whl"]) not in handler.path:
            return False
        handler.send_response(200)
        handler.send_header("Content-Length", "5000")
        handler.end_headers()
        handler.wfile.write(FILES["one.whl"][:100])
        handler.drop()
        return True

    registry.fault = fault
    reading = cache(registry)
    assert fetched(reading, tmp_path / "copy") is None
    assert "is not used" in warnings[-1]
    before = len(registry.requests), len(warnings)
    assert fetched(reading, tmp_path / "again") is None
    assert (len(registry.requests), len(warnings)) == before


def test_half_pushed_entry_does_not_exist(registry: RegistryServer, warnings: list[str], tmp_path: Path) -> None:
    def fault(handler: Handler) -> bool:
        if handler.command != "PUT" or "/manifests/" not in handler.path:
            return False
        handler.body()
        handler.reply(500)
        return True

    registry.fault = fault
    cache(registry, CacheAccess(push=True)).push(KEY, written(tmp_path / "build"))
    assert "is not used" in warnings[-1] and registry.blobs
    registry.fault = lambda handler: False
    assert fetched(cache(registry), tmp_path / "copy") is None


def test_entry_with_damaged_statement_is_replaced(
    registry: RegistryServer, keys: dict[str, Path], warnings: list[str], tmp_path: Path
) -> None:
    """The transfer that fails closes its connections, and the push needs new ones."""
    source = written(tmp_path / "build")
    cache(registry, signing(keys)).push(KEY, source)
    layers = list(manifest(registry)["layers"])  # type: ignore[call-overload]
    (statement,) = [layer["digest"] for layer in layers if layer["mediaType"].endswith("statement.v1+json")]
    registry.blobs[statement] = bytes(len(registry.blobs[statement]))
    registry.owners[statement].clear()  # it is sent again
    cache(registry, signing(keys)).push(KEY, source)
    assert fetched(cache(registry, CacheAccess(keys["ours.pub"])), tmp_path / "copy") == FILES


def test_entry_that_lacks_a_file_is_pushed_again(registry: RegistryServer, warnings: list[str], tmp_path: Path) -> None:
    source = written(tmp_path / "build")
    cache(registry, CacheAccess(push=True)).push(KEY, source)
    del registry.blobs[digest_of(FILES["one.whl"])]
    cache(registry, CacheAccess(push=True)).push(KEY, source)
    assert fetched(cache(registry), tmp_path / "copy") == FILES


def test_unusable_repository_and_key_are_refused_at_once(registry: RegistryServer, tmp_path: Path) -> None:
    with pytest.raises(RegistryFailed, match="is not a repository"):
        RegistryCache("https://registry.example/cache", CacheAccess())
    with pytest.raises(BadInput, match="absent"):
        cache(registry, CacheAccess(tmp_path / "absent.pub"))
    assert not registry.requests


def plan_of(digest: str = "c" * 64) -> BuildPlan:
    return BuildPlan("flashinfer-1.0", "flashinfer", "1.0", "tree", "commit", groups=("all",), digest=digest)


def build_files(plan: BuildPlan, wheel: bytes = b"wheel") -> dict[str, bytes]:
    """The files of a build of a plan."""
    listed = {"path": "x.whl", "sha256": digest_of(b"wheel")[7:], "bytes": 5}
    record = {"plan": plan.digest, "wheel": listed, "modules": [], "kernels": 0, "left_out": []}
    return {"artifacts.json": record_json(record).encode(), "x.whl": wheel}


def test_build_of_another_machine_is_kept(registry: RegistryServer, tmp_path: Path) -> None:
    plan, workspace = plan_of(), Workspace.open(tmp_path / "state")
    directory = workspace.build(plan.engine, plan.digest)
    cache(registry, CacheAccess(push=True)).push(remote_key(plan), written(tmp_path / "build", build_files(plan)))
    artifacts = shared(plan, directory, cache(registry))
    assert isinstance(artifacts, Artifacts) and (directory / "x.whl").read_bytes() == b"wheel"
    requests = len(registry.requests)
    assert shared(plan, directory, cache(registry)) == artifacts and len(registry.requests) == requests


def test_copy_without_verified_signature_is_reported_and_not_used_with_a_key(
    registry: RegistryServer, keys: dict[str, Path], warnings: list[str], tmp_path: Path
) -> None:
    plan, workspace = plan_of(), Workspace.open(tmp_path / "state")
    directory = workspace.build(plan.engine, plan.digest)
    cache(registry, CacheAccess(push=True)).push(remote_key(plan), written(tmp_path / "build", build_files(plan)))
    assert shared(plan, directory, cache(registry)) and "pass `--trust KEY`" in warnings[-1]
    del warnings[:]
    assert published(plan, directory) and "its signature was not verified" in warnings[-1]
    trusting = cache(registry, signing(keys))
    assert published(plan, directory, trusting) is None
    assert not push(plan, directory, trusting), "it would be signed"
    assert shared(plan, directory, trusting) is None and not directory.exists()
    trusting.push(remote_key(plan), tmp_path / "build")
    del warnings[:]
    assert shared(plan, directory, trusting) and published(plan, directory) and not warnings
    other = cache(registry, CacheAccess(keys["other.pub"]))
    assert published(plan, directory, other) is None


@pytest.mark.parametrize(
    "files",
    [
        lambda plan: build_files(dataclasses.replace(plan, digest="0" * 64)),
        lambda plan: build_files(plan, wheel=b"other"),
        lambda plan: {"x.whl": b"wheel"},
        lambda plan: {**build_files(plan), "artifacts.json": b"{}"},
    ],
)
def test_entry_that_is_no_build_of_the_plan_is_not_used(
    registry: RegistryServer,
    warnings: list[str],
    tmp_path: Path,
    files: Callable[[BuildPlan], dict[str, bytes]],
) -> None:
    plan, workspace = plan_of(), Workspace.open(tmp_path / "state")
    directory = workspace.build(plan.engine, plan.digest)
    cache(registry, CacheAccess(push=True)).push(remote_key(plan), written(tmp_path / "build", files(plan)))
    assert shared(plan, directory, cache(registry)) is None
    assert "not used" in warnings[-1]
    assert not list(directory.parent.iterdir()), "nothing of it is kept"


@pytest.mark.parametrize("signed", [False, True])
def test_image_with_a_wheel_of_an_unsigned_cache_is_recorded_as_such(
    signed: bool, registry: RegistryServer, keys: dict[str, Path], tmp_path: Path
) -> None:
    plan, workspace = plan_of(), Workspace.open(tmp_path / "state")
    access = signing(keys)
    cache(registry, access).push(remote_key(plan), written(tmp_path / "build", build_files(plan)))
    artifacts = shared(plan, workspace.build(plan.engine, plan.digest), cache(registry, access if signed else CacheAccess()))
    assert artifacts
    manifest, _ = layout_images.add_image(workspace, (1,), size=2**12)
    image = Layout(workspace.root / "oci").image(manifest)
    assert checks.signature(image, workspace) == ()
    context = context_of(image, workspace)
    wheel = BuiltWheel(LockedWheel("x", "1", "x.whl", artifacts.wheel.sha256), {"plan": "stated by the wheel"})
    write_record(workspace.root / "images" / context.digest / "context.json", dataclasses.replace(context, ours=(wheel,)))
    details = [check.detail for check in checks.signature(image, workspace)]
    assert [text for text in details if "a wheel is from the cache" in text] == details and bool(details) != signed
