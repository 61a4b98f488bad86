"""Assemble an image from locked inputs without a builder: ``(ImageContext, base, wheels) -> Image`` in an OCI layout.

Each layer is a function of few inputs (its wheels, the Python of the base) and is recorded by their
digest: what another image or an earlier build wrote is neither written nor read again.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from sm120kit.core import process, reporting
from sm120kit.core.archives import SOURCE_DATE_EPOCH
from sm120kit.core.digests import digest_of
from sm120kit.core.disk import disk_errors, require_disk
from sm120kit.core.errors import BadInput, BadRecord, CommandFailed
from sm120kit.core.parallel import in_parallel
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.images import _b12x as b12x
from sm120kit.images import _rootfs, _wheel_layers
from sm120kit.images import _triton as triton
from sm120kit.images._bytecode import BytecodeCompiler, BytecodeWriter, ImagePython
from sm120kit.images._layers import LayerWriter
from sm120kit.images._wheel_layers import VENV, WheelContents
from sm120kit.images.image_inputs import LABEL, LEFT_OUT, LOCAL, NVIDIA, WRONG_RECORD, patterns
from sm120kit.images.image_records import BuiltWheel, Image, ImageContext
from sm120kit.images.oci import Descriptor, Layout
from sm120kit.kernels.driver_stub import link_stub
from sm120kit.sources.debian import ARCHITECTURES
from sm120kit.sources.source_records import LockedWheel

FORMAT = 4
"""Version of what this module writes; part of the inputs of each layer."""

MAX_ALONE = 30
"""Limit for wheels with a layer of their own."""
_LARGE_BYTES = 16 * 2**20
_MARGIN_BYTES = 256 * 2**20
_REPORTED_BYTES = 4 * 2**20
_CUDA, _CUDA_HOME = "nvidia/cu13", "opt/cuda"
_USER = {
    "group": "sm120kit:x:1000:\n",
    "passwd": "sm120kit:x:1000:1000:sm120kit:/home/sm120kit:/usr/sbin/nologin\n",
}
"""The lines that are added to files in /etc: the user who runs programs in the image."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""``PATH`` where a base sets none, as in container runtimes."""

INTERPRETER = "/usr/bin/python3"
"""Python 3 in the bases of ``recipes/bases/``."""

# What `python3 -m venv --without-pip /opt/venv` writes, by the module of the image's Python, with the path that it has there.
# Prints each path with its type and the text of a file or the target of a link.
_MAKE_VENV = """
import sys
sys.path[:] = [path for path in sys.path if path]
sys.executable = sys._base_executable = sys.argv[1]
import json, os, tempfile, venv

def entry(path):
    if os.path.islink(path):
        return "link", os.readlink(path)
    if os.path.isdir(path):
        return "directory", ""
    with open(path, encoding="utf-8", newline="") as file:
        return "file", file.read().replace(scratch, "")

with tempfile.TemporaryDirectory() as scratch:
    root = scratch + "/" + sys.argv[2]
    venv.EnvBuilder(symlinks=True, with_pip=False).create(root)
    paths = [root] + [os.path.join(parent, name) for parent, *names in os.walk(root) for name in sum(names, [])]
    print(json.dumps({os.path.relpath(path, scratch): entry(path) for path in paths}))
"""


@dataclass(frozen=True)
class ImageBase:
    """What an image is built on: its layers, lowest first, and its config (OCI image-spec, config.md).

    ``accounts`` are the texts of its ``passwd`` and ``group``. ``python`` starts its Python, or another of the same version, on
    this machine.
    """

    layers: tuple[Descriptor, ...]
    config: dict[str, Any]
    accounts: Mapping[str, str]
    python: tuple[str, ...]


def wheel_files(
    ours: Mapping[LockedWheel, Path],
    locked: Sequence[LockedWheel],
    fetch: Callable[[Sequence[LockedWheel]], Sequence[Path]],
) -> Callable[[LockedWheel], Path]:
    """The files of wheels for :func:`assemble`. Those of ``locked`` are fetched, all together, when the first is read."""
    lock = threading.Lock()
    fetched: dict[LockedWheel, Path] = {}

    def file(wheel: LockedWheel) -> Path:
        if wheel in ours:
            return ours[wheel]
        with lock:
            if not fetched:
                fetched.update(zip(locked, fetch(locked), strict=True))
        return fetched[wheel]

    return file


