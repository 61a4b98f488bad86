"""The container daemon that the program docker uses, into which images are loaded."""

import json
from collections.abc import Iterable, Mapping

from sm120kit.core import process, reporting
from sm120kit.core.errors import DaemonUnreachable, NotFound, RequirementMissing, ResourceUnavailable
from sm120kit.core.process import Completed
from sm120kit.images.image_records import Image, image_content

ANSWER_SECONDS = 120
LOAD_SECONDS = 1800
"""For unpacking, after the archive was read."""


def docker(
    *arguments: str,
    stdin: Iterable[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = False,
    seconds: float | None = None,
) -> Completed:
    """Run docker to its end and return its output.

    Raises:
        DaemonUnreachable: for ``seconds``, it neither took input nor ended.
        CommandFailed: its exit code is not 0 and ``check`` is true.
    """
    seconds = seconds or ANSWER_SECONDS
    try:
        return process.run_within(("docker", *arguments), seconds, stdin=stdin, env=env, check=check)
    except process.Stopped as error:
        raise _unreachable(f"docker {arguments[0]}", f"no answer for {seconds:g} s") from error


class Daemon:
    """The daemon of ``docker``: at ``host``, else at ``DOCKER_HOST``, or of its context, as of rootless docker."""

    def __init__(self, host: str = "") -> None:
        """Connect.

        Raises:
            DaemonUnreachable: the daemon does not respond, or the context does not exist or is damaged.
            RequirementMissing: there is no program docker.
        """
        if not process.find_program("docker"):
            raise RequirementMissing("the program docker is not on PATH", "install docker, or put it on PATH")
        self.name = f"the daemon of {host}" if host else "the daemon"
        self._env = {"DOCKER_HOST": host} if host else None
        _require_success("connecting", docker("version", "--format", "{{.Server.Version}}", env=self._env))

    def inspect(self, reference: str) -> Image | None:
        """Look up an image by id, tag or digest; None if the daemon does not have it."""
        activity = f"inspecting {reference}"
        done = self._run(activity, "image", "inspect", "--", reference)
        if done.returncode and "no such image" in done.stderr.lower():
            return None
        _require_success(activity, done)
        (image,) = json.loads(done.stdout)
        config = image["Config"]
        layers = tuple(image["RootFS"].get("Layers") or ())
        return Image(
            id=image["Id"],
            content=image_content(layers, image["Os"], image["Architecture"], config),
            platform=f"{image['Os']}/{image['Architecture']}",
            layers=layers,
            labels=config.get("Labels") or {},
            user=config.get("User") or "",
            bytes=image["Size"],
        )

    def find(self, reference: str) -> Image:
        """Look up an image that must exist.

        Raises:
            NotFound: the daemon does not have it.
        """
        image = self.inspect(reference)
        if image is None:
            raise NotFound(f"there is no image {reference}", "sm120kit build builds it, sm120kit pull fetches it")
        return image

    def load(self, archive: Iterable[bytes]) -> str:
        """Load an archive of an image without a tag, and return the id that the daemon reports; "" if it reports none.

        Raises:
            ResourceUnavailable: the file system of its images is full.
            DaemonUnreachable: it does not respond, or rejects the archive.
        """
        with reporting.working("loading an image"):
            done = docker("load", "--quiet", stdin=archive, env=self._env, seconds=LOAD_SECONDS)
        _require_success("loading an image", done)
        return done.stdout.partition("Loaded image ID: ")[2].strip()

    def tag(self, image: str, reference: str) -> None:
        """Tag an image. The tag moves if another image has it."""
        _require_success(f"tagging {reference}", self._run(f"tagging {reference}", "tag", image, reference))

    def _run(self, activity: str, *arguments: str) -> Completed:
        with reporting.working(activity):
            return docker(*arguments, env=self._env)


def _require_success(activity: str, done: Completed) -> None:
    """Translate what docker prints when it fails."""
    if done.returncode == 0:
        return
    message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if "no space left on device" in message:
        raise ResourceUnavailable(
            f"the file system of the daemon's images is full: {message}",
            "free some space; the same command resumes where it stopped",
        )
    raise _unreachable(activity, message)


def _unreachable(activity: str, message: str) -> DaemonUnreachable:
    return DaemonUnreachable(
        f"{activity}: docker: {message}",
        "start the daemon, or set DOCKER_HOST to its socket; the same command resumes where it stopped",
    )
