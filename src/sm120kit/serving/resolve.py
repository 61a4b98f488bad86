"""Decide a launch's image, GPUs and location before anything expensive."""

from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path

from sm120kit import recipes, serving
from sm120kit.core import reporting
from sm120kit.core.errors import Mismatch, NotFound, RequirementMissing, ResourceUnavailable
from sm120kit.core.workspace import Workspace
from sm120kit.engines import Node
from sm120kit.hosts.doctor import requirements
from sm120kit.hosts.facts import Gpu, Host, probe
from sm120kit.images import checks, inventory
from sm120kit.images import image_inputs as images
from sm120kit.images import published_images as published
from sm120kit.images.image_index import own_platform
from sm120kit.images.image_records import Image, PublishedImage, VerifiedImage
from sm120kit.images.inventory import CheckStatus
from sm120kit.images.local_images import LocalImages
from sm120kit.images.published_images import Source
from sm120kit.recipes import EngineRecipe, arguments
from sm120kit.recipes.configurations import Configuration
from sm120kit.serving import Device, allreduce, nodes
from sm120kit.serving._container import LOOPBACK
from sm120kit.sources.debian import ARCHITECTURES

HOST = Path("/")
INDEX = Path("images.json")
"""The index that is used if none is named."""
NO_IMAGE = "IMAGE"
"""Name of the image in a planned command line if this host has none."""


@dataclass(frozen=True)
class ServerLocation:
    """Where a server listens on this host, and the API key that requests must have.

    ``node`` is this host among those that the server spans, None for this one alone. ``gpus`` are the numbers of the GPUs to
    use, empty for the first free ones. ``allreduce`` is a method of :mod:`sm120kit.serving.allreduce`, or ``auto``. A server
    ``elsewhere`` is planned for GPUs of another host.
    """

    port: int = 8000
    listen: str = LOOPBACK
    key: str = field(default="", repr=False)
    node: Node | None = None
    gpus: tuple[int, ...] = ()
    allreduce: str = "auto"
    elsewhere: bool = False


@dataclass(frozen=True)
class ResolvedLaunch:
    """A launch whose image, GPUs and location are decided and free; its model is not yet read.

    ``published`` is the entry in the index ``source``, None for an image that only this host has. ``image`` is None if there is
    none, which only a launch that is not started can be. ``devices`` are the host's GPUs that the server may use; they are
    ``assumed`` if it is planned on a host without them, for another one. ``allreduce`` is the method between them.
    """

    configuration: Configuration
    engine: EngineRecipe
    image: VerifiedImage | None
    host: Host
    gpus: tuple[Device, ...]
    location: ServerLocation
    source: Source
    published: PublishedImage | None = None
    devices: tuple[Device, ...] = ()
    assumed: bool = False
    allreduce: str = allreduce.DEFAULT

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """The GPUs with their numbers, as records name them."""
        return tuple(f"{gpu.number}: {gpu.name}" for gpu in self.gpus)

    @property
    def image_name(self) -> str:
        """What a container is started from."""
        if self.published:
            return f"{self.published.repository}@{self.published.digest}"
        return self.image.image.id if self.image else NO_IMAGE


