"""Checked images in a cache that several machines share (``--cache``).

The entry of an image is its record of publishing, by the inputs of its build: lockfile, base, kernel group, settings. The
image itself is in the same repository, and is pulled as `sm120kit pull` does: by the digest in the record, with the content
that it states.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime

from sm120kit.core import reporting, toolchain
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import AlreadyExists, BadRecord, NotFound, NotTrusted, NotVerified, RegistryFailed
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import checks, delivery, registry
from sm120kit.images import image_inputs as contexts
from sm120kit.images.image_records import PublishedImage, VerifiedImage
from sm120kit.images.oci import Layout
from sm120kit.images.transports import LayoutTransport
from sm120kit.recipes import bases
from sm120kit.recipes.target import EngineTarget
from sm120kit.sources.run_options import Options, RemoteCache
from sm120kit.wheels.build_records import BuildRequest
from sm120kit.wheels.plan import PLAN_FORMAT

RECORD = "image.json"


def fetch(key: str, build_id: str, remote: RemoteCache, workspace: Workspace) -> VerifiedImage | None:
    """Pull the image of an entry into the state directory; None, with a warning if it cannot be used, if there is none.

    Its record states whether its signature was not verified.

    Raises:
        ResourceUnavailable, SystemRefused: it cannot be stored.
    """
    with workspace.scratch() as scratch:
        if not remote.fetch(key, scratch):
            return None
        try:
            entry = replace(read_record(PublishedImage, scratch / RECORD), repository=remote.repository)
            if entry.verified.image.labels.get("sm120kit.build-id") != build_id:
                raise NotVerified(f"{key} is an image of another build id", "push it again")
            verified = registry.pull(entry, LayoutTransport(Layout(workspace.root / "oci")))
        except (BadRecord, OSError, NotVerified, NotFound, NotTrusted, RegistryFailed, AlreadyExists) as error:
            reporting.warn(f"cache {remote.repository}: the image of {key} is not used: {error}")
            return None
    if not remote.publisher:
        verified = replace(verified, checks=(*verified.checks, checks.unsigned(remote.repository, "the image")))
    write_record(checks.record_path(workspace, verified.image), verified)
    return verified


def push(key: str, image: VerifiedImage, remote: RemoteCache, workspace: Workspace) -> None:
    """Push a checked image of the state directory and its entry, if this command may."""
    layout = Layout(workspace.root / "oci")
    local = layout.find(image.image.id)
    if local is None or not remote.pushes:
        return
    tag, labels = image.reference.rpartition(":")[2], image.image.labels
    transport = LayoutTransport(layout)
    try:
        digest = transport.push(image.image, remote.repository, tag)
    except (RegistryFailed, NotTrusted) as error:
        reporting.warn(f"cache {remote.repository}: {image.reference} is not pushed: {error.message}")
        return
    published = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    recipe, build_id = labels.get("sm120kit.recipe", ""), labels.get("sm120kit.build-id", "")
    entry = PublishedImage(remote.repository, tag, digest, recipe, build_id, image, published=published)
    with workspace.scratch() as scratch:
        write_record(scratch / RECORD, entry)
        remote.push(key, scratch)


def shared_key(target: EngineTarget, build: BuildRequest, base: str) -> str:
    """The key of an engine's image in a remote cache: its inputs; empty if others than these decide it.

    Images with local patches or on a base that only a local daemon has are not shared.

    Raises:
        NotFound: see :func:`sm120kit.images.delivery.complete`.
    """
    recipe, base = target.recipe, delivery.complete(base, target.recipe)
    if target.local_patches or base.startswith("sha256:") or os.environ.get("CUDA_HOME"):
        return ""
    setup = delivery.engine_setup(recipe, target.build_id, target.closure)
    inputs = [
        target.build_id,
        build.group or recipe.kernels,
        build.from_source,
        bases.lock_id(base) if base in bases.of_images() else base,
        [part(setup) for part in (contexts.settings, contexts.programs)],
        [os.environ.get("SOURCE_DATE_EPOCH", ""), toolchain.host_compiler()[1], PLAN_FORMAT],
    ]
    return f"image-{digest_of(inputs)}"


def fetch_shared(key: str, target: EngineTarget) -> checks.CheckReport | None:
    """The report of an image in the remote cache of a command, which is pulled; None if there is none."""
    options = target.options
    if options.remote is None or not key:
        return None
    verified = fetch(key, target.build_id, options.remote, options.workspace)
    return checks.CheckReport(verified.image, verified.checks, verified.facts, verified) if verified else None


def share(key: str, report: checks.CheckReport, options: Options) -> None:
    """Store an image that passed its checks in the remote cache of a command, if it may."""
    if options.remote and key and report.verified:
        push(key, report.verified, options.remote, options.workspace)
