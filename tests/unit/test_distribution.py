"""Push and pull through a registry's HTTP API, against a registry with faults."""

from __future__ import annotations

import base64
import dataclasses
import json
import random
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from registry_server import Handler, RegistryServer, digest_of, registry_server

from sm120kit.core import retry
from sm120kit.core.errors import Mismatch, NotTrusted, RegistryFailed, Sm120kitError
from sm120kit.images.distribution import RegistryClient, _registry_session
from sm120kit.images.distribution._credentials import Credentials, stored_credentials
from sm120kit.images.oci import CONFIG, INDEX, LAYER, MANIFEST, Descriptor, Layout, manifest_of

NAME = "sm120kit/vllm"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials and no pauses."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setattr(retry, "PAUSE_SECONDS", 0)


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with registry_server() as running:
        yield running


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "oci")


def add_layer(layout: Layout, seed: int, size: int = 2**18) -> Descriptor:
    with layout.writer() as blob:
        blob.write(random.Random(seed).randbytes(size) + bytes(size))
        return blob.commit(LAYER)


def add_image(layout: Layout, *seeds: int) -> str:
    layers = [add_layer(layout, seed) for seed in seeds]
    config = {"os": "linux", "architecture": "amd64", "config": {"Labels": {"a": "b"}}}
    return layout.add_image(layers, config).digest


def push(server: RegistryServer, layout: Layout, manifest: str, name: str = NAME) -> str:
    with RegistryClient(f"{server.address}/{name}") as client:
        return client.push(layout, manifest, "tag")


def pull(server: RegistryServer, directory: Path, digest: str, name: str = NAME) -> tuple[Layout, str]:
    layout = Layout(directory)
    with RegistryClient(f"{server.address}/{name}") as client:
        manifest = client.pull(layout, client.image(digest)).digest
    layout.verify(manifest)
    return layout, manifest


def get_image(server: RegistryServer) -> None:
    with RegistryClient(f"{server.address}/{NAME}") as client:
        client.image("tag")


def fails(error: type[Sm120kitError], message: str, action: Callable[[], object]) -> str:
    with pytest.raises(error, match=message) as caught:
        action()
    assert caught.value.hint
    return caught.value.message


# ---- push and pull


def test_push_and_pull_preserve_the_image(server: RegistryServer, layout: Layout, tmp_path: Path) -> None:
    image = add_image(layout, 1, 2, 1)
    digest = push(server, layout, image)
    assert server.manifests[NAME, "tag"] == server.manifests[NAME, digest]
    layers = json.loads(server.manifests[NAME, digest][1])["layers"]
    assert {layer["mediaType"] for layer in layers} == {f"{LAYER}+zstd"}
    copy, manifest = pull(server, tmp_path / "copy", digest)
    assert manifest == image and copy.image(manifest) == layout.image(image)
    assert server.count("PUT", "digest=") == 3, "two layers and the config"
    assert not [*(layout.directory / "partial").iterdir()], "the compressed layers are not kept"


def test_compressed_layers_have_the_same_bytes_everywhere(server: RegistryServer, tmp_path: Path) -> None:
    digests = {push(server, Layout(tmp_path / name), add_image(Layout(tmp_path / name), 1, 2), name) for name in ("a", "b")}
    assert len(digests) == 1


def test_push_of_changed_layer_uploads_that_layer_only(server: RegistryServer, layout: Layout) -> None:
    push(server, layout, add_image(layout, 1, 2, 3))
    server.requests.clear()
    push(server, layout, add_image(layout, 1, 2, 4))
    assert server.count("PUT", "digest=") == 2, "the layer and the config"


def test_repeated_push_uploads_nothing(server: RegistryServer, layout: Layout) -> None:
    image = add_image(layout, 1, 2)
    digest = push(server, layout, image)
    server.requests.clear()
    assert push(server, layout, image) == digest
    assert server.count("POST") == 0


def test_pull_fetches_missing_and_changed_layers_only(server: RegistryServer, layout: Layout, tmp_path: Path) -> None:
    image = add_image(layout, 1, 2, 3)
    digest = push(server, layout, image)
    copy, manifest = pull(server, tmp_path / "copy", digest)
    first, second, _ = (copy.path(layer.digest) for layer in copy.layers(manifest))
    first.unlink()
    changed = bytearray(second.read_bytes())
    changed[1000] ^= 1
    second.write_bytes(changed)
    server.requests.clear()
    pull(server, tmp_path / "copy", digest)
    assert server.count("GET", "/blobs/") == 3, "two layers and the config"