def resolve(
    configuration: Configuration,
    image: str | Image,
    source: Source,
    location: ServerLocation,
    workspace: Workspace,
    *,
    root: Path = HOST,
    planned: bool = False,
) -> ResolvedLaunch:
    """Decide image, GPUs and location of a launch on the host at ``root``, before its model is downloaded. Starts nothing.

    ``image`` names one in the state directory or the daemon; if it is empty, the index ``source`` must list one of the
    configuration's engine, or without an index, these must have one that is verified. If the source has a key, an image of
    this host must have been built on it, or be listed and signed. An image itself is one whose checks run before the launch
    is started. What is only ``planned`` needs no image, GPUs and ports in
    use do not matter, and on this host, GPUs that it lacks are assumed.

    Raises:
        NotFound: there is no recipe or image of the engine, or more than one image; or no such all-reduce.
        BadInput: the engine's parser refuses the arguments, or the configuration is for another number of machines.
        RequirementMissing: other machines can reach the address, and there is no API key.
        ResourceUnavailable: GPUs or port are not free.
        NotVerified, NotTrusted, Mismatch: the image did not pass its checks, is not signed, or for another engine or machine.
    """
    engine = recipes.load_engine(configuration.engine)
    if not arguments.require_known(configuration):
        reporting.warn(f"the options of {engine.name} were not recorded: the arguments of {configuration.name} are not checked")
    nodes.require_span(configuration, engine, location.node)
    if not (ip_address(location.listen).is_loopback or location.key or serving.api_key(configuration)):
        raise RequirementMissing(
            f"other machines can reach {location.listen}: a server there requires an API key",
            "set SM120KIT_API_KEY or pass --api-key @FILE; openssl rand -hex 32 makes a key",
        )
    if not planned:
        require_port(location.port, location.listen)
    resolved = _on_host(ResolvedLaunch(configuration, engine, None, probe(root), (), location, source), root, planned=planned)
    # The records of a host do not include its architecture; the engine's images are for one only.
    indexed = not image and (source.index != INDEX or source.index.exists())
    if isinstance(image, Image):
        resolved = replace(resolved, image=VerifiedImage(image, image.canonical_name, "", (), {}))
    elif indexed:
        entry = published.select(configuration.engine, source, f"linux/{ARCHITECTURES[engine.machine]}", workspace)
        resolved = replace(resolved, image=entry.verified, published=entry)
    elif image := image or _local_image(configuration.engine, workspace):
        verified = checks.require_verified(image, LocalImages(workspace), workspace)
        if source.key and not images.built_locally(verified.image, workspace):
            published.require_signed(image, source, workspace)
        resolved = replace(resolved, image=verified)
    elif not planned:
        name = configuration.engine
        raise NotFound(
            f"there is no image of {name} on this host",
            f"`sm120kit build {name}` builds one; `sm120kit pull {name} --index FILE` pulls a published one;"
            " `sm120kit verify image NAME` reads in one that only the container daemon has",
        )
    if resolved.image:
        serving.require_image(configuration, resolved.image)
        if not planned and resolved.image.image.platform != (own := own_platform()):
            raise Mismatch(
                f"{resolved.image.reference} is for {resolved.image.image.platform}, and this machine is {own}",
                "sm120kit config list has configurations with other engines",
            )
    image_content = resolved.image.image.content if resolved.image else ""
    method = allreduce.selected(location.allreduce, configuration, image_content, resolved.gpu_names, workspace)
    return replace(resolved, allreduce=method)


def on_node(resolved: ResolvedLaunch, node: Node | None) -> ResolvedLaunch:
    """A launch on another of the machines that its server spans, which is like the first."""
    return replace(resolved, location=replace(resolved.location, node=node))


def _on_host(resolved: ResolvedLaunch, root: Path, *, planned: bool) -> ResolvedLaunch:
    """A launch with GPUs of its host, which is the one at ``root``."""
    configuration, host, numbers = resolved.configuration, resolved.host, resolved.location.gpus
    hardware = configuration.hardware
    devices = [
        Device(number, gpu.name or "unnamed GPU", requirements.memory_bytes(host, gpu), _used(host, gpu))
        for number, gpu in requirements.suitable(host, configuration)
    ]
    lacking = root == HOST and len(devices) < hardware.gpus_per_node
    assumed = planned and (lacking or resolved.location.elsewhere)
    if assumed:
        memory = int(hardware.memory_gb * 1e9) if hardware.memory_gb else None
        devices = [Device(number, hardware.gpu, memory) for number in numbers or range(hardware.gpus_per_node)]
    if numbers:
        devices = list(serving.choose_gpus(configuration, devices, numbers))
    taken = {} if planned else {number: other.name for other in host.launched for number in other.gpus}
    gpus = serving.select_gpus(configuration, devices, taken)
    return replace(resolved, gpus=gpus, devices=tuple(devices), assumed=assumed)


def _used(host: Host, gpu: Gpu) -> int:
    """Bytes of a GPU's memory that others have; of unified memory, all but what the system can give."""
    if not gpu.unified:
        return (gpu.used_mib or 0) << 20
    return max(0, (host.memory_total or 0) - (host.memory_available or 0)) if host.memory_available else 0


def _local_image(recipe: str, workspace: Workspace) -> str:
    """The name of the checked image of a recipe, without local patches, in the state directory; or ""."""
    verified = {
        local.image.content: local.tags[0] if local.tags else local.image.id
        for local in inventory.local_images(workspace)
        if local.image.labels.get("sm120kit.recipe") == recipe and local.standing is CheckStatus.VERIFIED
        if images.LOCAL not in local.image.labels  # only by its name
    }
    if len(verified) > 1:
        raise NotFound(
            f"this host has {len(verified)} images of {recipe}", f"name one with --image: {', '.join(verified.values())}"
        )
    return next(iter(verified.values()), "")


def require_port(port: int, listen: str) -> None:
    """Require that a server can listen on a port of an address.

    Raises:
        ResourceUnavailable: another process does, or this host does not have the address.
    """
    try:
        free = serving.port_is_free(port, listen)
    except OSError as error:
        message = f"no server can listen on {listen}: {error.strerror}"
        raise ResourceUnavailable(message, "name an address of this host with --listen; `ip address` lists them") from error
    if not free:
        raise ResourceUnavailable(f"{listen}:{port} is in use", "stop what listens there, or choose another port with --port")
