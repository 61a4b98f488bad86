"""Hostile recipes, sources and state directories are rejected by the command line."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from test_bad_input import HEADER, PATCH, Site, refused

FETCHING = [
    ("build", "flashinfer@1.0", "--to", "fetch"),
    ("build", "flashinfer@1.0", "--dry-run"),
    ("recipe", "lock", "flashinfer@1.0"),
    ("patch", "status", "flashinfer@1.0"),
    ("patch", "check", "flashinfer@1.0"),
]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """With a patch for the version of the source, without which `patch status` and `patch check` do not fetch it."""
    site = Site(tmp_path)
    site.patch(PATCH)
    return site


def with_git(site: Site, url: str, commit: str = "0" * 40) -> None:
    text = site.recipe.read_text()
    before, after = text.partition("[sources.")[0], text.partition("[modules.")[2]
    source = f'[sources.flashinfer]\ngit = "{url}"\nversion = "1.0"\ncommit = "{commit}"\n'
    site.recipe.write_text(f"{before}{source}[modules.{after}")


@pytest.mark.parametrize("words", FETCHING, ids=" ".join)
def test_git_url_of_recipe_runs_no_program(site: Site, tmp_path: Path, words: tuple[str, ...]) -> None:
    mark = tmp_path / "ran"
    with_git(site, f"ext::sh -c touch% {mark}")
    refused(site.run(*words), 21, "the git URL of flashinfer 1.0 is")
    assert not mark.exists()


@pytest.mark.parametrize("words", FETCHING, ids=" ".join)
def test_version_that_source_does_not_have(site: Site, words: tuple[str, ...]) -> None:
    """The pin of the previous release: every command that uses the source fails, also when the source is cached."""
    text = site.recipe.read_text()
    old = site.recipe.with_name("flashinfer-1.1.toml")
    old.write_text(text.replace('"1.0"', '"1.1"').replace("-1.0", "-1.1"))
    words = tuple(word.replace("@1.0", "@1.1") for word in words)
    shelf = ("--mirror", str(site.mirror))
    site.sdist.rename(site.mirror / "flashinfer_python-1.1.tar.gz")
    for _ in range(2):
        message = "has flashinfer-python 1.0 in PKG-INFO; the recipe has flashinfer-python 1.1"
        refused(site.run(*words, *shelf), 12, message)
    assert not old.with_suffix(".lock.json").exists()


@pytest.mark.parametrize("words", [*FETCHING[1:], ("recipe", "lock", "--check", "flashinfer@1.0")], ids=" ".join)
def test_version_that_vendored_cutlass_does_not_have(site: Site, words: tuple[str, ...]) -> None:
    header = "#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 1\n"
    site.pack({"include/x.h": HEADER, "3rdparty/cutlass/include/cutlass/version.h": header})
    site.pin(hashlib.sha256(site.sdist.read_bytes()).hexdigest())
    right = site.recipe.read_text().replace(
        "[modules.m]", '[sources.cutlass]\ninside = "flashinfer"\npath = "3rdparty/cutlass"\nversion = "4.2.1"\n[modules.m]'
    )
    site.recipe.write_text(right)
    shelf = ("--mirror", str(site.mirror))
    assert site.run("recipe", "lock", "flashinfer@1.0", *shelf).returncode == 0
    site.recipe.write_text(right.replace("4.2.1", "4.4.2"))
    refused(site.run(*words, *shelf), 12, "version.h states version 4.2.1; the recipe has cutlass 4.4.2")


def test_git_configuration_of_checkout_runs_no_program(site: Site, tmp_path: Path) -> None:
    """The base commit is signed, so that git would run gpg to show it."""
    assert site.build("--to", "patch").returncode == 0
    (checkout,) = (site.state / "checkouts").iterdir()
    mark, program = tmp_path / "ran", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
    program.chmod(0o755)
    signature = b"\ngpgsig -----BEGIN PGP SIGNATURE-----\n \n x\n -----END PGP SIGNATURE-----"

    def git(*words: str, stdin: bytes = b"") -> bytes:
        return subprocess.run(["git", "--git-dir", checkout, *words], input=stdin, capture_output=True, check=True).stdout

    head, blank, body = git("cat-file", "commit", "base").partition(b"\n\n")
    signed = git("hash-object", "-t", "commit", "-w", "--stdin", stdin=head + signature + blank + body).decode().strip()
    git("update-ref", "refs/heads/base", signed)
    with (checkout / "config").open("a") as config:
        config.write(f"[log]\nshowSignature = true\n[gpg]\nprogram = {program}\n[core]\nfsmonitor = {program}\n")
    assert site.run("patch", "status", "flashinfer@1.0", "--mirror", str(site.mirror)).returncode == 0
    assert not mark.exists()


def test_state_directory_writable_by_others_is_rejected(site: Site) -> None:
    site.state.mkdir()
    site.state.chmod(0o777)
    for words in (("build", "flashinfer@1.0"), ("patch", "status"), ("recipe", "lock", "--check")):
        refused(site.run(*words), 21, f"{site.state} can be written by others (mode 0777)", f"chmod 700 {site.state}")


ORDERS = "\\u001b]0;owned\\u0007\\u001b[2J"


def test_escape_sequences_are_not_printed(site: Site) -> None:
    """From a recipe: in text, in an error, and in JSON."""
    good = site.recipe.read_text()
    site.recipe.write_text(good.replace("a small one", f"a small one{ORDERS}"))
    shown = site.run("recipe", "list")
    assert "a small one" in shown.stdout and "\x1b" not in shown.stdout
    as_json = site.run("recipe", "list", "--json").stdout
    assert "\x1b" not in as_json and "a small one\x1b]0;owned\x07\x1b[2J" in [each["summary"] for each in json.loads(as_json)]
    site.recipe.write_text(good.replace("summary =", f'"{ORDERS}" ='))
    failed = site.run("recipe", "check", "flashinfer@1.0")
    refused(failed, 11)
    assert "\x1b" not in failed.stderr