@dataclass(frozen=True)
class _Layer:
    """A layer to be written: a digest of its inputs, its size in bytes, and the function that writes it."""

    description: str
    inputs: str
    size: int
    write: Callable[[LayerWriter, BytecodeCompiler], None] = field(compare=False)


@dataclass(frozen=True)
class _Inputs:
    """What all layers of an image have in common."""

    context: ImageContext
    base: ImageBase
    python: ImagePython
    files: Callable[[LockedWheel], Path]
    contents: Mapping[LockedWheel, WheelContents]
    official: Mapping[str, LockedWheel]

    def layer(
        self, description: str, inputs: object, size: int, write: Callable[[LayerWriter, BytecodeCompiler], None]
    ) -> _Layer:
        """A layer that follows from ``inputs`` and the Python."""
        return _Layer(description, self.digest(inputs), size, write)

    def digest(self, inputs: object) -> str:
        """The key of a layer that follows from ``inputs`` and the Python."""
        return digest_of([FORMAT, vars(self.python), SOURCE_DATE_EPOCH, inputs])


def assemble(
    context: ImageContext,
    described: tuple[Mapping[str, Any], Mapping[str, str]],
    base: ImageBase,
    files: Callable[[LockedWheel], Path],
    layout: Layout,
    workspace: Workspace,
    official: Sequence[LockedWheel] = (),
) -> tuple[Image, bool]:
    """Write the layers that ``layout`` lacks, and the image. Returns the image and whether it was built; it is not tagged.

    ``context`` and ``described``, its settings and programs, are from :func:`sm120kit.images.image_inputs.describe`. ``files``
    gives the file of a wheel, verified against its lock; it is called, by several threads, only for wheels that are read.
    ``official`` are upstream wheels that are packed again in ``context``.

    Raises:
        BadInput, NotTrusted: a wheel is damaged or hostile.
        CommandFailed: the Python of the base does not work.
        ResourceUnavailable, SystemRefused: the layers cannot be stored.
    """
    target = workspace.root / "images" / context.digest
    with workspace.exclusive(f"image-{context.digest}"):
        built = _recorded(target / "image.json", layout)
        if built is not None:
            mark_used(target)
            return built, False
        with disk_errors(target):
            target.mkdir(parents=True, exist_ok=True)
            write_record(target / "context.json", context)
            image = _assemble(context, described, base, files, layout, workspace, official)
            write_record(target / "image.json", image)
    return image, True


def _recorded(record: Path, layout: Layout) -> Image | None:
    """The image of a record, if the layout has it with all layers."""
    try:
        recorded = read_record(Image, record)
    except (OSError, BadRecord):
        return None
    manifest = layout.find(recorded.id)
    if manifest is None or not all(layout.has(layer.digest, layer.size) for layer in layout.layers(manifest.digest)):
        return None
    return recorded if layout.image(manifest.digest) == recorded else None


def _assemble(
    context: ImageContext,
    described: tuple[Mapping[str, Any], Mapping[str, str]],
    base: ImageBase,
    files: Callable[[LockedWheel], Path],
    layout: Layout,
    workspace: Workspace,
    official: Sequence[LockedWheel],
) -> Image:
    of_setup, scripts = described
    settings = _settings(of_setup, context.labels, base.config.get("config") or {})
    bytecode = BytecodeCompiler(base.python)
    packed = {built.origin.get("official", {}).get("sha256") for built in context.ours}
    again = {wheel.sha256: wheel for wheel in official if wheel.sha256 in packed}
    contents = {wheel: _contents(wheel, files, bytecode.python, workspace) for wheel in (*context.locked, *again.values())}
    contents |= {wheel: _wheel_layers.read_contents(wheel, files(wheel), bytecode.python) for wheel in _ours(context)}
    inputs = _Inputs(context, base, bytecode.python, files, contents, again)
    planned = list(_plan(inputs, scripts))
    layers = _write(planned, inputs, bytecode, layout, workspace)
    descriptions = [layer.description for layer in planned]
    created = context.labels["org.opencontainers.image.created"]

    def add_image() -> Descriptor:
        history = [{"created": created, "created_by": f"sm120kit: {description}"} for description in descriptions]
        config: dict[str, Any] = {
            **{key: base.config[key] for key in ("architecture", "os", "variant") if key in base.config},
            "created": created,
            "config": settings,
            "history": [*base.config.get("history", ()), *history],
        }
        return layout.add_image((*base.layers, *layers), config)

    manifest = add_image()
    for name, write, keys in _compiled(inputs, scripts, settings["Env"]):
        records = [workspace.cache / "layers" / f"{inputs.digest(key)}.json" for key in keys]
        kernels = next(filter(None, (written_layer(record, layout) for record in records)), None)
        if kernels is None:
            with layout.writer() as blob:
                layer = LayerWriter(blob)
                write(layer, manifest.digest, workspace)
                kernels = layer.finish()
            write_record(records[0], kernels)
        layers.append(kernels)
        descriptions.append(f"kernels of {name}")
        without, manifest = manifest, add_image()
        layout.remove(without.digest)
    return layout.image(manifest.digest)