def test_manifest_is_found_by_tag_and_digest(server: RegistryServer, layout: Layout) -> None:
    digest = push(server, layout, add_image(layout, 1))
    with RegistryClient(f"{server.address}/{NAME}") as client:
        assert client.in_registry("absent") is None and client.in_registry(f"sha256:{'1' * 64}") is None
        assert client.in_registry("tag") == client.in_registry(digest) == digest


def publish(server: RegistryServer, layout: Layout, image: str, layer: bytes, **changed: int) -> None:
    """Store an image with other compressed content, with the tag ``other``."""
    config = Descriptor.from_json(layout.manifest(image)["config"])
    for content in (layout.read(config.digest), layer):
        server.blobs[digest_of(content)] = content
        server.owners[digest_of(content)] = {NAME}
    described = Descriptor(f"{LAYER}+zstd", digest_of(layer), len(layer))
    server.manifests[NAME, "other"] = (MANIFEST, manifest_of(config, [dataclasses.replace(described, **changed)]))


# ---- uploads that fail


def test_dropped_upload_starts_again(server: RegistryServer, layout: Layout, tmp_path: Path) -> None:
    drops = iter([True, True])

    def drop(handler: Handler) -> bool:
        if handler.command != "PUT" or not next(drops, False):
            return False
        handler.rfile.read(5000)
        handler.drop()
        return True

    server.fault = drop
    image = add_image(layout, 1)
    digest = push(server, layout, image)
    assert pull(server, tmp_path / "copy", digest)[1] == image


def test_registry_that_drops_every_upload_is_given_up(server: RegistryServer, layout: Layout) -> None:
    def drop(handler: Handler) -> bool:
        if handler.command == "PUT":
            handler.drop()
        return handler.command == "PUT"

    server.fault = drop
    message = fails(RegistryFailed, "uploading sha256:", lambda: push(server, layout, add_image(layout, 1)))
    assert "drops the connection" in message and not server.manifests
    assert server.count("PUT") == retry.ATTEMPTS


def test_registry_that_stores_another_digest_is_refused(server: RegistryServer, layout: Layout) -> None:
    def lie(handler: Handler) -> bool:
        if handler.command != "PUT" or "digest=" not in handler.path:
            return False
        handler.body()
        handler.reply(201, Docker_Content_Digest=f"sha256:{'0' * 64}")
        return True

    server.fault = lie
    fails(NotTrusted, "the registry stored sha256:000", lambda: push(server, layout, add_image(layout, 1)))
    assert not server.manifests


def test_registry_that_changes_the_manifest_is_refused(server: RegistryServer, layout: Layout) -> None:
    def change(handler: Handler) -> bool:
        if handler.command != "PUT" or "/manifests/" not in handler.path:
            return False
        content = handler.body() + b" "
        server.manifests[NAME, "tag"] = (MANIFEST, content)
        handler.reply(201, Docker_Content_Digest=digest_of(content))
        return True

    server.fault = change
    fails(NotTrusted, "the registry stored sha256:", lambda: push(server, layout, add_image(layout, 1)))


def test_changed_layout_is_refused_before_anything_is_sent(server: RegistryServer, layout: Layout) -> None:
    image = add_image(layout, 1, 2)
    path = layout.path(layout.layers(image)[1].digest)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    fails(Mismatch, str(path), lambda: push(server, layout, image))
    assert not server.requests


# ---- downloads that fail


def test_dropped_download_starts_again(server: RegistryServer, layout: Layout, tmp_path: Path) -> None:
    image = add_image(layout, 1)
    digest = push(server, layout, image)
    blob = json.loads(server.manifests[NAME, digest][1])["layers"][0]["digest"]
    drops = iter([True, True])

    def drop(handler: Handler) -> bool:
        if not handler.path.endswith(blob) or not next(drops, False):
            return False
        handler.reply(200, server.blobs[blob][:100_000], Content_Length=str(len(server.blobs[blob])))
        handler.drop()
        return True

    server.fault = drop
    assert pull(server, tmp_path / "copy", digest)[1] == image


