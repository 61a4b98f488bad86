"""Small Debian packages, and signed archives of them."""

from __future__ import annotations

import hashlib
import io
import lzma
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sm120kit.core.unpacking import Unpacking
from sm120kit.images._base import DebianSystem
from sm120kit.images._layers import LayerWriter
from sm120kit.images.oci import Layout
from sm120kit.recipes.bases import Base

KINDS = {"symlink": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE, "device": tarfile.CHRTYPE, "directory": tarfile.DIRTYPE}


def member(
    name: str, content: bytes = b"", kind: str = "file", target: str = "", mode: int = 0o644
) -> tuple[tarfile.TarInfo, bytes]:
    """A member of a package's archive of files."""
    header = tarfile.TarInfo(name)
    header.type, header.linkname, header.mode = KINDS.get(kind, tarfile.REGTYPE), target, mode
    header.size = len(content)
    return header, content


def tar(members: Sequence[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for header, content in members:
            archive.addfile(header, io.BytesIO(content))
    return packed.getvalue()


def ar(parts: dict[str, bytes]) -> bytes:
    packed = b"!<arch>\n"
    for name, content in parts.items():
        packed += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content + b"\n" * (len(content) % 2)
        )
    return packed


def control(name: str, version: str = "1.0", **fields: str) -> str:
    described = {"Package": name, "Version": version, "Architecture": "amd64", "Maintainer": "T <t@example.org>", **fields}
    return "".join(f"{key.replace('_', '-')}: {value}\n" for key, value in (described | {"Description": "test"}).items())


def package(directory: Path, name: str, members: Sequence[tuple[tarfile.TarInfo, bytes]] = (), **fields: str) -> Path:
    """Write ``<name>_<version>_amd64.deb`` with the given files; ``fields`` are of its control file, such as ``Depends``."""
    text = control(name, **fields)
    parts = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": lzma.compress(tar([member("./control", text.encode())])),
        "data.tar.xz": lzma.compress(tar(list(members))),
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}_{fields.get('version', '1.0').rpartition(':')[2]}_amd64.deb"
    path.write_bytes(ar(parts))
    return path


class Signer:
    """An OpenPGP key in a home directory of gpg's own, whose path is short: that of a socket has at most 107 characters."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(dir="/tmp")
        home = Path(self._home.name)
        self._gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--yes"]
        self._run("--passphrase", "", "--quick-generate-key", "Test <t@example.org>", "ed25519", "sign", "never")
        self.keyring = home / "keys.gpg"
        self._run("--output", str(self.keyring), "--export")

    def _run(self, *arguments: str) -> None:
        subprocess.run([*self._gpg, *arguments], check=True, capture_output=True)

    def sign(self, release: Path) -> None:
        """Write ``InRelease`` beside ``Release``."""
        self._run("--output", str(release.with_name("InRelease")), "--clearsign", str(release))


def archive(root: Path, debs: dict[Path, str], signer: Signer, suite: str = "bookworm") -> Path:
    """Make ``root``, which contains ``debs`` (with their control files), a signed archive."""
    paragraphs = []
    for deb, text in sorted(debs.items()):
        content = deb.read_bytes()
        fields = f"Filename: {deb.relative_to(root)}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n"
        paragraphs.append(text + fields)
    index = root / "dists" / suite / "main" / "binary-amd64" / "Packages"
    index.parent.mkdir(parents=True, exist_ok=True)
    index.write_text("\n".join(paragraphs))
    listed = f" {hashlib.sha256(index.read_bytes()).hexdigest()} {index.stat().st_size} main/binary-amd64/Packages"
    release = root / "dists" / suite / "Release"
    release.write_text(
        f"Origin: Debian\nSuite: {suite}\nCodename: {suite}\nDate: Sat, 21 Nov 2026 00:00:00 UTC\n"
        f"Architectures: amd64\nComponents: main\nSHA256:\n{listed}\n"
    )
    signer.sign(release)
    return root


def written_base(directory: Path, base: Base, debs: Sequence[Path]) -> tuple[DebianSystem, Layout, str]:
    """A base of packages: its files, in ``root`` of a directory, its layer's layout, and the digest of the layer."""
    (directory / "root").mkdir()
    layout = Layout(directory / "oci")
    with layout.writer() as blob:
        add = Unpacking(directory / "root", directory).add
        system = DebianSystem(LayerWriter(blob, add=add), directory / "root", base)
        system.add_packages(debs)
        system.add_generated("x86_64")
        return system, layout, system.layer.finish().digest
