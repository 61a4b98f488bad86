"""Requirements on published images: name, signature and age. No daemon is needed to refuse an image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from sm120kit.cli import main
from sm120kit.core import console, reporting
from sm120kit.core.errors import BadInput, NotAttested, NotTrusted, NotVerified, RegistryFailed
from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import attestation, publication
from sm120kit.images import published_images as published
from sm120kit.images.image_index import FORMAT, PublishedIndex, read_index
from sm120kit.images.image_inputs import built_locally
from sm120kit.images.image_records import Check, CheckResult, Image, ImageContext, PublishedImage, VerifiedImage, image_name
from sm120kit.images.published_images import NewestImage, Source

RECIPE, PLATFORM = "vllm-0.19.1", "linux/amd64"
CONTEXT = "4" * 64
NAME = image_name("vllm", "0.19.1", CONTEXT)
LABELS = {
    "org.opencontainers.image.version": "0.19.1",
    "sm120kit.kind": "vllm",
    "sm120kit.recipe": RECIPE,
    "sm120kit.build-id": "b" * 64,
    "sm120kit.context": CONTEXT,
    "sm120kit.reference": NAME,
}
IMAGE = Image("sha256:1", "c" * 64, PLATFORM, (), LABELS, "1000", 1)
VERIFIED = VerifiedImage(IMAGE, NAME, "5" * 64, (Check("base", "python", CheckResult.PASSED),), {})
BUILD_CONTEXT = ImageContext(
    digest=CONTEXT,
    kind="vllm",
    base=f"debian@sha256:{'5' * 64}",
    reference=NAME,
    labels=LABELS,
    locked=(),
    ours=(),
)
OLD, MIDDLE, NEW = (f"2026-0{month}-01T00:00:00Z" for month in (1, 5, 9))


def entry(published: str = MIDDLE, **changed: Any) -> PublishedImage:
    image = PublishedImage("r.example/vllm", NAME.rpartition(":")[2], f"sha256:{'d' * 64}", RECIPE, "b" * 64, VERIFIED)
    return replace(image, published=published, **changed)


def index(directory: Path, *entries: PublishedImage) -> Path:
    directory.mkdir(exist_ok=True)
    write_record(directory / "images.json", PublishedIndex(FORMAT, entries))
    return directory / "images.json"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "state")


def key(directory: Path, name: str) -> tuple[Path, Path]:
    """Create a key and return the files of its private and public part."""
    new, pem = ed25519.Ed25519PrivateKey.generate(), serialization.Encoding.PEM
    private, public = directory / f"{name}.pem", directory / f"{name}.pub"
    private.write_bytes(new.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(new.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def signed(directory: Path, private: Path, image: PublishedImage) -> Path:
    directory.mkdir(exist_ok=True)
    files = attestation.write(image, BUILD_CONTEXT, directory, private)
    return index(directory, replace(image, attested=files))


def record_pull(image: PublishedImage, source: Source, workspace: Workspace) -> None:
    """Record that an image was pulled, as ``published.pull`` does."""
    path = published._newest_path(image, source, workspace)
    write_record(path, NewestImage(image.published, image.repository, image.tag))


def labelled(**changed: str) -> Image:
    return replace(IMAGE, labels=LABELS | {f"sm120kit.{key}": value for key, value in changed.items()})


# ---- names


def test_canonical_name_follows_from_kind_version_and_context() -> None:
    assert IMAGE.canonical_name == NAME == f"sm120kit/vllm:0.19.1-sm120kit.{'4' * 12}"
    local = replace(IMAGE, labels=LABELS | {"org.opencontainers.image.version": "0.19.1+local"})
    assert local.canonical_name == NAME
    for changed in (
        {"reference": "python:3.12"},
        {"kind": "other"},
        {"context": "5" * 64},
        {"context": "4" * 12},
        {"kind": "../x", "reference": image_name("../x", "0.19.1", CONTEXT)},
        {"kind": "", "reference": image_name("", "0.19.1", CONTEXT)},
        {"kind": "x:y/z", "reference": image_name("x:y/z", "0.19.1", CONTEXT)},
    ):
        assert labelled(**changed).canonical_name == "", changed
    assert replace(IMAGE, labels={}).canonical_name == ""


@pytest.mark.parametrize("image", [IMAGE, labelled(reference="python:3.12"), replace(IMAGE, labels={})])
def test_entry_with_a_foreign_name_is_refused(image: Image, workspace: Workspace, tmp_path: Path) -> None:
    forged = entry(verified=replace(VERIFIED, image=image, reference="python:3.12"))
    with pytest.raises(NotVerified, match=r"lists an image as 'python:3\.12'; its labels give the name") as caught:
        published.select(RECIPE, Source(index(tmp_path / "i", forged)), PLATFORM, workspace)
    assert caught.value.hint
    with pytest.raises(NotVerified):
        published.pull(forged, Source(tmp_path / "i"), workspace)  # refused before the registry is contacted


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"repository": "--privileged"}, "'--privileged' is not a repository"),
        ({"repository": "https://u:p@r.example/x"}, "is not a repository"),
        ({"repository": "r.example/x:tag"}, "is not a repository"),
        ({"digest": "latest"}, "'latest' is not a digest"),
        ({"digest": f"sha256:{'d' * 64} --x"}, "is not a digest"),
        ({"published": "yesterday"}, "'yesterday' is not a time of publishing"),
        ({"published": "9"}, "is not a time"),
    ],
)
def test_malformed_entry_is_refused(changed: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        read_index(index(tmp_path / "i", replace(entry(), **changed)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "repository", ["x", "user:pw@r.example/x", "https://r.example/x", "r.example/x:tag", "R.example/X", "-x", ""]
)
def test_publish_refuses_a_malformed_repository(repository: str, tmp_path: Path) -> None:
    with pytest.raises(RegistryFailed, match="is not a repository") as caught:
        publication.publish(NAME, repository, tmp_path / "i", Workspace(tmp_path))
    assert "docker login" in caught.value.hint


# ---- signatures


def test_select_without_a_key_warns(workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with reporting.use(console):
        assert published.select(RECIPE, Source(index(tmp_path / "i", entry())), PLATFORM, workspace) == entry()
    (warning,) = capsys.readouterr().err.splitlines()
    assert (
        warning.startswith("warning: r.example/vllm:0.19.1-sm120kit.")
        and "signature not verified; pass `--trust KEY`" in warning
    )
    private, public = key(tmp_path, "key")
    source = Source(signed(tmp_path / "s", private, entry()), public)
    with reporting.use(console):
        assert published.select(RECIPE, source, PLATFORM, workspace).attested
    assert not capsys.readouterr().err


def test_select_with_a_key_refuses_an_unsigned_image(workspace: Workspace, tmp_path: Path) -> None:
    _, public = key(tmp_path, "key")
    with pytest.raises(NotAttested):
        published.select(RECIPE, Source(index(tmp_path / "i", entry()), public), PLATFORM, workspace)


def test_time_of_publishing_is_signed(workspace: Workspace, tmp_path: Path) -> None:
    private, public = key(tmp_path, "key")
    path = signed(tmp_path / "s", private, entry(OLD))
    for time in (NEW, ""):
        index(tmp_path / "s", replace(read_index(path).images[0], published=time))
        with pytest.raises(NotAttested, match=f"with time of publishing '{time}'; signed is '{OLD}'"):
            published.select(RECIPE, Source(path, public), PLATFORM, workspace)


def test_built_locally_compares_the_recorded_content(workspace: Workspace) -> None:
    assert not built_locally(IMAGE, workspace)
    write_record(workspace.root / "images" / CONTEXT / "image.json", IMAGE)
    assert built_locally(IMAGE, workspace) and not built_locally(replace(IMAGE, content="0" * 64), workspace)


# ---- age


def test_image_older_than_the_newest_pulled_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    private, public = key(tmp_path, "key")
    new, old, undated = (
        Source(signed(tmp_path / name, private, entry(time)), public) for name, time in (("n", NEW), ("o", OLD), ("u", ""))
    )
    assert published.select(RECIPE, old, PLATFORM, workspace).published == OLD, "nothing was pulled before"
    record_pull(entry(NEW), new, workspace)
    assert published.select(RECIPE, new, PLATFORM, workspace).published == NEW
    for source, when in ((old, f"published {OLD}"), (undated, "without a date")):
        with pytest.raises(NotTrusted, match=f"is {when}, older than .*, published {NEW} and pulled before") as caught:
            published.select(RECIPE, source, PLATFORM, workspace)
        assert "--allow-older" in caught.value.hint
        assert published.select(RECIPE, replace(source, allow_older=True), PLATFORM, workspace)


def test_older_copy_in_another_repository_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    private, public = key(tmp_path, "key")
    record_pull(entry(NEW), Source(tmp_path, public), workspace)
    mirrored = Source(signed(tmp_path / "m", private, entry(OLD, repository="mirror.example/vllm")), public)
    with pytest.raises(NotTrusted):
        published.select(RECIPE, mirrored, PLATFORM, workspace)


def test_unsigned_entries_do_not_affect_the_age_of_signed_images(workspace: Workspace, tmp_path: Path) -> None:
    """Unsigned entries, entries of other keys, recipes and platforms have newest images of their own."""
    private, public = key(tmp_path, "key")
    _, other = key(tmp_path, "other")
    future = entry("2999-01-01T00:00:00Z")
    record_pull(future, Source(tmp_path), workspace)
    record_pull(future, Source(tmp_path, other), workspace)
    record_pull(replace(future, recipe="vllm-0.20.0"), Source(tmp_path, public), workspace)
    assert published.select(RECIPE, Source(signed(tmp_path / "s", private, entry()), public), PLATFORM, workspace)
    with pytest.raises(NotTrusted):
        published.select(RECIPE, Source(index(tmp_path / "i", entry())), PLATFORM, workspace)
    another = index(tmp_path / "a", entry(repository="r.example/another"))
    assert published.select(RECIPE, Source(another), PLATFORM, workspace)


def test_fingerprint_ignores_the_formatting_of_a_key_file(tmp_path: Path) -> None:
    _, public = key(tmp_path, "key")
    wrapped = tmp_path / "wrapped.pub"
    wrapped.write_text(f"# ours\n{public.read_text()}\n\n")
    assert (
        attestation.fingerprint(public)
        == attestation.fingerprint(wrapped)
        != attestation.fingerprint(key(tmp_path, "other")[1])
    )


def test_damaged_record_of_the_newest_image_is_an_error(workspace: Workspace, tmp_path: Path) -> None:
    source = Source(index(tmp_path / "i", entry()))
    record_pull(entry(), source, workspace)
    (path,) = (workspace.root / "images" / "newest").iterdir()
    path.write_text("{")
    with pytest.raises(NotTrusted, match=f"{path} is damaged"):
        published.select(RECIPE, source, PLATFORM, workspace)


# ---- commands


@pytest.mark.parametrize(
    ("options", "source"),
    [
        ((), Source(Path("images.json"))),
        (("--trust", "k.pub", "--allow-older"), Source(Path("images.json"), Path("k.pub"), allow_older=True)),
        (("--index", "i.json"), Source(Path("i.json"))),
    ],
)
def test_pull_options_become_a_source(
    options: tuple[str, ...], source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workspace: Workspace
) -> None:
    sources: list[Source] = []

    def select(name: str, source: Source, *rest: object) -> PublishedImage:
        sources.append(source)
        raise BadInput("stop", "")

    monkeypatch.setattr(published, "select", select)
    monkeypatch.setattr("sys.argv", ["sm120kit", "pull", RECIPE, "--state", str(workspace.root), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == BadInput.exit_code and sources == [source]


def test_trust_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workspace: Workspace) -> None:
    path = index(tmp_path / "i", entry())
    _, public = key(tmp_path, "key")
    monkeypatch.setenv("SM120KIT_TRUST", str(public))
    monkeypatch.setattr("sys.argv", ["sm120kit", "pull", RECIPE, "--index", str(path), "--state", str(workspace.root)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == NotAttested.exit_code