def test_registry_that_drops_every_download_is_given_up(server: RegistryServer, layout: Layout, tmp_path: Path) -> None:
    digest = push(server, layout, add_image(layout, 1, 2))

    def drop(handler: Handler) -> bool:
        if "/blobs/" in handler.path and handler.headers.get("Range") is None and "config" not in handler.path:
            handler.reply(200, b"x" * 10, Content_Length="1000000000")
            handler.drop()
            return True
        return False

    server.fault = drop
    fails(NotTrusted, "has 1000000000 bytes, ", lambda: pull(server, tmp_path / "copy", digest))
    server.fault = lambda handler: "/blobs/" in handler.path and (handler.drop() or True)
    fails(RegistryFailed, "drops the connection", lambda: pull(server, tmp_path / "copy", digest))
    assert not Layout(tmp_path / "copy").images()


@pytest.mark.parametrize("change", ["other", "equal when unpacked", "truncated", "longer"])
def test_blob_with_other_content_is_refused(server: RegistryServer, layout: Layout, tmp_path: Path, change: str) -> None:
    digest = push(server, layout, add_image(layout, 1))
    blob = json.loads(server.manifests[NAME, digest][1])["layers"][0]["digest"]
    content = server.blobs[blob]
    server.blobs[blob] = {
        "other": content[:-20] + bytes(20),
        "equal when unpacked": content[:4] + b"time" + content[8:],
        "truncated": content[:-1],
        "longer": content + b"x",
    }[change]
    message = {"other": "damaged|has the digest", "equal when unpacked": "has the digest"}.get(
        change
    ) or f"has {len(server.blobs[blob])} bytes, {len(content)} are in"
    fails(NotTrusted, message, lambda: pull(server, tmp_path / "copy", digest))
    copy = Layout(tmp_path / "copy")
    assert not copy.images() and not any((tmp_path / "copy" / "partial").iterdir())


def test_layer_with_a_wrong_size_in_the_manifest_is_refused(server: RegistryServer, layout: Layout, tmp_path: Path) -> None:
    image = add_image(layout, 1)
    packed = zstandard.compress(layout.path(layout.layers(image)[0].digest).read_bytes())
    publish(server, layout, image, packed, size=len(packed) - 1)
    fails(NotTrusted, "bytes, .* are in the manifest", lambda: pull(server, tmp_path / "copy", "other"))


def test_layer_of_another_image_is_refused(server: RegistryServer, layout: Layout, tmp_path: Path) -> None:
    image = add_image(layout, 1)
    publish(server, layout, image, zstandard.compress(b"another"))
    fails(NotTrusted, "unpacks to sha256:", lambda: pull(server, tmp_path / "copy", "other"))
    assert not Layout(tmp_path / "copy").images()


