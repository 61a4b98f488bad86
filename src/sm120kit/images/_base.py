"""The base of an image: a root file system of locked Debian packages, as one layer.

Packages are read here, without dpkg and root, and their maintainer scripts are not run. What these would do is in
``recipes/bases/`` (links, copies, directories, alternatives) or in this module: ``/etc/ld.so.cache``, the bundle of
certificates, bytecode of Python's standard library, dpkg's list of packages. The layer follows from the lockfile alone.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sm120kit.core import reporting
from sm120kit.core.archives import SOURCE_DATE_EPOCH
from sm120kit.core.digests import digest_of
from sm120kit.core.disk import disk_errors, require_disk
from sm120kit.core.errors import BadRecord, NotTrusted
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.temporary import publish_directory
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.images import _bytecode
from sm120kit.images._assembly import ImageBase
from sm120kit.images._layers import LayerWriter
from sm120kit.images._loader_cache import loader_cache
from sm120kit.images.local_images import DEFAULT_PATH
from sm120kit.images.oci import Descriptor, Layout
from sm120kit.recipes import bases
from sm120kit.sources import debian
from sm120kit.sources.debian_files import HINT, MERGED, RootEntry, unpack
from sm120kit.sources.run_options import Options

FORMAT = 1
"""Raised when the layer of a base changes without its lockfile."""

CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
"""As in other images of Debian."""

_CHUNK = 2**20


@dataclass(frozen=True)
class BaseLayer:
    """A base as a layer. ``root`` is its unpacked file system, which must not be changed; all files belong to this user."""

    name: str
    machine: str
    layer: Descriptor
    root: Path

    def image_base(self, python: tuple[str, ...]) -> ImageBase:
        """What an image is built on; ``python`` is the command that starts the Python of the base, or of another machine's."""
        created = f"{datetime.fromtimestamp(SOURCE_DATE_EPOCH, UTC):%Y-%m-%dT%H:%M:%SZ}"
        config = {
            "architecture": debian.ARCHITECTURES[self.machine],
            "os": "linux",
            "config": {"Env": [f"PATH={DEFAULT_PATH}"]},
            "history": [{"created": created, "created_by": f"sm120kit: base {self.name}"}],
        }
        accounts = {name: (self.root / "etc" / name).read_text() for name in ("passwd", "group")}
        return ImageBase((self.layer,), config, accounts, python)


def image_base(base: bases.Base, machine: str, layout: Layout, options: Options) -> ImageBase:
    """What an image is built on, for a machine (``x86_64``, ``aarch64``). See :func:`base_layer` for errors."""
    own = os.uname().machine
    runs_here = base_layer(base, own, layout, options) if machine != own else None
    made = base_layer(base, machine, layout, options)
    return made.image_base(python((runs_here or made).root))


def debian_image(name: str, machine: str, options: Options) -> tuple[ImageBase, str]:
    """A base of ``recipes/bases/`` for a machine as an image in the state directory, and ``name@digest`` of that image."""
    layout = Layout(options.workspace.root / "oci")
    base = image_base(bases.load(name), machine, layout, options)
    manifest = layout.add_image(base.layers, base.config)
    return base, f"{name}@{manifest.digest}"


BYTES_PER_PACKED = 8
"""Disk space for each byte of a base's packages: packages, files, layer."""


def is_assembled(base: bases.Base, machine: str, workspace: Workspace) -> bool:
    """Whether the files of a base are in the state directory."""
    return (workspace.root / "bases" / directory_name(base, machine)).is_dir()


def base_layer(base: bases.Base, machine: str, layout: Layout, options: Options) -> BaseLayer:
    """The layer of a base for a machine (``x86_64``, ``aarch64``) and its unpacked files, created if they do not exist.

    The bytecode of a base for another machine is compiled by the same base for this machine.

    Raises:
        Mismatch: the base is not locked, or its lockfile is outdated.
        NotFound, FetchFailed and others: see :func:`sm120kit.sources.debian.fetch`.
        NotTrusted: a package is damaged, or has a member that cannot be in a layer.
        ResourceUnavailable, SystemRefused: it cannot be stored.
    """
    packages = bases.read_lock(base.name, machine)
    workspace = options.workspace
    target = workspace.root / "bases" / directory_name(base, machine)
    if (made := _read(target, layout)) is not None:
        return made
    own = os.uname().machine
    compiled_by = None if machine == own else base_layer(base, own, layout, options).root
    debs = debian.fetch(packages, workspace, options.origin)
    with workspace.exclusive(target.name), reporting.step(f"assembling the base {base.name} for {machine}"):
        if (made := _read(target, layout)) is not None:
            return made
        require_disk(workspace.root, BYTES_PER_PACKED * sum(package.size for package in packages), f"the base {base.name}")
        shutil.rmtree(target, ignore_errors=True)  # its layer was removed
        with publish_directory(target) as directory, disk_errors(directory):
            root = directory / "root"
            root.mkdir()
            system = DebianSystem(root, debs, base)
            system.add_generated(machine)
            system.add_bytecode(python(compiled_by or root))
            made = BaseLayer(base.name, machine, system.write(layout), target / "root")
            write_record(directory / "base.json", made)
    return made


