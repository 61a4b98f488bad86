"""The reader of device code, on small files of nvcc (data/cubin/README.md)."""

from __future__ import annotations

import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm120kit.core.errors import BadInput
from sm120kit.kernels import cubin
from sm120kit.kernels.cubin import elf, fatbin
from sm120kit.kernels.cubin.cubin_records import Kernel

DATA = Path(__file__).parent / "data" / "cubin"
FIXTURES = sorted(path.name for path in DATA.iterdir() if path.suffix in (".cubin", ".fatbin", ".so", ".o"))
REVERSE, HISTOGRAM = "_Z7reverseILi32EEvPf", "histogram"


def kernels(name: str) -> list[Kernel]:
    return [kernel for image in cubin.read(DATA / name) for kernel in image.kernels]


def test_read_kernels_of_a_cubin() -> None:
    (image,) = cubin.read(DATA / "sm_120a.cubin")
    assert (image.where, image.arch, image.bytes) == ("sm_120a.cubin#1", "sm_120a", (DATA / "sm_120a.cubin").stat().st_size)
    reverse, histogram = image.kernels
    # Output of ptxas -v: 10 registers and 128 bytes smem; 12 registers and a stack of 256 bytes.
    assert (reverse.name, reverse.registers, reverse.shared_bytes, reverse.stack_bytes, reverse.text_bytes) == (
        REVERSE,
        10,
        128,
        0,
        512,
    )
    assert (histogram.name, histogram.registers, histogram.shared_bytes, histogram.stack_bytes) == (HISTOGRAM, 12, 0, 256)
    assert reverse.text_sha256.startswith("a44966f6b1f6")


def test_fp4_instructions_are_counted(tmp_path: Path) -> None:
    """An instruction of a kernel of b12x, as nvdisasm 12.8 lists it: OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R56, ..."""
    omma = struct.pack("<QQ", 0x7080003C3804747F, 0x01EFE20000043E04)
    data = (DATA / "sm_120a.cubin").read_bytes()
    text = bytes(elf.Elf(memoryview(data)).bytes_of(f".text.{REVERSE}"))
    (tmp_path / "fp4.cubin").write_bytes(data.replace(text, 3 * omma + text[3 * len(omma) :]))
    (image,) = cubin.read(tmp_path / "fp4.cubin")
    assert {kernel.name: kernel.fp4_mma for kernel in image.kernels} == {REVERSE: 3, HISTOGRAM: 0}


def test_stack_of_a_linked_kernel_includes_its_callees() -> None:
    assert [(kernel.name, kernel.stack_bytes, kernel.shared_bytes) for kernel in kernels("linked.cubin")] == [
        ("calls", 64 + 136, 0),
        ("shares", 136, 40),
    ]


@pytest.mark.parametrize(
    ("name", "archs"),
    [
        ("sm_120a.cubin", ["sm_120a"]),
        ("sm_120f.cubin", ["sm_120f"]),
        ("cuda_12.sm_90a.cubin", ["sm_90a"]),
        ("cuda_12.sm_120a.cubin", ["sm_120a"]),
        ("linked.cubin", ["sm_120a"]),
        ("plain.fatbin", ["sm_120a", "sm_120f", "compute_120f"]),
        ("lz4.fatbin", ["sm_120a"]),
        ("zstd.so", ["sm_120a", "sm_121a"]),
        ("relocatable.o", ["compute_120", "sm_120a", "compute_120a"]),
    ],
)
def test_archs_equal_compile_targets(name: str, archs: list[str]) -> None:
    images = cubin.read(DATA / name)
    assert [image.arch for image in images] == archs
    for image in images:
        assert len(image.kernels) == (2 if image.arch.startswith("sm_") else 0)
        assert all(kernel.arch == image.arch for kernel in image.kernels)


@pytest.mark.parametrize("name", ["plain.fatbin", "lz4.fatbin", "zstd.so"])
def test_compressed_code_equals_uncompressed_code(name: str) -> None:
    assert [kernel for kernel in kernels(name) if kernel.arch == "sm_120a"] == kernels("sm_120a.cubin")


def test_concatenated_containers(tmp_path: Path) -> None:
    both = tmp_path / "both.fatbin"
    both.write_bytes((DATA / "lz4.fatbin").read_bytes() + bytes(8) + (DATA / "plain.fatbin").read_bytes())
    assert [image.where for image in cubin.read(both)] == [f"both.fatbin#{number}" for number in (1, 2, 3, 4)]