def _compiled(
    inputs: _Inputs, scripts: Mapping[str, str], env: Sequence[str]
) -> Iterator[tuple[str, Callable[[LayerWriter, str, Workspace], object], list[list[object]]]]:
    """The layers that a program in the image of the others writes: what they have, the function, and the keys that fit.

    An image with local patches takes kernels of Triton that were compiled without these, if there are any: Triton does not find
    those whose source they change, and compiles them.
    """
    context = inputs.context
    if b12x.REQUEST in scripts:
        names = (b12x.PROGRAM, b12x.OF_1_5, b12x.REQUEST)
        installed = (*context.locked, *(wheel for wheel in _ours(context) if wheel.name == b12x.NAME))
        yield "b12x", b12x.COMPILER.write, [["b12x", *(scripts[name] for name in names), env, installed]]
    if triton.RECORD in scripts:
        of_ours = ("recipe", "pin", "official", "patches")
        ours = [[built.wheel.name, *(built.origin.get(name) for name in of_ours)] for built in context.ours]
        given: list[object] = ["Triton", scripts[triton.PROGRAM], scripts[triton.RECORD], env, context.locked, ours]
        local = [context.labels[LOCAL]] if LOCAL in context.labels else []
        yield "Triton", triton.write_kernels, [[*given, *local], given]