def directory_name(base: bases.Base, machine: str) -> str:
    """The name of a base's directory in ``<state>/bases``, which is that of all its inputs."""
    key = digest_of([FORMAT, base.inputs(), machine, bases.read_lock(base.name, machine)])
    return f"{base.name}-{machine}-{key[:16]}"


def _read(target: Path, layout: Layout) -> BaseLayer | None:
    """The recorded layer, if the layout has it."""
    try:
        made = read_record(BaseLayer, target / "base.json")
    except (OSError, BadRecord):
        return None
    if not layout.has(made.layer.digest, made.layer.size) or not (target / "root").is_dir():
        return None
    mark_used(target)
    return replace(made, root=target / "root")


def python(root: Path) -> tuple[str, ...]:
    """The command that starts the Python of an unpacked base for this machine, without namespaces and root.

    Its own loader finds its own libraries. It writes no bytecode.
    """
    loader = next((root / "usr/lib").glob("*-linux-gnu/ld-linux-*.so.*"))
    interpreter = root / "usr/bin" / (root / "usr/bin/python3").readlink().name
    environment = ("env", "-u", "PYTHONPATH", f"PYTHONHOME={root}/usr")
    return (*environment, str(loader), "--library-path", str(loader.parent), str(interpreter), "-B")


class DebianSystem:
    """A root file system of unpacked packages, in a directory of files that belong to this user."""

    def __init__(self, root: Path, debs: Sequence[Path], base: bases.Base) -> None:
        """Unpack packages into ``root``, an empty directory.

        Raises:
            NotTrusted: a package is damaged, has a member that cannot be in a layer, or a path that another has, too.
        """
        self._root = root
        self._base = base
        largest_first = sorted(debs, key=lambda deb: -deb.stat().st_size)
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            results = pool.map(functools.partial(unpack, root=root, left_out=base.left_out), largest_first)
            unpacked = dict(zip(largest_first, results, strict=True))
        self._packages = [unpacked[deb] for deb in debs]
        self.entries = {"": RootEntry("", "directory")}
        for deb in debs:
            for entry in unpacked[deb].entries:
                self._add(entry, deb)
        self._require_directories()
        self._create_links()
        for name in (name for name in MERGED if f"usr/{name}" in self.entries):
            self._link(name, f"usr/{name}")

    def _add(self, entry: RootEntry, deb: Path) -> None:
        present = self.entries.get(entry.path)
        if present is None:
            self.entries[entry.path] = entry
        elif not present.kind == entry.kind == "directory":
            raise NotTrusted(f"{deb.name} has {entry.path}, which another package has, too", HINT)

    def _require_directories(self) -> None:
        """Require that every path is below directories only, and add those that no package has."""
        for path in sorted(self.entries):
            for parent in _parents(path):
                present = self.entries.setdefault(parent, RootEntry(parent, "directory"))
                if present.kind != "directory":
                    raise NotTrusted(f"a package has {path} below {parent}, which is a {present.kind}", HINT)

    def _create_links(self) -> None:
        """Create the links of packages. Of the names of a file, the first in order is the file, the others are links to it."""
        names: dict[str, list[str]] = {}
        for _, entry in sorted(self.entries.items()):
            path = self._root / entry.path
            if entry.kind == "symlink" and not path.is_symlink():
                path.symlink_to(entry.target)
            elif entry.kind == "hardlink":
                names.setdefault(entry.target, [entry.target]).append(entry.path)
            elif entry.kind == "directory":
                path.mkdir(exist_ok=True)
        for target, paths in names.items():
            file = self.entries.get(target)
            if file is None or file.kind != "file":
                raise NotTrusted(f"a package has {paths[1]} as another name of {target}, which is no file", HINT)
            first, *others = sorted(paths)
            for name in paths[1:]:
                os.link(self._root / target, self._root / name)
            self.entries[first] = replace(file, path=first)
            self.entries |= {path: replace(file, path=path, kind="hardlink", target=first) for path in others}

    def _directory(self, path: str) -> None:
        """Add a directory and those above it, if they do not exist."""
        for missing in (name for name in (*_parents(path), path) if name not in self.entries):
            (self._root / missing).mkdir()
            self.entries[missing] = RootEntry(missing, "directory")

    def _file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        self._directory(path.rpartition("/")[0])
        if path in self.entries:
            raise NotTrusted(f"a package has {path}, which sm120kit writes", HINT)
        (self._root / path).write_bytes(content)
        self.entries[path] = RootEntry(path, "file", mode)

    def _link(self, path: str, target: str) -> None:
        """Add a link, if need be in the place of an empty directory."""
        present = self.entries.get(path)
        if present and present.kind == "directory" and not any((self._root / path).iterdir()):
            (self._root / path).rmdir()
        elif present:
            raise NotTrusted(f"a package has {path}, where sm120kit puts a link", HINT)
        self._directory(path.rpartition("/")[0])
        (self._root / path).symlink_to(target)
        self.entries[path] = RootEntry(path, "symlink", 0o777, target=target)

    def _content(self, path: str) -> bytes:
        self._require(path, "file", "hardlink")
        return (self._root / path).read_bytes()

    def _require(self, path: str, *kinds: str) -> None:
        """Require that a package has a path of one of these kinds."""
        if path not in self.entries or self.entries[path].kind not in kinds:
            raise NotTrusted(f"no package of the base {self._base.name} has {path}", "correct the base, and lock it again")

    def add_generated(self, machine: str) -> None:
        """Add what maintainer scripts and dpkg would write."""
        for path, mode in self._base.directories.items():
            self._directory(path)
            self.entries[path] = replace(self.entries[path], mode=int(mode, 8))
        for path, source in self._base.copies.items():
            self._file(path, self._content(source))
        for path, target in self._base.links.items():
            self._link(path, target)
        for name, program in self._base.alternatives.items():
            self._require(f"usr/bin/{program}", "file", "hardlink", "symlink")
            self._link(f"etc/alternatives/{name}", f"/usr/bin/{program}")
            self._link(f"usr/bin/{name}", f"/etc/alternatives/{name}")
        self._add_certificates()
        self._add_package_list()
        self._file("etc/ld.so.cache", loader_cache(self._root, machine))

    def _add_certificates(self) -> None:
        """The bundle of all certificates and a link to each, as update-ca-certificates makes them."""
        prefix = "usr/share/ca-certificates/"
        listed = sorted(path for path in self.entries if path.startswith(prefix) and path.endswith(".crt"))
        if listed:
            self._file(CERTIFICATES, b"".join(self._content(path).rstrip(b"\n") + b"\n" for path in listed))
            self._file("etc/ca-certificates.conf", "".join(f"{path.removeprefix(prefix)}\n" for path in listed).encode())
            for path in listed:
                self._link(f"etc/ssl/certs/{Path(path).stem}.pem", f"/{path}")

    def _add_package_list(self) -> None:
        """dpkg's database: packages are installed and configured, with the files that they list."""
        status = []
        self._file("var/lib/dpkg/info/format", b"1\n")
        for package in self._packages:
            control = package.control["control"].decode().strip("\n")
            fields = dict(line.split(": ", 1) for line in control.splitlines() if line[:1].isalpha() and ": " in line)
            first, _, rest = control.partition("\n")
            status.append(f"{first}\nStatus: install ok installed\n{rest}\n\n")
            shared = fields.get("Multi-Arch") == "same"
            name = f"{fields['Package']}:{fields['Architecture']}" if shared else fields["Package"]
            self._file(f"var/lib/dpkg/info/{name}.list", "".join(f"/{path}\n" for path in (".", *package.paths)).encode())
            if "md5sums" in package.control:
                self._file(f"var/lib/dpkg/info/{name}.md5sums", package.control["md5sums"])
        self._file("var/lib/dpkg/status", "".join(status).encode())
        for name in ("available", "diversions", "statoverride"):
            self._file(f"var/lib/dpkg/{name}", b"")

    def add_bytecode(self, argv: Sequence[str]) -> None:
        """Add the bytecode of Python's standard library, compiled by the Python that ``argv`` starts."""
        files = [path for path, entry in sorted(self.entries.items()) if entry.kind == "file"]
        sources = fnmatch.filter(files, "usr/lib/python3*/*.py")
        compiler = _bytecode.BytecodeCompiler(argv)
        for path, content in zip(
            sources, compiler.compile([(f"/{path}", self._content(path)) for path in sources]), strict=True
        ):
            if content:
                self._file(compiler.python.cached_path(path), content)

    def write(self, layout: Layout) -> Descriptor:
        """Write the layer, in the order of paths."""
        with layout.writer() as blob:
            layer = LayerWriter(blob)
            for path, entry in sorted(self.entries.items())[1:]:
                owner = {"uid": entry.uid, "gid": entry.gid}
                if entry.kind == "directory":
                    layer.directory(path, mode=entry.mode, **owner)
                elif entry.kind == "symlink":
                    layer.symlink(path, entry.target, **owner)
                elif entry.kind == "hardlink":
                    layer.hardlink(path, entry.target, mode=entry.mode, **owner)
                else:
                    with (self._root / path).open("rb") as file:
                        size = os.fstat(file.fileno()).st_size
                        layer.file(path, iter(functools.partial(file.read, _CHUNK), b""), size, mode=entry.mode, **owner)
            return layer.finish()


def _parents(path: str) -> Iterator[str]:
    """The directories above a path, outermost first, without the root."""
    parts = path.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))