def test_cubins_in_the_data_of_an_object_file(tmp_path: Path) -> None:
    """As CuTe DSL stores kernels, after four bytes that begin no ELF."""
    host = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, 0, 0, 64, 0, 0, 64, 0, 0)
    names = ("sm_120a.cubin", "cuda_12.sm_90a.cubin")
    file = tmp_path / "kernels.o"
    file.write_bytes(host + b"".join(b"\x7fELF, not" + (DATA / name).read_bytes() for name in names) + b"text")
    images = cubin.read(file)
    assert [(image.where, image.arch) for image in images] == [("kernels.o#1", "sm_120a"), ("kernels.o#2", "sm_90a")]
    assert [list(image.kernels) for image in images] == [kernels(name) for name in names]
    assert [image.bytes for image in images] == [(DATA / name).stat().st_size for name in names]
    file.write_bytes(host + (DATA / names[0]).read_bytes()[:-100])
    with pytest.raises(BadInput, match=r"kernels\.o: .* needs bytes"):
        cubin.read(file)
    file.write_bytes(host + b"\x7fELF, not")
    with pytest.raises(BadInput, match="has no device code"):
        cubin.read(file)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.write_text("#!/bin/sh\n"), "not an ELF, fatbin or cubin: it starts with 23 21 2f 62"),
        (lambda path: path.write_bytes(b"\x7fELF\x01\x01" + bytes(60)), "not a 64-bit little-endian ELF"),
        (lambda path: shutil.copyfile(sys.executable, path), "no device code"),
    ],
)
def test_unreadable_file_is_rejected_with_a_reason(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "artifact"
    make(path)
    with pytest.raises(BadInput, match=message) as failure:
        cubin.read(path)
    assert "artifact" in failure.value.message and failure.value.hint


SECTIONS_AT = struct.unpack_from("<Q", (DATA / "sm_120a.cubin").read_bytes(), 40)[0]


@pytest.mark.parametrize(
    ("name", "at", "layout", "value", "message"),
    [
        ("lz4.fatbin", 6, "<H", 8, "a fatbin states a header of 8 bytes"),
        ("lz4.fatbin", 8, "<Q", 1 << 63, "a fatbin needs bytes 16 to"),
        ("lz4.fatbin", 16 + 4, "<I", 0, "a fatbin entry states a header of 0 bytes"),
        ("lz4.fatbin", 16 + 16, "<I", 1 << 31, "a compressed image needs bytes"),
        ("lz4.fatbin", 16 + 28, "<I", 90, "listed for sm_90a but contains code for sm_120a"),
        ("lz4.fatbin", 16 + 56, "<Q", 1 << 40, "claims to unpack to 1099511627776 bytes"),
        ("lz4.fatbin", 16 + 56, "<Q", 9329, "unpacks to 9328 bytes; its entry states 9329"),
        ("sm_120a.cubin", 7, "<B", 0x42, "unknown ABI 0x42"),
        ("sm_120a.cubin", 40, "<Q", 1 << 62, "section 0 needs bytes"),
        ("sm_120a.cubin", 62, "<H", 999, "section names are in section 999 of"),
        ("sm_120a.cubin", SECTIONS_AT + 64, "<I", 1 << 30, "no name at byte 1073741824"),
        ("sm_120a.cubin", SECTIONS_AT + 128 + 24, "<Q", 1 << 62, "section .strtab needs bytes"),
    ],
)
def test_damaged_field_is_named_in_the_error(tmp_path: Path, name: str, at: int, layout: str, value: int, message: str) -> None:
    data = bytearray((DATA / name).read_bytes())
    struct.pack_into(layout, data, at, value)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInput, match=message) as failure:
        cubin.read(tmp_path / name)
    assert failure.value.message.startswith(f"{name}: ") and failure.value.hint


LZ4, ZSTD = 0x2000, 0x8000


def test_lz4_overlapping_match() -> None:
    packed = b"\x1fa\x01\x00\x0f" + b"\x50bbbbb"
    assert bytes(fatbin.FatbinImage("sm_120a", memoryview(packed), LZ4, 40).unpacked()) == b"a" * 35 + b"bbbbb"


@pytest.mark.parametrize(
    ("packed", "compression", "message"),
    [
        (b"\xf0", LZ4, "ends within a sequence, after 0 of 40 bytes"),
        (b"\x10a\x05\x00", LZ4, "repeats 4 bytes from 5 back after 1 of 40 bytes"),
        (b"\x10a\x00\x00", LZ4, "repeats 4 bytes from 0 back"),
        (b"\x1fa\x01\x00\xfe", LZ4, "repeats 273 bytes from 1 back after 1 of 40 bytes"),
        (b"\x28\xb5\x2f\xfd garbage", ZSTD, "Zstandard image does not unpack"),
        (b"", ZSTD, "unpacks to 0 bytes; its entry states 40"),
    ],
)
def test_damaged_compression_is_named_in_the_error(packed: bytes, compression: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        fatbin.FatbinImage("sm_120a", memoryview(packed), compression, 40).unpacked()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage")


def read_damaged(scratch: Path, data: bytes) -> None:
    path = scratch / "damaged"
    path.write_bytes(data)
    try:
        cubin.read(path)
    except BadInput as failure:
        assert failure.message.count("\n") == 0


@settings(deadline=None, max_examples=150)
@given(name=st.sampled_from(FIXTURES), data=st.data())
def test_random_damage_raises_bad_artifact_or_nothing(scratch: Path, name: str, data: st.DataObject) -> None:
    content = bytearray((DATA / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        width = data.draw(st.sampled_from([1, 2, 4, 8]))
        at = data.draw(st.integers(0, len(content) - width))
        content[at : at + width] = data.draw(st.one_of(st.binary(min_size=width, max_size=width), st.just(b"\xff" * width)))
    read_damaged(scratch, bytes(content))


@settings(deadline=None, max_examples=100)
@given(name=st.sampled_from(FIXTURES), data=st.data())
def test_truncated_file_raises_bad_artifact(scratch: Path, name: str, data: st.DataObject) -> None:
    content = (DATA / name).read_bytes()
    read_damaged(scratch, content[: data.draw(st.integers(0, len(content) - 1))])


@settings(deadline=None, max_examples=100)
@given(start=st.sampled_from([b"", b"\x7fELF\x02\x01\x01A\x08", fatbin.MAGIC]), rest=st.binary(max_size=300))
def test_random_bytes_raise_bad_artifact(scratch: Path, start: bytes, rest: bytes) -> None:
    read_damaged(scratch, start + rest)


def test_matching_patterns() -> None:
    images = cubin.read(DATA / "zstd.so")
    for pattern in ("histogram", "*reverse*", "*reverseILi32E*@sm_121*", "*@sm_120a"):
        assert cubin.matching(pattern, images), pattern
    for pattern in ("histo", "Histogram", "*reverse*@sm_90*", "*GemmUniversal*"):
        assert cubin.matching(pattern, images) == (), pattern
