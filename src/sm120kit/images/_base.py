"""The base of an image: a root file system of locked Debian packages, as one layer.

Packages are read here, without dpkg and root, and their maintainer scripts are not run. What these would do is in
``recipes/bases/`` (links, copies, directories, alternatives) or in this module: ``/etc/ld.so.cache``, the bundle of
certificates, bytecode of Python's standard library, dpkg's list of packages. The layer follows from the lockfile alone.
"""

import fnmatch
import functools
import os
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sm120kit.core import reporting
from sm120kit.core.archives import SOURCE_DATE_EPOCH
from sm120kit.core.digests import digest_of
from sm120kit.core.disk import require_disk
from sm120kit.core.errors import NotTrusted
from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import _bytecode, _rootfs
from sm120kit.images._assembly import ImageBase, written_layer
from sm120kit.images._layers import LayerWriter
from sm120kit.images._loader_cache import loader_cache
from sm120kit.images.local_images import DEFAULT_PATH
from sm120kit.images.oci import Descriptor, Layout
from sm120kit.recipes import bases
from sm120kit.sources import debian, debian_files
from sm120kit.sources.run_options import Options

FORMAT = 2
"""Raised when the layer of a base changes without its lockfile."""

CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
"""As in other images of Debian."""

BYTES_PER_PACKED = 8
"""Disk space for each byte of a base's packages: packages, files, layer."""


def debian_image(name: str, machine: str, options: Options) -> tuple[ImageBase, str]:
    """A base of ``recipes/bases/`` for a machine as an image in the state directory, and ``name@digest`` of that image."""
    layout = Layout(options.workspace.root / "oci")
    base = image_base(bases.load(name), machine, layout, options)
    manifest = layout.add_image(base.layers, base.config)
    return base, f"{name}@{manifest.digest}"


def image_base(base: bases.Base, machine: str, layout: Layout, options: Options) -> ImageBase:
    """What an image is built on, for a machine (``x86_64``, ``aarch64``). See :func:`base_layer` for errors."""
    layer = base_layer(base, machine, layout, options)
    native = layer if machine == os.uname().machine else base_layer(base, os.uname().machine, layout, options)
    root, runs_here = (_rootfs.tree_of(each, layout, options.workspace) for each in (layer, native))
    return described(base.name, machine, layer, root, python(runs_here))


def described(name: str, machine: str, layer: Descriptor, root: Path, python: tuple[str, ...]) -> ImageBase:
    """The layer of a base as what an image is built on. ``root`` are its files; ``python`` starts its Python, or its like."""
    created = f"{datetime.fromtimestamp(SOURCE_DATE_EPOCH, UTC):%Y-%m-%dT%H:%M:%SZ}"
    config = {
        "architecture": debian.ARCHITECTURES[machine],
        "os": "linux",
        "config": {"Env": [f"PATH={DEFAULT_PATH}"]},
        "history": [{"created": created, "created_by": f"sm120kit: base {name}"}],
    }
    accounts = {name: (root / "etc" / name).read_text() for name in ("passwd", "group")}
    return ImageBase((layer,), config, accounts, python)


def record_path(base: bases.Base, machine: str, workspace: Workspace) -> Path:
    """The record of the layer of a base, which is named by the digest of all its inputs."""
    key = digest_of([FORMAT, base.inputs(), machine, bases.read_lock(base.name, machine)])
    return workspace.cache / "layers" / f"{key}.json"


def base_layer(base: bases.Base, machine: str, layout: Layout, options: Options) -> Descriptor:
    """The layer of a base for a machine (``x86_64``, ``aarch64``), written if it does not exist.

    Raises:
        Mismatch: the base is not locked.
        NotFound, FetchFailed and others: see :func:`sm120kit.sources.debian.fetch`.
        NotTrusted: a package is damaged, or two have the same file.
        ResourceUnavailable, SystemRefused: it cannot be stored.
    """
    packages, workspace = bases.read_lock(base.name, machine), options.workspace
    record, own = record_path(base, machine, workspace), os.uname().machine
    if layer := written_layer(record, layout):
        return layer
    compiled_by = None if machine == own else base_layer(base, own, layout, options)
    debs = debian.fetch(packages, workspace, options.origin)
    with workspace.exclusive(f"base-{record.stem}"), reporting.step(f"assembling the base {base.name} for {machine}"):
        if layer := written_layer(record, layout):
            return layer
        require_disk(workspace.root, BYTES_PER_PACKED * sum(package.size for package in packages), f"the base {base.name}")
        with layout.writer() as blob, _rootfs.layer_files(workspace) as files:
            system = DebianSystem(LayerWriter(blob, add=files.add), files.tree, base)
            system.add_packages(debs)
            system.add_generated(machine)
            root = _rootfs.tree_of(compiled_by, layout, workspace) if compiled_by else files.tree
            system.add_bytecode(python(root))
            layer = system.layer.finish()
            files.publish(layer.digest)
        write_record(record, layer)
    return layer


def python(root: Path) -> tuple[str, ...]:
    """The command that starts the Python of an unpacked base for this machine, without namespaces and root.

    The loader of the base starts it, so that it does not depend on this system's libraries.
    """
    loader = next((root / "usr/lib").glob("*-linux-gnu/ld-linux-*.so.*"))
    interpreter = root / "usr/bin" / (root / "usr/bin/python3").readlink().name
    environment = ("env", "-u", "PYTHONPATH", f"PYTHONHOME={root}/usr")
    return (*environment, str(loader), "--library-path", str(loader.parent), str(interpreter), "-B")