def _settings(of_setup: Mapping[str, Any], labels: Mapping[str, str], base: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config`` of an image. A start command of the base belongs to another program."""
    env = dict(entry.split("=", 1) for entry in base.get("Env") or ())
    env["PATH"] = f"/{VENV}/bin:{env.get('PATH') or _PATH}"
    env |= dict(entry.split("=", 1) for entry in of_setup["Env"])
    inherited = {key: value for key, value in base.items() if value and key not in ("Cmd", "Entrypoint")}
    return {
        **inherited,
        **of_setup,
        "Env": [f"{name}={value}" for name, value in env.items()],
        "Labels": {**(base.get("Labels") or {}), **labels},
    }


def _ours(context: ImageContext) -> list[LockedWheel]:
    return [built.wheel for built in context.ours]


def _contents(
    wheel: LockedWheel, files: Callable[[LockedWheel], Path], python: ImagePython, workspace: Workspace
) -> WheelContents:
    """The contents of a wheel, which are recorded so that it is read once."""
    key = digest_of([FORMAT, wheel, python.short_version])
    record = workspace.cache / "contents" / f"{key}.json"
    try:
        return read_record(WheelContents, record)
    except (OSError, BadRecord):
        contents = _wheel_layers.read_contents(wheel, files(wheel), python)
    write_record(record, contents)
    return contents


def _plan(inputs: _Inputs, scripts: Mapping[str, str]) -> Iterator[_Layer]:
    """The layers of an image, lowest first: what changes least, and is shared most, is lowest."""
    context = inputs.context
    of_nvidia = [wheel for wheel in context.locked if wheel.name.startswith(NVIDIA)]
    others = [wheel for wheel in context.locked if wheel not in of_nvidia]
    ours = _ours(context)
    yield inputs.layer("environment", "environment", 0, lambda layer, _: _write_venv(layer, inputs))
    groups = _groups(of_nvidia, others, inputs.contents)
    stages = (of_nvidia, others, ours)
    absent = _left_out(inputs)
    contents = {wheel: _except(inputs.contents[wheel], absent.get(wheel, frozenset())) for stage in stages for wheel in stage}
    without = _shadowed([*groups, *([wheel] for wheel in ours)], _wheel_layers.winners(stages, contents), contents)
    without |= {wheel: without[wheel] | paths for wheel, paths in absent.items()}
    for group in groups:
        yield _wheel_layer(inputs, group, without)
    yield _cuda_layer(inputs, of_nvidia, frozenset().union(*absent.values()))
    for built in context.ours:
        yield from _our_layers(inputs, built, without)
    files = {f"etc/{name}": inputs.base.accounts[name] + added for name, added in _USER.items()}
    files |= {f"opt/sm120kit/{name}": text for name, text in scripts.items()}
    yield inputs.layer("user", ["user", files], 0, lambda layer, _: _write_user(layer, files))


def _groups(
    of_nvidia: Sequence[LockedWheel], others: Sequence[LockedWheel], contents: Mapping[LockedWheel, WheelContents]
) -> list[list[LockedWheel]]:
    """Wheels by layer. A large wheel is alone, so that its layer is shared by all images with it."""
    limit = _LARGE_BYTES
    while sum(contents[wheel].size >= limit for wheel in (*of_nvidia, *others)) > MAX_ALONE:
        limit *= 2
    groups = []
    for stage in (of_nvidia, others):
        by_name = sorted(stage, key=lambda wheel: wheel.name)
        large = [[wheel] for wheel in by_name if contents[wheel].size >= limit]
        rest = [wheel for wheel in by_name if contents[wheel].size < limit]
        groups += [*large, *([rest] if rest else [])]
    return groups


def _shadowed(
    groups: Sequence[Sequence[LockedWheel]], winners: Mapping[str, LockedWheel], contents: Mapping[LockedWheel, WheelContents]
) -> dict[LockedWheel, frozenset[str]]:
    """The files of each wheel that must not be written: those that would hide or repeat the file of another wheel."""
    position = {wheel: index for index, group in enumerate(groups) for wheel in group}
    without: dict[LockedWheel, set[str]] = {wheel: set() for wheel in position}
    for group in groups:
        owner: dict[str, LockedWheel] = {}
        for wheel in group:
            for path, digest in contents[wheel].files.items():
                winner = winners.get(path)
                hides = winner is not None and digest != contents[winner].files[path] and position[winner] <= position[wheel]
                if hides or path in owner:
                    without[wheel].add(path)
                else:
                    owner[path] = wheel
    return {wheel: frozenset(paths) for wheel, paths in without.items()}


def _except(contents: WheelContents, paths: frozenset[str]) -> WheelContents:
    """Contents without some files, so that these replace no file of another wheel."""
    return replace(contents, files={path: digest for path, digest in contents.files.items() if path not in paths})


def _left_out(inputs: _Inputs) -> dict[LockedWheel, frozenset[str]]:
    """The files that the recipe leaves out, as paths in the image."""
    site = f"{VENV}/lib/python{inputs.python.short_version}/site-packages/"
    by_name = {wheel.name: wheel for wheel in inputs.contents}
    absent = {}
    for name, listed in patterns(inputs.context.labels, LEFT_OUT).items():
        files = inputs.contents[by_name[name]].files if name in by_name else {}
        matches = {pattern: [path for path in files if fnmatchcase(path.removeprefix(site), pattern)] for pattern in listed}
        if unmatched := [pattern for pattern, paths in matches.items() if not paths]:
            raise BadInput(
                f"{inputs.context.labels[f'{LABEL}recipe']}: leave_out of {name}: no file of its wheel matches {unmatched[0]}",
                "correct or remove the pattern, then lock the recipe again",
            )
        absent[by_name[name]] = frozenset(path for paths in matches.values() for path in paths)
    return absent


def _wheel_layer(inputs: _Inputs, group: Sequence[LockedWheel], without: Mapping[LockedWheel, frozenset[str]]) -> _Layer:
    wrong = patterns(inputs.context.labels, WRONG_RECORD)

    def write(layer: LayerWriter, compiler: BytecodeCompiler) -> None:
        bytecode = BytecodeWriter(compiler, layer)
        for wheel in group:
            _wheel_layers.install(wheel, inputs.files(wheel), layer, bytecode, without[wheel], wrong.get(wheel.name, ()))
        bytecode.finish()

    names = [wheel.name for wheel in group]
    description = f"{len(names)} wheels" if len(names) > 1 else f"{names[0]} {group[0].version}"
    key = ["wheels", [[wheel, sorted(without[wheel])] for wheel in group]]
    return inputs.layer(description, key, sum(inputs.contents[wheel].size for wheel in group), write)


def _our_layers(inputs: _Inputs, built: BuiltWheel, without: Mapping[LockedWheel, frozenset[str]]) -> Iterator[_Layer]:
    """The layers of a wheel that sm120kit built: the files that are as released, and above them those that it changed.

    The lower one follows from the files in it and their order, not from the wheel: images with other patches or modules have
    it, too. Of an upstream wheel that is packed again it has all Python files as released, whichever the upper one hides.
    """
    wheel = built.wheel
    source = inputs.official.get(built.origin.get("official", {}).get("sha256", ""), wheel)
    contents, own = inputs.contents[source], inputs.contents[wheel].files
    site = f"{VENV}/lib/python{inputs.python.short_version}/site-packages/"
    listed = {f"{site}{member}" for key in ("changed", "replaced") for member in built.origin.get(key, ())}
    hidden = {path for path in listed if source != wheel and path.endswith(".py")}
    fixed, wrong = listed - hidden, patterns(inputs.context.labels, WRONG_RECORD).get(wheel.name, ())
    released = {
        path: digest
        for path, digest in contents.files.items()
        if digest.startswith("sha256=") and ".dist-info/" not in path and path in own and path not in fixed
        if not any(fnmatchcase(path.removeprefix(site), pattern) for pattern in wrong)
    }
    if listed and released:
        written = [path for path in released if path not in without[wheel]]
        files = [(path, released[path], path in contents.executable) for path in written]
        lower = _wheel_layer(inputs, [source], {source: without[wheel] | frozenset(contents.files.keys() - released.keys())})
        key = ["released files", files] if source == wheel else ["released files", source, sorted(written)]
        yield replace(lower, description=f"{wheel.name} as released", inputs=inputs.digest(key))
        without = {wheel: without[wheel] | frozenset(released.keys() - hidden)}
    yield _wheel_layer(inputs, [wheel], without)


def _cuda_layer(inputs: _Inputs, of_nvidia: Sequence[LockedWheel], absent: frozenset[str]) -> _Layer:
    directory = f"{VENV}/lib/python{inputs.python.short_version}/site-packages/{_CUDA}"
    files = [(path, wheel) for wheel in of_nvidia for path in inputs.contents[wheel].files if path not in absent]
    owners = {path: wheel for path, wheel in files if path.startswith(directory)}
    header = f"{directory}/include/cuda.h"
    if header not in owners:
        raise CommandFailed(
            f"no wheel of {inputs.context.reference} has {_CUDA}/include/cuda.h, from which its CUDA home is made",
            "the recipe's environment must require nvidia-cuda-runtime for CUDA 13",
        )
    entries = {
        path.removeprefix(f"{directory}/lib/").partition("/")[0] for path in owners if path.startswith(f"{directory}/lib/")
    }
    libraries = sorted(name for name in entries if name.startswith("lib"))
    architecture = inputs.base.config["architecture"]
    machine = next(machine for machine, name in ARCHITECTURES.items() if name == architecture)

    def write(layer: LayerWriter, compiler: BytecodeCompiler) -> None:
        wheel = owners[header]
        text = _wheel_layers.read_file(wheel, inputs.files(wheel), f"{_CUDA}/include/cuda.h").decode(errors="replace")
        _write_cuda_home(layer, directory, libraries, link_stub(text, machine))

    key = ["cuda home", libraries, inputs.contents[owners[header]].files[header], architecture]
    return inputs.layer("CUDA home", key, 0, write)


def _write_cuda_home(layer: LayerWriter, wheels: str, libraries: Iterable[str], stub: bytes) -> None:
    """Write ``/opt/cuda``: links to the directory ``wheels`` of the image, whose ``lib`` has the files ``libraries``.

    Compilers look for libraries in ``lib64`` and without versions. ``lib``, which is on the library path, has those of CUDA 13.
    """
    for name in ("bin", "include", "nvvm"):
        layer.symlink(f"{_CUDA_HOME}/{name}", f"/{wheels}/{name}")
    lib, lib64 = {}, {}
    for name in sorted(libraries):
        target = f"/{wheels}/lib/{name}"
        lib64[name] = target
        if ".so.13" in name:
            lib[name] = target
        if ".so." in name:
            lib64[name.partition(".so.")[0] + ".so"] = name
    layer.directory(f"{_CUDA_HOME}/lib")
    for directory, links in (("lib", lib), ("lib64", lib64)):
        for name, target in sorted(links.items()):
            layer.symlink(f"{_CUDA_HOME}/{directory}/{name}", target)
    layer.file(f"{_CUDA_HOME}/lib64/stubs/libcuda.so", [stub], len(stub), mode=0o755)


def _write_venv(layer: LayerWriter, inputs: _Inputs) -> None:
    """Write the environment into which the wheels are installed."""
    environment: dict[str, str | None] = {name: None for name in os.environ if name.startswith("PYTHON")}
    made = process.run([*inputs.base.python, "-S", "-s", "-c", _MAKE_VENV, INTERPRETER, VENV], env=environment)
    executable = f"executable = {INTERPRETER.rpartition('/')[0]}/python{inputs.python.short_version}\n"
    entries: dict[str, tuple[str, str]] = json.loads(made.raw)
    for path, (kind, text) in sorted(entries.items(), key=lambda entry: entry[0].split("/")):
        if kind == "link":
            layer.symlink(path, text)
        elif kind == "directory":
            layer.directory(path)
        else:
            lines = text.splitlines(keepends=True)
            content = "".join(executable if line.startswith("executable = ") else line for line in lines).encode()
            layer.file(path, [content], len(content))


def _write_user(layer: LayerWriter, files: Mapping[str, str]) -> None:
    """Write the user who runs programs in the image, and the programs of the entrypoint and the health check."""
    for path, text in sorted(files.items()):
        content = text.encode()
        layer.file(path, [content], len(content))
    for path in ("home/sm120kit", "home/sm120kit/.cache"):
        layer.directory(path, uid=1000, gid=0, mode=0o775)  # any user of group 0 may write there
    layer.directory("root", mode=0o711)  # the pages of the engines mount caches below it


def _write(
    planned: Sequence[_Layer], inputs: _Inputs, bytecode: BytecodeCompiler, layout: Layout, workspace: Workspace
) -> list[Descriptor]:
    """Write the layers that the layout lacks, the largest first, two at a time."""
    records = {layer: workspace.cache / "layers" / f"{layer.inputs}.json" for layer in planned}
    written = {layer: written_layer(record, layout) for layer, record in records.items()}
    missing = sorted((layer for layer in planned if written[layer] is None), key=lambda layer: -layer.size)
    total = sum(layer.size for layer in missing)
    require_disk(layout.directory, int(2 * total * 1.05) + _MARGIN_BYTES if missing else 0, "the image with its unpacked files")
    stop = threading.Event()
    with reporting.task(f"writing {len(missing)} of {len(planned)} layers", total, transfer=True) as advance:

        def write(layer: _Layer) -> Descriptor:
            unreported = 0

            def observe(size: int) -> None:
                nonlocal unreported
                if stop.is_set():
                    raise process.Stopped
                unreported += size
                if unreported >= _REPORTED_BYTES:
                    advance(unreported)
                    unreported = 0

            with layout.writer() as blob, _rootfs.layer_files(workspace) as files:
                tar = LayerWriter(blob, observe, files.add)
                layer.write(tar, bytecode)
                descriptor = tar.finish()
                files.publish(descriptor.digest)
            write_record(records[layer], descriptor)
            return descriptor

        jobs = [partial(write, layer) for layer in missing]
        done = dict(zip(missing, in_parallel(jobs, 2, stop.set), strict=True))
    return [written[layer] or done[layer] for layer in planned]


def written_layer(record: Path, layout: Layout) -> Descriptor | None:
    """A recorded layer, if the layout has it."""
    try:
        layer = read_record(Descriptor, record)
        present = layout.has(layer.digest, layer.size)
    except (OSError, BadRecord, BadInput):
        return None
    if present:
        mark_used(record)
    return layer if present else None