def test_decompression_bomb_is_stopped(
    server: RegistryServer, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sm120kit.core.archives.MAX_FREE_BYTES", 2**20)
    image = add_image(layout, 1)
    publish(server, layout, image, zstandard.compress(bytes(2**26)))
    fails(NotTrusted, "unpacks to more than", lambda: pull(server, tmp_path / "copy", "other"))
    assert sum(path.stat().st_size for path in (tmp_path / "copy").rglob("*") if path.is_file()) < 2**20


def test_manifest_that_takes_too_long_is_refused(server: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.manifests[NAME, "tag"] = (MANIFEST, b" " * 2**20)
    monkeypatch.setattr(_registry_session, "MAX_DOCUMENT_SECONDS", 0)
    fails(RegistryFailed, "for more than 0 s", lambda: get_image(server))


def test_huge_manifest_is_refused(server: RegistryServer) -> None:
    server.manifests[NAME, "tag"] = (MANIFEST, b" " * (5 * 2**20))
    fails(RegistryFailed, "sends more than 4 MiB", lambda: get_image(server))


@pytest.mark.parametrize(
    "document",
    [
        b"[]",
        b"{" * 100_000,
        b'{"mediaType": "x"}',
        json.dumps({"mediaType": MANIFEST, "layers": [], "config": {}}).encode(),
        json.dumps(
            {"mediaType": MANIFEST, "layers": "x", "config": {"mediaType": "", "digest": "../../etc", "size": 1}}
        ).encode(),
        json.dumps({"mediaType": INDEX, "manifests": [3]}).encode(),
        json.dumps(
            {
                "mediaType": MANIFEST,
                "layers": [],
                "config": {"mediaType": CONFIG, "digest": f"sha256:{'0' * 64}", "size": 2**40},
            }
        ).encode(),
    ],
)
def test_malformed_manifest_is_refused(server: RegistryServer, document: bytes) -> None:
    server.manifests[NAME, "tag"] = (MANIFEST, document)
    fails(RegistryFailed, "is not", lambda: get_image(server))


def test_config_of_another_form_is_refused(server: RegistryServer, layout: Layout) -> None:
    digest = push(server, layout, add_image(layout, 1))
    manifest = json.loads(server.manifests[NAME, digest][1])
    config = json.loads(server.blobs[manifest["config"]["digest"]]) | {"config": {"User": ["root"]}}
    content = json.dumps(config).encode()
    server.blobs[digest_of(content)], server.owners[digest_of(content)] = content, {NAME}
    manifest["config"] |= {"digest": digest_of(content), "size": len(content)}
    server.manifests[NAME, "tag"] = (MANIFEST, json.dumps(manifest).encode())
    fails(RegistryFailed, "User of an image cannot be", lambda: get_image(server))


def test_manifest_with_another_digest_is_refused(server: RegistryServer, layout: Layout) -> None:
    digest = push(server, layout, add_image(layout, 1))
    kind, content = server.manifests[NAME, digest]
    server.manifests[NAME, digest] = (kind, content + b" ")
    with RegistryClient(f"{server.address}/{NAME}") as client:
        fails(NotTrusted, "the registry delivers sha256:", lambda: client.image(digest))
        fails(NotTrusted, "the registry delivers sha256:", lambda: client.in_registry(digest))


# ---- authentication, redirects, limits of requests


def log_in(tmp_path: Path, registry: str, **entry: str) -> None:
    (tmp_path / "docker").mkdir(exist_ok=True)
    entry = entry or {"auth": base64.b64encode(b"user:secret-password").decode()}
    (tmp_path / "docker" / "config.json").write_text(json.dumps({"auths": {registry: entry}}))


def basic(handler: Handler) -> bool:
    if handler.headers.get("Authorization") == f"Basic {base64.b64encode(b'user:secret-password').decode()}":
        return False
    handler.body()
    handler.reply(401, WWW_Authenticate='Basic realm="x"')
    return True


def test_basic_authentication(server: RegistryServer, layout: Layout, tmp_path: Path) -> None:
    server.fault = basic
    image = add_image(layout, 1)
    assert "requires credentials" in fails(RegistryFailed, server.address, lambda: push(server, layout, image))
    log_in(tmp_path, server.address)
    push(server, layout, image)


def token_server(server: RegistryServer, expired: Callable[[Handler, int], bool]) -> Callable[[Handler], bool]:
    """A registry with tokens; ``expired`` is called with a request and the number of its token, -1 for none."""
    tokens: list[str] = []

    def check(handler: Handler) -> bool:
        if handler.path.startswith("/token"):
            scopes = [part for part in handler.path.split("&") if part.startswith("scope=")]
            if not scopes or basic(handler):
                return True
            tokens.append(f"token-{len(tokens)}")
            handler.reply(200, json.dumps({"token": tokens[-1]}).encode())
            return True
        token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        if not expired(handler, tokens.index(token) if token in tokens else -1):
            return False
        handler.body()
        challenge = f'Bearer realm="http://{server.address}/token",service="s",scope="repository:x:pull"'
        handler.reply(401, WWW_Authenticate=challenge)
        return True

    return check


def test_tokens_that_expire_are_renewed(server: RegistryServer, layout: Layout, tmp_path: Path) -> None:
    """A token is valid for three requests; each request is refused at most once."""
    log_in(tmp_path, f"https://{server.address}/v2/")
    uses: Counter[int] = Counter()
    refused: set[tuple[str, str]] = set()

    def expired(handler: Handler, token: int) -> bool:
        uses[token] += 1
        request = (handler.command, handler.path)
        if token >= 0 and (uses[token] <= 3 or request in refused):
            return False
        refused.add(request)
        return True

    server.fault = token_server(server, expired)
    image = add_image(layout, 1, 2)
    digest = push(server, layout, image)
    assert pull(server, tmp_path / "copy", digest)[1] == image
    assert server.count("GET", "^/token.*repository%3Asm120kit%2Fvllm%3Apull%2Cpush") > 1


def test_token_of_another_thread_that_expired_is_renewed(server: RegistryServer, layout: Layout, tmp_path: Path) -> None:
    """Two layers are looked up; the refusal of the first arrives when the second has a token, which expires."""
    log_in(tmp_path, f"https://{server.address}/v2/")
    looked_up: list[str] = []
    used = threading.Event()

    def expired(handler: Handler, token: int) -> bool:
        if handler.command != "HEAD" or "/blobs/" not in handler.path:
            return token < 0
        looked_up.append(handler.path)
        if handler.path != looked_up[0]:
            if token >= 0:
                used.set()
            return token < 0
        if token < 0:
            assert used.wait(60)
        return token < 1

    server.fault = token_server(server, expired)
    push(server, layout, add_image(layout, 1, 2))
    assert server.count("GET", "^/token.*repository%3Asm120kit%2Fvllm%3Apull%2Cpush") == 2


def test_refused_credentials_are_reported_without_them(server: RegistryServer, layout: Layout, tmp_path: Path) -> None:
    log_in(tmp_path, server.address)

    def loop(handler: Handler) -> bool:
        handler.body()
        if handler.path.startswith("/token"):
            handler.reply(200, b'{"token": "x"}')
        else:
            handler.reply(401, WWW_Authenticate=f'Bearer realm="http://{server.address}/token"')
        return True

    server.fault = loop
    message = fails(RegistryFailed, "refuses the credentials", lambda: push(server, layout, add_image(layout, 1)))
    assert "secret-password" not in message and len(server.requests) == 3


def test_secrets_that_a_registry_repeats_are_not_printed(server: RegistryServer, tmp_path: Path) -> None:
    log_in(tmp_path, server.address)

    def repeat(handler: Handler) -> bool:
        if basic(handler):
            return True
        handler.body()
        text = f"{handler.headers['Authorization']} secret-password"
        handler.reply(403, json.dumps({"errors": [{"code": "DENIED", "message": text}]}).encode())
        return True

    server.fault = repeat
    message = fails(RegistryFailed, "HTTP status 403", lambda: get_image(server))
    assert "DENIED: Basic *** ***" in message


def test_credentials_do_not_follow_a_redirect(server: RegistryServer, layout: Layout, tmp_path: Path) -> None:
    log_in(tmp_path, server.address)
    image = add_image(layout, 1)
    with registry_server() as storage:
        server.fault = basic
        digest = push(server, layout, image)
        storage.blobs, storage.owners = server.blobs, server.owners

        def redirect(handler: Handler) -> bool:
            if basic(handler):
                return True
            if "/blobs/" in handler.path:
                handler.reply(307, Location=f"http://{storage.address}{handler.path}?X-Amz-Signature=abc")
            return "/blobs/" in handler.path

        server.fault = redirect
        assert pull(server, tmp_path / "copy", digest)[1] == image
        assert len(storage.requests) == 2
        assert not any("authorization" in map(str.lower, headers) for headers in storage.headers)


@pytest.mark.parametrize("target", ["http://192.0.2.1/x", "file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_redirect_without_https_is_refused(server: RegistryServer, layout: Layout, tmp_path: Path, target: str) -> None:
    digest = push(server, layout, add_image(layout, 1))

    def redirect(handler: Handler) -> bool:
        if "/blobs/" in handler.path:
            handler.reply(302, Location=target)
        return "/blobs/" in handler.path

    server.fault = redirect
    fails(RegistryFailed, "which is not https", lambda: pull(server, tmp_path / "copy", digest))


def test_endless_redirects_are_refused(server: RegistryServer) -> None:
    server.fault = lambda handler: handler.reply(302, Location=handler.path) or True
    fails(RegistryFailed, "redirects more than 5 times", lambda: get_image(server))


@pytest.mark.parametrize("location", ["", "http://[::1", "https://[bad/"])
def test_malformed_url_for_an_upload_is_refused(server: RegistryServer, layout: Layout, location: str) -> None:
    server.fault = lambda handler: handler.command == "POST" and (handler.reply(202, Location=location) or True)
    fails(RegistryFailed, "names no URL for the upload", lambda: push(server, layout, add_image(layout, 1)))


def test_retry_after_is_obeyed(server: RegistryServer, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    limits = iter(["7", "0", "Wed, 21 Oct 2015 07:28:00 GMT"])

    def limit(handler: Handler) -> bool:
        value = next(limits, None)
        if value is not None:
            handler.reply(429, Retry_After=value)
        return value is not None

    server.fault = limit
    with RegistryClient(f"{server.address}/{NAME}") as client:
        assert client.in_registry("tag") is None
    assert waits == [7, 0, 0] and len(server.requests) == 4
    server.fault = lambda handler: handler.reply(429, Retry_After="3600") or True
    with RegistryClient(f"{server.address}/{NAME}") as client:
        fails(RegistryFailed, "accepts the next request in 3600 s", lambda: client.in_registry("tag"))
    assert len(server.requests) == 5


def test_overloaded_registry_is_given_up(server: RegistryServer) -> None:
    server.fault = lambda handler: handler.reply(503) or True
    with RegistryClient(f"{server.address}/{NAME}") as client:
        fails(RegistryFailed, "HTTP status 503", lambda: client.in_registry("tag"))
    assert len(server.requests) == retry.ATTEMPTS


def test_absent_registry_is_reported() -> None:
    with RegistryClient("127.0.0.1:1/x") as client:
        fails(RegistryFailed, "127.0.0.1:1 does not respond", lambda: client.in_registry("tag"))


# ---- docker login


def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "docker-credential-test"
    program.write_text(f"#!/bin/sh\nread name\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


def write_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text(text)


@pytest.mark.parametrize("config", [{"credHelpers": {"r.example": "test"}}, {"credsStore": "test"}])
def test_credential_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object]) -> None:
    write_config(tmp_path, json.dumps(config))
    helper(tmp_path, monkeypatch, """echo '{"Username": "u", "Secret": "'"$name"'"}'""")
    assert stored_credentials("r.example") == Credentials("u", "r.example")


def test_identity_token_of_a_helper_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path, '{"credsStore": "test"}')
    helper(tmp_path, monkeypatch, """echo '{"Username": "<token>", "Secret": "t"}'""")
    fails(RegistryFailed, "an identity token is not read", lambda: stored_credentials("r.example"))


def test_helper_without_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path, json.dumps({"credsStore": "test", "auths": {"r.example": {"auth": "dTpw"}}}))
    helper(tmp_path, monkeypatch, "echo credentials not found in native keychain; exit 1")
    assert stored_credentials("r.example") == Credentials("u", "p")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo broken; exit 1", "broken"),
        ("echo x", "no credentials for r.example"),
        ("true", "no credentials for r.example"),
    ],
)
def test_helper_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str) -> None:
    write_config(tmp_path, '{"credsStore": "test"}')
    helper(tmp_path, monkeypatch, script)
    fails(RegistryFailed, message, lambda: stored_credentials("r.example"))


def test_missing_helper(tmp_path: Path) -> None:
    write_config(tmp_path, '{"credsStore": "absent"}')
    fails(RegistryFailed, "docker-credential-absent", lambda: stored_credentials("r.example"))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"auths": 1}', '{"auths": {"r.example": {"auth": "%"}}}', '{"auths": {"r.example": 1}}']
)
def test_malformed_docker_configuration(tmp_path: Path, text: str) -> None:
    write_config(tmp_path, text)
    fails(RegistryFailed, "config.json of docker login", lambda: stored_credentials("r.example"))


def test_credentials_of_docker_hub(tmp_path: Path) -> None:
    write_config(tmp_path, json.dumps({"auths": {"https://index.docker.io/v1/": {"auth": "dTpw"}}}))
    assert stored_credentials("docker.io") == Credentials("u", "p")
    assert stored_credentials("r.example") is None
    assert "p" not in repr(stored_credentials("docker.io"))