@dataclass(frozen=True)
class DebianSystem:
    """A root file system of packages that is written to a layer, whose files are below ``root`` as well."""

    layer: LayerWriter
    root: Path
    base: bases.Base

    def add_packages(self, debs: Sequence[Path]) -> None:
        """Add the files of packages in their order, and dpkg's database: they are installed and configured.

        Raises:
            NotTrusted: a package is damaged or hostile, or two have the same file.
        """
        status = []
        for deb in debs:
            package = debian_files.read(deb, functools.partial(self._add, deb), self.base.left_out)
            status.append(self._list(package))
        for name in (name for name in debian_files.MERGED if f"usr/{name}" in self.layer):
            self.layer.symlink(name, f"usr/{name}")
        self._file("var/lib/dpkg/info/format", b"1\n")
        self._file("var/lib/dpkg/status", "".join(status).encode())
        for name in ("available", "diversions", "statoverride"):
            self._file(f"var/lib/dpkg/{name}", b"")

    def _add(self, deb: Path, member: tarfile.TarInfo, chunks: Iterable[bytes]) -> None:
        """Add a member of a package. Directories may be in several packages, and in the place of links of the base."""
        path, owner = member.name, {"uid": member.uid, "gid": member.gid}
        mode = int(self.base.directories.get(path, "0"), 8) or member.mode & 0o7777
        try:
            if member.isdir():
                if path not in self.layer and path not in self.base.links:
                    self.layer.directory(path, mode=mode, **owner)
            elif member.issym():
                self.layer.symlink(path, member.linkname, **owner)
            elif member.islnk():
                self.layer.hardlink(path, member.linkname, mode=mode, **owner)
            else:
                self.layer.file(path, chunks, member.size, mode=mode, **owner)
        except NotTrusted as error:
            raise NotTrusted(f"{deb.name}: {error.message}", debian_files.HINT) from error

    def _list(self, package: debian_files.PackageContents) -> str:
        """Add the lists of a package's files; returns its paragraph of dpkg's status."""
        control = package.control["control"].decode().strip("\n")
        fields = dict(line.split(": ", 1) for line in control.splitlines() if line[:1].isalpha() and ": " in line)
        shared = fields.get("Multi-Arch") == "same"
        name = f"{fields['Package']}:{fields['Architecture']}" if shared else fields["Package"]
        self._file(f"var/lib/dpkg/info/{name}.list", "".join(f"/{path}\n" for path in (".", *package.paths)).encode())
        if "md5sums" in package.control:
            self._file(f"var/lib/dpkg/info/{name}.md5sums", package.control["md5sums"])
        first, _, rest = control.partition("\n")
        return f"{first}\nStatus: install ok installed\n{rest}\n\n"

    def add_generated(self, machine: str) -> None:
        """Add what maintainer scripts would write.

        Raises:
            NotTrusted: no package has what the base names, or one has a file that is written here.
        """
        for path, mode in self.base.directories.items():
            if path not in self.layer:
                self.layer.directory(path, mode=int(mode, 8))
        for path, source in self.base.copies.items():
            self._file(path, self._content(source))
        for path, target in self.base.links.items():
            self.layer.symlink(path, target)
        for name, program in self.base.alternatives.items():
            self._require(f"usr/bin/{program}")
            self.layer.symlink(f"etc/alternatives/{name}", f"/usr/bin/{program}")
            self.layer.symlink(f"usr/bin/{name}", f"/etc/alternatives/{name}")
        self._add_certificates()
        self._file("etc/ld.so.cache", loader_cache(self.root, machine))

    def _add_certificates(self) -> None:
        """The bundle of all certificates and a link to each, as update-ca-certificates makes them."""
        prefix = "usr/share/ca-certificates/"
        listed = sorted(path for path in self.layer.files if path.startswith(prefix) and path.endswith(".crt"))
        if listed:
            self._file(CERTIFICATES, b"".join(self._content(path).rstrip(b"\n") + b"\n" for path in listed))
            self._file("etc/ca-certificates.conf", "".join(f"{path.removeprefix(prefix)}\n" for path in listed).encode())
            for path in listed:
                self.layer.symlink(f"etc/ssl/certs/{Path(path).stem}.pem", f"/{path}")

    def add_bytecode(self, argv: Sequence[str]) -> None:
        """Add the bytecode of Python's standard library, compiled by the Python that ``argv`` starts.

        Raises:
            CommandFailed: it does not work.
        """
        sources = sorted(fnmatch.filter(self.layer.files, "usr/lib/python3*/*.py"))
        compiler = _bytecode.BytecodeCompiler(argv)
        compiled = compiler.compile([(f"/{path}", self._content(path)) for path in sources])
        for path, content in zip(sources, compiled, strict=True):
            if content:
                self._file(compiler.python.cached_path(path), content)

    def _file(self, path: str, content: bytes) -> None:
        self.layer.file(path, [content], len(content))

    def _content(self, path: str) -> bytes:
        self._require(path)
        return (self.root / path).read_bytes()

    def _require(self, path: str) -> None:
        if path not in self.layer:
            raise NotTrusted(f"no package of the base {self.base.name} has {path}", "correct the base, and lock it again")
