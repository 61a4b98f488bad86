"""``verify run`` without a GPU: the preloaded driver and the rewriter are real; the driver below them records its arguments."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sm12x_lab.ptx import images, interposed, library, perturb
from sm12x_lab.ptx.interposed import Interposition
from sm12x_lab.ptx.rewrite import TENSOR_MAP_MARK, TENSOR_MAP_MARK_OFFSET, UNPACKING_FIELDS, UNPACKING_MARK
from sm120kit.core import process, toolchain
from sm120kit.core.errors import RequirementMissing
from sm120kit.core.workspace import Workspace
from sm120kit.kernels import cubin

SUPPORT = Path(__file__).with_name("support")

CODE = r"""
extern "C" __global__ void kernel(unsigned short* out, float2 in) {
  unsigned short code;
  asm("{ .reg .b8 c; cvt.rn.satfinite.e2m1x2.f32 c, %1, %2; cvt.u16.u8 %0, c; }" : "=h"(code) : "f"(in.x), "f"(in.y));
  *out = code;
}
"""

RESIDENT = r"""
template <int Count> __device__ void keep(float *out) {
  float x[Count];
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("ld.volatile.f32 %0, [%1];" : "=f"(x[i]) : "l"(out + i));
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("st.volatile.f32 [%1], %0;" ::"f"(2 * x[i] + x[Count - 1 - i]), "l"(out + i));
}
extern "C" __global__ void kernel(float *out) { keep<2>(out); }
extern "C" __global__ void many_registers(float *out) { keep<160>(out); }
extern "C" __global__ void __launch_bounds__(96) bounded(float *out) { keep<2>(out); }
extern "C" __global__ void many_barriers() { asm volatile("bar.sync 7, 32;"); }
extern "C" __global__ void __cluster_dims__(16) large_cluster(float *out) { keep<2>(out); }
"""

PROGRAM = """
import ctypes, pathlib, sys
cuda = ctypes.CDLL("libcuda.so.1")
module = ctypes.c_void_p()
code = pathlib.Path(sys.argv[1]).read_bytes() + b"\\0"
sys.exit(getattr(cuda, sys.argv[2])(ctypes.byref(module), code, *[None] * 6))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a libcuda.so.1."""
    directory = tmp_path_factory.mktemp("driver")
    compiler, _ = toolchain.host_compiler()
    library = directory / "libcuda.so.1"
    process.run([compiler, "-x", "c", SUPPORT / "cuda_stub.c", "-shared", "-fPIC", "-w", "-o", library])
    return directory


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One kernel as PTX, as a fatbin with and without PTX, and for Hopper too."""
    directory, tools = tmp_path_factory.mktemp("modules"), toolchain.find()
    source = directory / "kernel.cu"
    source.write_text(CODE)
    nvcc = [tools.cuda_home / "bin" / "nvcc", "-ccbin", tools.host_compiler, source]
    sm120 = "arch=compute_120f,code="
    process.run([*nvcc, "-ptx", "-gencode", f"{sm120}sm_120f", "-o", directory / "kernel.ptx"])
    process.run([*nvcc, "-fatbin", "-gencode", f"{sm120}[sm_120f,compute_120f]", "-o", directory / "both.fatbin"])
    process.run([*nvcc, "-fatbin", "-gencode", f"{sm120}sm_120f", "-o", directory / "machine-code.fatbin"])
    process.run([*nvcc, "-cubin", "-gencode", f"{sm120}sm_120f", "-o", directory / "kernel.cubin"])
    source.write_text(RESIDENT)
    process.run([*nvcc, "-ptx", "-gencode", f"{sm120}sm_120f", "-o", directory / "resident.ptx"])
    hopper = ["-gencode", "arch=compute_90,code=sm_90"]
    process.run([*nvcc, "-fatbin", *hopper, "-gencode", f"{sm120}compute_120f", "-o", directory / "hopper-and-ptx.fatbin"])
    process.run([*nvcc, "-fatbin", *hopper, "-gencode", f"{sm120}sm_120f", "-o", directory / "hopper-and-code.fatbin"])
    process.run([*nvcc, "-fatbin", *hopper, "-o", directory / "hopper-alone.fatbin"])
    process.run([*nvcc, "-ptx", "-gencode", "arch=compute_90a,code=sm_90a", "-o", directory / "hopper-alone.ptx"])
    own = ["-gencode", "arch=compute_120a,code=sm_120a"]
    process.run([*nvcc, "-fatbin", *own, "-gencode", "arch=compute_120,code=compute_120", "-o", directory / "other-ptx.fatbin"])
    spark = ["-gencode", "arch=compute_121a,code=compute_121a"]
    process.run([*nvcc, "-fatbin", *spark, "-o", directory / "spark.fatbin"])
    process.run([*nvcc, "-ptx", "-gencode", "arch=compute_121a,code=sm_121a", "-o", directory / "spark.ptx"])
    process.run([*nvcc, "-fatbin", *spark, "-gencode", f"{sm120}compute_120f", "-o", directory / "spark-and-family.fatbin"])
    source.write_text('extern "C" __global__ void kernel(unsigned short* out) { *out = 1; }')
    process.run([*nvcc, "-fatbin", "-arch=sm_90", "-o", directory / "hopper.fatbin"])
    captured = directory / "captured"
    captured.mkdir()
    (captured / "unit.ptx").write_text((directory / "kernel.ptx").read_text())
    return directory


@pytest.fixture(scope="module")
def interposition(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interposition]:
    workspace = Workspace.open(tmp_path_factory.mktemp("state"))
    with interposed.prepared(None, workspace, toolchain.find()) as interposition:
        yield interposition


@dataclass
class Runner:
    """Python programs on the driver that records below the preloaded one, or on ``verify run`` as a whole."""

    driver: Path
    records: Path
    interposition: Interposition

    def python(self, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self._run([], self.interposition.environment(), program, arguments)

    def command(self, program: str, *arguments: object, options: tuple[object, ...] = ()) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "sm120kit", "verify", "run", "--state", self.records / "state", *options, "--"]
        return self._run(words, {}, program, arguments)

    def _run(
        self, words: Sequence[object], env: Mapping[str, str], program: str, arguments: Sequence[object]
    ) -> subprocess.CompletedProcess[str]:
        argv = [str(word) for word in (*words, sys.executable, "-c", program, *arguments)]
        env = {**os.environ, "LD_LIBRARY_PATH": str(self.driver), "STUB_RECORDS": str(self.records), **env}
        env["TMPDIR"] = str(self.records)
        return subprocess.run(argv, env=env, capture_output=True, text=True)


@pytest.fixture
def runner(driver: Path, tmp_path: Path, interposition: Interposition) -> Runner:
    records = tmp_path / "records"
    records.mkdir()
    return Runner(driver, records, interposition.part(tmp_path.name, captured=False))


@pytest.mark.parametrize("function", ["cuModuleLoadData", "cuModuleLoadFatBinary", "cuLibraryLoadData"])
def test_modules_for_sm120_are_loaded_as_code_for_hopper(runner: Runner, modules: Path, function: str) -> None:
    file = modules / ("both.fatbin" if "Fat" in function else "kernel.ptx")
    done = runner.python(PROGRAM, file, function)
    assert done.returncode == 0, done.stderr
    loaded = cubin.read(runner.records / "module")
    assert [(kernel.name, kernel.arch) for kernel in loaded[0].kernels] == [("kernel", "sm_90a")]
    (module,) = runner.interposition.modules()
    assert module["replaced"] == {"cvt.rn.satfinite.e2m1x2.f32": 1}
    assert runner.python(PROGRAM, file, function).returncode == 0  # the second time from the first result
    assert len(list(runner.interposition.directory.glob("*.cubin"))) == 1


@pytest.mark.parametrize(
    "start",
    ["\t", "\r\n", "\f", "/* .target sm_90\n.target sm_90 */", "// .target sm_90 \\\n", '#line 1 ".target sm_90"\n'],
    ids=["tab", "return", "form feed", "comment", "line comment", "preprocessor"],
)
@pytest.mark.parametrize("end", ["\n", " "], ids=["lines", "one line"])
def test_ptx_may_start_with_anything_that_ptxas_skips(
    runner: Runner, modules: Path, tmp_path: Path, start: str, end: str
) -> None:
    text = (modules / "kernel.ptx").read_text()
    header = f".version 8.8{end}.target /* */{end}sm_120f{end}.address_size{end}64{end}"
    file = tmp_path / "odd.ptx"
    file.write_text(start + header + text[text.index(".visible") :])
    done = runner.python(PROGRAM, file, "cuModuleLoadData")
    assert done.returncode == 0, done.stderr
    assert cubin.read(runner.records / "module")[0].arch == "sm_90a"


def test_ptx_for_hopper_that_mentions_sm120_is_left_alone(runner: Runner, tmp_path: Path) -> None:
    text = '/* .target sm_120a */ .version 8.8\n.target sm_90\n.address_size 64\n.file 1 "\\".target sm_120a"\n'
    file = tmp_path / "hopper.ptx"
    file.write_text(text)
    assert runner.python(PROGRAM, file, "cuModuleLoadData").returncode == 0
    assert (runner.records / "module").read_bytes() == text.encode()[:64] and not runner.interposition.modules()


def test_ptx_with_a_byte_order_mark_is_refused_as_by_ptxas(runner: Runner, modules: Path, tmp_path: Path) -> None:
    file = tmp_path / "mark.ptx"
    file.write_text((modules / "kernel.ptx").read_text(), encoding="utf-8-sig")
    done = runner.python(PROGRAM, file, "cuModuleLoadData")
    assert done.returncode == 209 and "byte 0 is 0xef" in done.stderr and "byte order mark" in done.stderr


def test_arguments_that_are_null_are_left_to_the_driver(runner: Runner, tmp_path: Path) -> None:
    """Also functions that the driver lacks, when a program is linked with the preloaded library; and files that end early."""
    (tmp_path / "short").write_bytes(b"\x7fELF")
    (tmp_path / "cut").write_bytes(b"\x7fELF\2\1\1\x41" + bytes(10) + b"\xbe\0" + bytes(20) + b"\xff" * 28)
    program = """
import ctypes, struct, sys
cuda, all = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
out = ctypes.byref(ctypes.c_void_p())
registered = struct.pack("IIQQ", 0x466243B1, 1, 0, 0)
print(*[cuda.cuModuleLoadData(out, code) for code in (None, registered)], all.cuModuleLoad(out, None))
print(*[all.cuModuleLoad(out, name.encode()) for name in sys.argv[1:]])
print(cuda.cuLibraryGetKernel(out, None, None), cuda.cuModuleGetFunction(out, None, None))
for kind in (13, 14):
    print(cuda.cuTensorMapEncodeTiled(None, kind, 2, *[None] * 5, 0, 0, 0, 0), end=" ")
print(cuda.cuTensorMapReplaceAddress(None, None))
"""
    done = runner.python(program, tmp_path / "short", tmp_path / "cut", tmp_path / "missing")
    assert (done.returncode, done.stdout) == (0, "1 1 500\n500 500 500\n1 0\n1 1 1\n"), done


@pytest.mark.parametrize("function", ["cuLinkAddData_v2", "cuLinkAddFile_v2"])
def test_code_for_sm120_is_not_linked_at_run_time(runner: Runner, modules: Path, function: str) -> None:
    program = """
import ctypes, pathlib, sys
cuda = ctypes.CDLL("libcuda.so.1")
code = pathlib.Path(sys.argv[1]).read_bytes()
arguments = (code, ctypes.c_size_t(len(code)), b"an input") if "Data" in sys.argv[2] else (sys.argv[1].encode(),)
print(getattr(cuda, sys.argv[2])(None, 0, *arguments, 0, None, None))
"""
    for name in ("kernel.ptx", "kernel.cubin", "both.fatbin", "hopper-and-ptx.fatbin"):  # the last ran its code for Hopper
        done = runner.command(program, modules / name, function)
        assert (done.returncode, done.stdout) == (11, "209\n"), done.stderr
        assert f"{'an input' if 'Data' in function else modules / name} is code for SM12x; it cannot be linked" in done.stderr
    assert not (runner.records / "linked").exists()
    assert runner.python(program, modules / "hopper.fatbin", function).stdout == "0\n"
    assert (runner.records / "linked").stat().st_size


def test_machine_code_is_refused(runner: Runner, modules: Path) -> None:
    for name in ("machine-code.fatbin", "kernel.cubin"):
        refused = runner.python(PROGRAM, modules / name, "cuModuleLoadData")
        assert refused.returncode == 209, refused.stderr  # CUDA_ERROR_NO_BINARY_FOR_GPU
        assert "no PTX was captured for 1 of its 1 kernels: kernel" in refused.stderr
        assert not (runner.records / "module").exists()


@pytest.mark.parametrize("function", ["cuLibraryGetKernel", "cuModuleGetFunction"])
@pytest.mark.parametrize("file", ["both.fatbin", "kernel.cubin"])
def test_captured_kernel_takes_the_place_of_another(runner: Runner, modules: Path, function: str, file: str) -> None:
    look_up = f"cuda.{function}(ctypes.byref(module), module, b'kernel')"
    program = PROGRAM.replace("sys.exit(", "print(") + f"print({look_up})\n"
    part = runner.interposition
    (part.directory / images.CAPTURED).write_text(f"kernel {modules / 'captured' / 'unit.ptx'}\n")
    done = runner.python(program, modules / file, "cuModuleLoadData")
    assert (done.returncode, done.stdout) == (0, "0\n0\n"), done.stderr
    origins = sorted(module["origin"] for module in part.modules())
    other = "compute_120f in a fatbin" if file == "both.fatbin" else "machine code whose kernels were captured"
    assert origins == ["captured unit.ptx", other]
    assert cubin.read(runner.records / "module")[0].kernels[0].arch == "sm_90a"
    assert (runner.records / "kernel").read_text() == "kernel"


def test_program_sees_sm120(runner: Runner) -> None:
    """By symbol, by look-up, and by a look-up of the look-up."""
    program = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
value, function = ctypes.c_int(), ctypes.c_void_p()
kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
look_up = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)
def attribute(get, number):
    assert get(ctypes.byref(value), number, 0) == 0
    return value.value
print([attribute(cuda.cuDeviceGetAttribute, number) for number in (75, 76, 97, 16, 39, 81, 106, 38, 132)])
assert cuda.cuGetProcAddress_v2(b"cuGetProcAddress", ctypes.byref(function), 12000, ctypes.c_uint64(0), None) == 0
assert look_up(function.value)(b"cuDeviceGetAttribute", ctypes.byref(function), 12000, 0, None) == 0
print(attribute(kind(function.value), 75))
print([cuda.cuFuncSetAttribute(None, 8, size) for size in (101376 - 1024, 101376 - 1023)])
assert not hasattr(cuda, "cuLibraryLoadFromFile")  # the driver has none
"""
    done = runner.python(program)
    assert (done.returncode, done.stdout) == (0, "[12, 0, 101376, 7, 1536, 102400, 24, 134217728, 0]\n12\n[0, 1]\n"), (
        done.stderr
    )
    assert struct.unpack("2i", (runner.records / "shared").read_bytes()) == (8, 101376 - 1024)


def test_library_of_nvidia_sees_the_gpu_as_it_is(runner: Runner, tmp_path: Path) -> None:
    source = "int cuDeviceGetAttribute(int *, int, int); int major(void) { int x; return cuDeviceGetAttribute(&x, 75, 0), x; }"
    compiler, _ = toolchain.host_compiler()
    for name in ("libcublasLt.so.13", "libother.so"):
        words = [compiler, "-x", "c", "-", "-shared", "-fPIC", "-o", tmp_path / name]
        process.run([*words, f"-L{runner.driver}", "-l:libcuda.so.1"], stdin=source.encode())
    program = (
        f"import ctypes; print(*[ctypes.CDLL('{tmp_path}/' + name).major() for name in ('libcublasLt.so.13', 'libother.so')])"
    )
    done = runner.python(program)
    assert done.stdout == "9 12\n", done.stderr


def test_next_library_is_that_after_the_caller(runner: Runner, tmp_path: Path) -> None:
    """RTLD_NEXT depends on where dlsym returns to."""
    source = """
#define _GNU_SOURCE
#include <dlfcn.h>
int number(void) { return NUMBER; }
int next(void) { int (*other)(void) = dlsym(RTLD_NEXT, "number"); return other ? other() : 0; }
"""
    compiler, _ = toolchain.host_compiler()
    second, first = tmp_path / "libsecond.so", tmp_path / "libfirst.so"
    for output, linked in ((second, []), (first, ["-Wl,--no-as-needed", second])):
        words = [compiler, "-x", "c", "-", f"-DNUMBER={1 + len(linked)}", "-O2", "-shared", "-fPIC", "-w", "-o", output]
        process.run([*words, "-x", "none", *linked], stdin=source.encode())
    done = runner.python(f"import ctypes; print(ctypes.CDLL('{first}').next())")
    assert done.stdout == "1\n", done.stderr


MAPS = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
kind, width, columns, address = map(int, sys.argv[1:])
tensor_map = ctypes.create_string_buffer(128)
dim, stride = (ctypes.c_uint64 * 2)(columns, 64), (ctypes.c_uint64 * 1)(4096)
box, steps = (ctypes.c_uint32 * 2)(width, 8), (ctypes.c_uint32 * 2)(1, 1)
print(cuda.cuTensorMapEncodeTiled(tensor_map, kind, 2, ctypes.c_void_p(address - 64), dim, stride, box, steps, 0, 3, 0, 0))
cuda.cuTensorMapReplaceAddress(tensor_map, ctypes.c_void_p(address))
print(tensor_map.raw.hex())
"""


def encoded(runner: Runner, *arguments: int) -> tuple[int, bytes, str]:
    """The driver's status, the tensor map, and messages."""
    done = runner.python(MAPS, *arguments)
    status, content = done.stdout.split()
    return int(status), bytes.fromhex(content), done.stderr


def test_packed_tensor_map_is_one_of_bytes_with_a_mark(runner: Runner) -> None:
    status, content, _ = encoded(runner, 13, 128, 4096, 0x1040)
    assert status == 0 and content[:120] == b"\xab" * 120
    assert int.from_bytes(content[TENSOR_MAP_MARK_OFFSET:], "little") == TENSOR_MAP_MARK
    assert struct.unpack("8Q", (runner.records / "map").read_bytes()) == (0, 2, 0x1000, 2048, 64, 4096, 64, 8)
    assert (runner.records / "address").read_bytes() == (0x1040).to_bytes(8, "little")


@pytest.mark.parametrize(("kind", "bits"), [(14, 4), (15, 6)])
def test_unpacking_tensor_map_is_our_own(runner: Runner, kind: int, bits: int) -> None:
    status, content, _ = encoded(runner, kind, 128, 4096, 0x1040)
    assert status == 0 and not (runner.records / "map").exists() and not (runner.records / "address").exists()
    assert int.from_bytes(content[TENSOR_MAP_MARK_OFFSET:], "little") == UNPACKING_MARK
    at = UNPACKING_FIELDS
    assert struct.unpack_from("Q", content, at["global_address"]) == (0x1040,)
    assert struct.unpack_from("4Q", content, at["global_stride"]) == (4096, 0, 0, 0)
    assert struct.unpack_from("5I", content, at["global_dim"]) == (4096, 64, 1, 1, 1)
    assert struct.unpack_from("7I", content, at["box_dim"]) == (128, 8, 1, 1, 1, 1, bits)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((14, 64, 4096, 0x1000), "boxDim[0] must be 128, is 64"),
        ((14, 128, 4096, 0x1010), "the address must be a multiple of 32"),
        ((15, 128, 4000, 0x1000), "globalDim[0] must be a multiple of 128"),
        ((13, 128, 4095, 0x1000), "must be even, is 4095"),
    ],
)
def test_tensor_map_that_the_driver_of_sm120_rejects(runner: Runner, arguments: tuple[int, ...], rule: str) -> None:
    status, _, messages = encoded(runner, *arguments)
    assert status == 1 and rule in messages


CUTE_MAP = (0x4000, 1, 0x44592, 0x60, 0, 0, 0, 0, 3071, 7, 0, 0, 0, 0x7F000000, 0x3F)
"""Words of the map that the host code of CuTe DSL 4.4.1 makes for 8 rows of 3072 packed elements, in boxes of 64 x 128."""

LAUNCH = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
kernel, function = ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuLibraryGetKernel(ctypes.byref(kernel), ctypes.c_void_p(0x1000), b"kernel") == 0
assert cuda.cuKernelGetFunction(ctypes.byref(function), ctypes.c_void_p(kernel.value + 64)) == 0
first, *maps = [ctypes.create_string_buffer(bytes.fromhex(text), len(text) // 2) for text in sys.argv[2:]]
parameters = (ctypes.c_void_p * 3)(*map(ctypes.addressof, (first, *maps)))
look_up = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)
launch = ctypes.c_void_p()
flags = 2 if sys.argv[1] == "threads" else 0
assert cuda.cuGetProcAddress_v2(b"cuLaunchKernelEx", ctypes.byref(launch), 13000, ctypes.c_uint64(flags), None) == 0
if sys.argv[1] == "plain":
    status = cuda.cuLaunchKernel(function, 1, 2, 3, 4, 5, 6, 7, None, parameters, None)
else:
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    status = kind(launch.value)(None, kernel.value, parameters, None)
assert status == 0 and cuda.cuLaunchKernelEx(None, kernel, None, None) == 0
print(*[each.raw.hex() for each in maps])
"""


def launched(runner: Runner, how: str, *maps: bytes) -> list[bytes]:
    """The two parameters of 128 bytes that the driver gets; those of the program stay as they are."""
    done = runner.python(LAUNCH, how, "11" * 8, *[each.hex() for each in maps])
    assert (done.returncode, done.stdout) == (0, " ".join(each.hex() for each in maps) + "\n"), done.stderr
    content = (runner.records / "launch").read_bytes()
    assert content[:8] == b"\x11" * 8
    return [content[8:136], content[136:]]


def words(*values: int) -> bytes:
    return struct.pack("<32I", *values, *[0] * (32 - len(values)))


@pytest.mark.parametrize("how", ["extended", "threads", "plain"])
def test_packed_map_that_a_program_writes_itself_is_replaced_at_the_launch(runner: Runner, how: str) -> None:
    other = words(*CUTE_MAP[:2], 0x40092, *CUTE_MAP[3:])  # of 16-bit elements
    own = words(*CUTE_MAP, 0, *[0xDEAD] * 16)  # the last words are not written by every version
    first, second = launched(runner, how, own, other)
    assert second == other
    expected = words(0x4000, 1, 0x44012, 0x60, 0, 0, 0, 0, 1535, 7, 0, 0, 0, 0x3F000000, 0x3F, 0, *[0xDEAD] * 16)
    assert first[:TENSOR_MAP_MARK_OFFSET] == expected[:TENSOR_MAP_MARK_OFFSET]
    assert int.from_bytes(first[TENSOR_MAP_MARK_OFFSET:], "little") == TENSOR_MAP_MARK
    if how == "plain":
        assert struct.unpack("7i", (runner.records / "shape").read_bytes()) == (1, 2, 3, 4, 5, 6, 7)


def test_unpacking_map_that_a_program_writes_itself_is_what_the_driver_encodes(runner: Runner) -> None:
    _, encoded_map, _ = encoded(runner, 14, 128, 4096, 0x1040)
    own = words(0x1040, 0, 0x246612, 0x100, 0, 0, 0, 0, 4095, 63, 0, 0, 0, 0x7F000000, 7)
    assert launched(runner, "extended", own, own) == [encoded_map, encoded_map]
    four = (0x1040, 0, 0x246632, 0x100, 0x20000000, 0x30, 0, 0x010, 4095, 63, 4, 2, 0, 0x7F000000, 0x030107)
    at, (_, converted) = UNPACKING_FIELDS, launched(runner, "extended", own, words(*four))
    assert struct.unpack_from("4Q", converted, at["global_stride"]) == (4096, 0x12000_0000 << 4, 768, 0)
    assert struct.unpack_from("5I", converted, at["global_dim"]) == (4096, 64, 5, 3, 1)
    assert struct.unpack_from("5I", converted, at["box_dim"]) == (128, 8, 2, 4, 1)


@pytest.mark.parametrize(
    "changed",
    [{8: 3070}, {13: 0x7E000000}, {2: 0x44593}, {2: 0x445D2}, {15: 1}, {0: 8}],
    ids=["odd extent", "odd box", "kind", "rank", "reserved", "address"],
)
def test_parameter_that_is_no_map_stays_as_it_is(runner: Runner, changed: dict[int, int]) -> None:
    parameter = words(*(changed.get(index, word) for index, word in enumerate((*CUTE_MAP, *[0] * 17))))
    assert launched(runner, "extended", parameter, parameter) == [parameter, parameter]


def test_machine_code_that_cute_dsl_kept_beside_its_ptx(runner: Runner, modules: Path, tmp_path: Path) -> None:
    """Among files of other code; without the file, the module is refused."""
    program = """
import os, pathlib, shutil, sys, tempfile
keep = os.environ["CUTE_DSL_DUMP_DIR"] if sys.argv[3] == "run" else tempfile.mkdtemp()
pathlib.Path(keep, "a.sm_120f.ptx").write_text("of another kernel")
pathlib.Path(keep, "a.sm_120f.cubin").write_bytes(b"\\x7fELF" + bytes(4000))
shutil.copy(pathlib.Path(sys.argv[1]).with_suffix(".ptx"), pathlib.Path(keep, "b.sm_120f.ptx"))
shutil.copy(sys.argv[1], pathlib.Path(keep, "b.sm_120f.cubin"))
assert (os.environ["CUTE_DSL_KEEP_PTX"], os.environ["CUTE_DSL_KEEP_CUBIN"]) == ("1", "1")
"""
    assert runner.python(PROGRAM, modules / "kernel.cubin", "cuModuleLoadData").returncode == 209
    for where in ("run", "temporary"):
        part = runner.interposition.part(where, captured=False)
        runner.interposition, before = part, runner.interposition
        done = runner.python(program + PROGRAM, modules / "kernel.cubin", "cuModuleLoadData", where)
        assert done.returncode == 0, done.stderr
        assert cubin.read(runner.records / "module")[0].arch == "sm_90a"
        assert [module["origin"] for module in part.modules()] == ["PTX that CuTe DSL kept"]
        runner.interposition = before


def test_earlier_compile_of_the_same_function_is_kept(runner: Runner, modules: Path) -> None:
    """CuTe DSL writes with fopen64, PTX first; both files of each earlier compile stay, those of a forked process too."""
    program = """
import ctypes, os, pathlib, sys
libc = ctypes.CDLL(None)
libc.fopen64.restype, libc.fclose.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.fputs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
keep = pathlib.Path(os.environ["CUTE_DSL_DUMP_DIR"])
assert keep.name == str(os.getpid())
def write(text, directory=keep):
    for suffix in ".ptx", ".cubin":
        file = libc.fopen64(os.fsencode(directory / f"a.sm_120a{suffix}"), b"w")
        libc.fputs(text, file)
        libc.fclose(file)
write(b"1")
if os.fork() == 0:
    write(b"2")
    os._exit(0)
os.wait()
write(b"3")
write(b"4")
beside = keep.with_name(keep.name + "0")
beside.mkdir()
write(b"5", beside)
write(b"6", beside)
for path in sorted((*keep.iterdir(), *beside.iterdir())):
    print(path.parent.name == keep.name, path.suffix, path.read_text())
"""
    done = runner.python(program)
    kept = {f"True {suffix} {text}" for text in "1234" for suffix in (".ptx", ".cubin")}
    assert sorted(done.stdout.splitlines()) == sorted(kept | {"False .ptx 6", "False .cubin 6"})


def test_triton_assembles_with_the_rewriter(runner: Runner, modules: Path, tmp_path: Path) -> None:
    """Its arguments are those of Triton 3.6."""
    variables = runner.interposition.environment()
    ptxas, output = variables["TRITON_PTXAS_PATH"], tmp_path / "kernel.cubin"
    env = {**os.environ, **{name: value for name, value in variables.items() if name != "LD_PRELOAD"}}
    assert "release" in subprocess.run([ptxas, "--version"], env=env, capture_output=True, text=True, check=True).stdout
    arguments = ["-lineinfo", "-v", "--gpu-name=sm_120a", str(modules / "kernel.ptx"), "-o", str(output)]
    subprocess.run([ptxas, *arguments], env=env, check=True)
    assert cubin.read(output)[0].arch == "sm_90a"
    assert [module["origin"] for module in runner.interposition.modules()] == ["PTX"]


# ---- code that SM120 cannot load, or would not run

WGMMA = ".version 8.8\n.target sm_120a\n.address_size 64\n.visible .entry kernel()\n{\nwgmma.fence.sync.aligned;\nret;\n}\n"
"""An instruction that Hopper has and SM120 lacks."""


@pytest.mark.parametrize("version", ["8.8", "99.9"])
def test_ptx_that_ptxas_rejects_for_its_own_target_is_refused(runner: Runner, tmp_path: Path, version: str) -> None:
    """As the driver of an SM12x GPU does: CUDA_ERROR_INVALID_PTX. A later ISA does not hide it."""
    file = tmp_path / "wgmma.ptx"
    file.write_text(WGMMA.replace("8.8", version))
    done = runner.command(PROGRAM.replace("sys.exit(", "print("), file, "cuModuleLoadData")
    assert (done.returncode, done.stdout) == (50, "218\n"), done.stderr
    assert "wgmma.fence.sync.aligned" in done.stderr and "sm_120a" in done.stderr
    assert not (runner.records / "module").exists()


def test_ptx_of_an_isa_that_ptxas_lacks_is_not_refused_for_it(runner: Runner, modules: Path, tmp_path: Path) -> None:
    """What is known of it is stated: its figures, or why there are none."""
    text = (modules / "kernel.ptx").read_text()
    known, unknown = tmp_path / "known.ptx", tmp_path / "unknown.ptx"
    known.write_text(re.sub(r"\.version \S+", ".version 99.9", text))
    unknown.write_text(known.read_text().replace(".version 99.9", ".version 99.9\n.pragma.of.the.future;"))
    receipt = tmp_path / "receipt.json"
    done = runner.command(PROGRAM, known, "cuModuleLoadData", options=("--receipt", receipt))
    assert done.returncode == 0, done.stderr
    (module,) = json.loads(receipt.read_text())["modules"]
    assert module["sm120"]["arch"] == "sm_120f" and module["sm120"]["kernels"][0]["registers"] > 0
    native = library.assemble_natively(unknown.read_text(), "sm_120f", toolchain.find(), tmp_path)
    assert native.kernels == () and "PTX ISA 99.9" in native.unknown


def test_result_of_ptxas_is_kept_by_the_digest_of_the_ptx(modules: Path, tmp_path: Path) -> None:
    text, tools = (modules / "resident.ptx").read_text(), toolchain.find()
    first = library.assemble_natively(text, "sm_120f", tools, tmp_path)
    without = replace(tools, cuda_home=tmp_path / "none")
    assert library.assemble_natively(text, "sm_120f", without, tmp_path) == first
    registers = {kernel.name: kernel.registers for kernel in first.kernels}
    assert registers["many_registers"] > 128 > registers["kernel"]
    with pytest.raises(RequirementMissing, match="none"):
        library.assemble_natively(f"{text}\n", "sm_120f", without, tmp_path)


def test_module_with_code_for_both_runs_its_ptx_for_sm120(runner: Runner, modules: Path) -> None:
    done = runner.command(PROGRAM, modules / "hopper-and-ptx.fatbin", "cuModuleLoadFatBinary")
    assert done.returncode == 0 and "1 modules for SM12x" in done.stderr and "0 not verified" in done.stderr
    assert cubin.read(runner.records / "module")[0].arch == "sm_90a"


PRINTED = PROGRAM.replace("sys.exit(", "print(")
LOOKED_UP = f"{PRINTED}print(cuda.cuModuleGetFunction(ctypes.byref(module), module, b'kernel'))\n"


def test_module_whose_code_for_hopper_runs_is_named(runner: Runner, modules: Path, tmp_path: Path) -> None:
    """With one that is verified; alone, nothing is verified; with --strict, it is refused."""
    receipt = tmp_path / "receipt.json"
    both = LOOKED_UP + PROGRAM.replace("argv[1]", "argv[3]").replace("argv[2]", "argv[2]")
    arguments = (modules / "hopper-and-code.fatbin", "cuModuleLoadData", modules / "kernel.ptx")
    done = runner.command(both, *arguments, options=("--receipt", receipt))
    assert (done.returncode, done.stdout) == (0, "0\n0\n"), done.stderr
    (named,) = json.loads(receipt.read_text())["hopper_modules"]
    assert (named["file"], named["also_for_sm120"], named["kernels"]) == ("memory", True, ["kernel"])
    assert "1 not verified" in done.stderr and "ran code for Hopper: kernel" in done.stderr
    alone = runner.command(LOOKED_UP, *arguments[:2])
    assert alone.returncode == 51 and "1 not verified" in alone.stderr
    strict = runner.command(both, *arguments, options=("--strict",))
    assert (strict.returncode, strict.stdout[:4]) == (11, "209\n"), strict.stderr


@pytest.mark.parametrize("name", ["hopper-alone.fatbin", "hopper-alone.ptx"])
def test_module_that_sm120_cannot_load_is_refused(runner: Runner, modules: Path, name: str) -> None:
    """Machine code or PTX for Hopper alone."""
    done = runner.command(PRINTED, modules / name, "cuModuleLoadData")
    assert (done.returncode, done.stdout) == (11, "209\n"), done.stderr
    assert "no code that SM120 can load" in done.stderr and not (runner.records / "module").exists()


@pytest.mark.parametrize("name", ["spark.fatbin", "spark.ptx"])
def test_code_for_sm121_alone_is_for_dgx_spark(runner: Runner, modules: Path, name: str) -> None:
    program = f"{PRINTED}value = ctypes.c_int()\ncuda.cuDeviceGetAttribute(ctypes.byref(value), 76, 0)\nprint(value.value)\n"
    done = runner.command(program, modules / name, "cuModuleLoadData")
    assert (done.returncode, done.stdout) == (11, "209\n0\n"), done.stderr
    assert "no code that SM120 can load" in done.stderr and not (runner.records / "module").exists()
    spark = runner.command(program, modules / name, "cuModuleLoadData", options=("--sms", 48))
    assert (spark.returncode, spark.stdout) == (0, "0\n1\n"), spark.stderr


def test_ptx_of_a_fatbin_is_that_of_what_the_gpu_would_run(runner: Runner, modules: Path) -> None:
    """Not that for another GPU before it; and not PTX for a lesser target than its machine code has."""
    done = runner.python(PRINTED, modules / "spark-and-family.fatbin", "cuModuleLoadFatBinary")
    assert done.stdout == "0\n", done.stderr
    assert [module["origin"] for module in runner.interposition.modules()] == ["compute_120f in a fatbin"]
    refused = runner.command(PRINTED, modules / "other-ptx.fatbin", "cuModuleLoadFatBinary")
    assert (refused.returncode, refused.stdout) == (11, "209\n"), refused.stderr
    assert "no PTX was captured for" in refused.stderr


def test_code_for_hopper_that_cannot_be_recorded_is_refused(runner: Runner, modules: Path) -> None:
    """By a process of another user, say: it would run, and the output would not name it. A new environment changes nothing."""
    words = (modules / "hopper-and-code.fatbin", "cuModuleLoadData")
    done = runner.python(f"import os\nos.unsetenv('SM120KIT_PTX_RUN')\n{PRINTED}", *words)
    assert done.stdout == "0\n" and "hopper" in (runner.interposition.directory / "events").read_text()
    (runner.interposition.directory / "events").unlink()
    (runner.interposition.directory / "events").mkdir()
    done = runner.python(PRINTED, *words)
    assert done.stdout == "209\n" and "cannot write that to the log" in done.stderr, done.stderr


def test_programs_without_the_preloaded_library_are_named(runner: Runner, modules: Path) -> None:
    """Whatever starts them; those that get the library are not."""
    program = (
        "import os, subprocess, sys\nsubprocess.run(['/bin/true'])\nsubprocess.run(['/usr/bin/env', '-i', '/bin/sleep', '0'])\n"
        "subprocess.run(['/bin/false'], env={})\nos.waitpid(os.posix_spawn('/bin/echo', ['echo'], {}), 0)\n"
    )
    done = runner.command(program + PROGRAM, modules / "kernel.ptx", "cuModuleLoadData")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("not seen")]
    assert line.endswith(": echo, false, sleep")


# ---- residency

RESIDENCY = """
import ctypes, pathlib, sys
cuda = ctypes.CDLL("libcuda.so.1")
module, kernel, value, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_size_t()
assert cuda.cuModuleLoadData(ctypes.byref(module), pathlib.Path(sys.argv[1]).read_bytes() + b"\\0") == 0
def function(name):
    assert cuda.cuModuleGetFunction(ctypes.byref(kernel), module, name) == 0
    return ctypes.c_void_p(kernel.value)
def occupancy(of, threads, shared):
    get = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor
    assert get(ctypes.byref(value), of, threads, ctypes.c_size_t(shared)) == 0
    return value.value
def launch(of, ctas, threads, shared):
    return cuda.cuLaunchCooperativeKernel(of, ctas, 1, 1, threads, 1, 1, shared, None, None)
"""


def test_occupancy_is_that_of_sm120(runner: Runner, modules: Path) -> None:
    """By its registers, threads, shared memory and CTAs; the driver below would say 5."""
    program = (
        RESIDENCY
        + """
kernel_ = function(b"kernel")
print([occupancy(kernel_, 128, size << 10) for size in (0, 40, 60, 90, 99, 100)])
print([occupancy(kernel_, threads, 0) for threads in (32, 64, 512, 1024)], occupancy(function(b"many_registers"), 512, 0))
print(occupancy(function(b"many_barriers"), 32, 0))
def attribute(of, number):
    assert cuda.cuFuncGetAttribute(ctypes.byref(value), number, of) == 0
    return value.value
many, bounded = function(b"many_registers"), function(b"bounded")
print(attribute(many, 0), attribute(bounded, 0), attribute(kernel_, 0), attribute(kernel_, 6))
print(attribute(kernel_, 4) < 32, attribute(many, 4) > 128)
assert cuda.cuOccupancyAvailableDynamicSMemPerBlock(ctypes.byref(size), kernel_, 2, 128) == 0
block, none = ctypes.c_int(), ctypes.c_size_t(0)
assert cuda.cuOccupancyMaxPotentialBlockSize(ctypes.byref(value), ctypes.byref(block), kernel_, None, none, 0) == 0
print(size.value, block.value, value.value)
functions = (ctypes.c_void_p * 3)(None, 1, 1)  # room for more than there are
assert cuda.cuModuleEnumerateFunctions(functions, 3, module) == 0
print(occupancy(functions[0], 128, 90 << 10))
"""
    )
    done = runner.python(program, modules / "resident.ptx")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[12, 2, 1, 1, 1, 0]",
        "[24, 24, 3, 1] 0",
        "3",
        "384 96 1024 120",
        "True True",
        "50176 768 14",
        "1",
    ]


def test_launches_that_do_not_fit_are_refused_as_on_sm120(runner: Runner, modules: Path) -> None:
    """Cooperative ones need room for all CTAs at once; any launch needs room for one."""
    program = (
        RESIDENCY
        + """
kernel_ = function(b"kernel")
sms = int(sys.argv[2])
for kib, room in ((40, 2), (60, 1), (90, 1)):
    print(launch(kernel_, room * sms, 128, kib << 10), launch(kernel_, room * sms + 1, 128, kib << 10))
print(cuda.cuLaunchKernel(function(b"many_registers"), 1, 1, 1, 512, 1, 1, 0, None, None, None))
print(cuda.cuLaunchKernel(kernel_, 1, 1, 1, 32, 1, 1, (99 << 10) + 1, None, None, None))
"""
    )
    expected = "0 720\n0 720\n0 720\n701\n1\n"
    for sms, options in ((7, ()), (188, ("--sms", 188))):
        done = runner.command(program, modules / "resident.ptx", sms, options=options)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
        assert f"cooperative launch of {sms + 1} CTAs" in done.stderr and f"{sms} of them for {sms}" in done.stderr


def test_extended_launch_with_the_cooperative_attribute(runner: Runner, modules: Path) -> None:
    """CUlaunchConfig with two attributes; without the cooperative one, any number of CTAs is launched."""
    program = (
        RESIDENCY
        + """
import struct
kernel_ = function(b"kernel")
def config(ctas, cooperative):
    attributes = struct.pack("<ii16i", 4, 0, 1, 1, 1, *[0] * 13) + struct.pack("<ii16i", 2, 0, cooperative, *[0] * 15)
    kept.append(ctypes.create_string_buffer(attributes, len(attributes)))
    return struct.pack("<7I4xQQI4x", ctas, 1, 1, 128, 1, 1, 40 << 10, 0, ctypes.addressof(kept[-1]), 2)
kept = []
print(*[cuda.cuLaunchKernelEx(config(ctas, on), kernel_, None, None) for ctas, on in ((14, 1), (15, 1), (15, 0))])
assert cuda.cuOccupancyMaxActiveClusters(ctypes.byref(value), kernel_, config(1, 0)) == 0
print(value.value)
"""
    )
    done = runner.python(program, modules / "resident.ptx")
    assert (done.returncode, done.stdout) == (0, "0 720 0\n14\n"), done.stderr


GRAPH = (
    RESIDENCY
    + """
import struct
kernel_, node = function(b"kernel"), ctypes.c_void_p()
def parameters(ctas, kernel=True):
    return struct.pack("<Q7I4xQQQQ", kernel_.value if kernel else 0, ctas, 1, 1, 128, 1, 1, 40 << 10, 0, 0, kernel_.value, 0)
def attribute(number, *value):
    value = struct.pack("<16i", *value, *[0] * (16 - len(value)))
    return cuda.cuGraphKernelNodeSetAttribute(node, number, value)
def add(ctas, kernel=True):
    return cuda.cuGraphAddKernelNode_v2(ctypes.byref(node), None, None, ctypes.c_size_t(0), parameters(ctas, kernel))
"""
)


def test_cooperative_nodes_of_a_graph(runner: Runner, modules: Path) -> None:
    """Launches that no function launches: a node, made cooperative afterwards, or given more CTAs when it is."""
    program = (
        GRAPH
        + """
print(add(14), attribute(2, 1), add(15, False), attribute(2, 1))
set_, update = cuda.cuGraphKernelNodeSetParams_v2, cuda.cuGraphExecKernelNodeSetParams_v2
print(*[call for ctas in (14, 15) for call in (set_(node, parameters(ctas)), update(None, node, parameters(ctas)))])
print(cuda.cuGraphKernelNodeCopyAttributes(node, node), attribute(2, 0), set_(node, parameters(15)))
"""
    )
    done = runner.python(program, modules / "resident.ptx")
    assert (done.returncode, done.stdout) == (0, "0 0 0 720\n0 0 720 720\n0 0 0\n"), done.stderr


def test_nodes_of_a_graph_that_do_not_fit(runner: Runner, modules: Path) -> None:
    """Of any kind of call, and no other nodes. CUDA's runtime looks up both editions of cuGraphAddNode."""
    program = (
        GRAPH
        + """
kernel_ = function(b"many_registers")
def big(kind):
    return struct.pack("<i12x", kind) + parameters(1).replace(struct.pack("<I", 128), struct.pack("<I", 512), 1) + bytes(200)
print(cuda.cuGraphAddKernelNode_v2(ctypes.byref(node), None, None, None, big(0)[16:]))
look_up = ctypes.c_void_p()
for version, edges in ((12020, 0), (12030, 1), (13000, 1)):
    assert cuda.cuGetProcAddress_v2(b"cuGraphAddNode", ctypes.byref(look_up), version, ctypes.c_uint64(0), None) == 0
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * (3 + edges), ctypes.c_size_t, ctypes.c_char_p)
    print(*[kind(look_up.value)(ctypes.addressof(node), *[None] * (2 + edges), 1, big(each)) for each in (0, 13)])
"""
    )
    done = runner.python(program, modules / "resident.ptx")
    assert (done.returncode, done.stdout) == (0, "701\n701 0\n701 0\n701 0\n"), done.stderr


def test_clusters_are_no_larger_than_any_gpu_has(runner: Runner, modules: Path) -> None:
    """By a launch's attribute, a node's, and the kernel's own size; Hopper has more. The occupancy has none larger."""
    program = (
        GRAPH
        + """
def config(ctas):
    kept.append(ctypes.create_string_buffer(struct.pack("<ii16i", 4, 0, ctas, 1, 1, *[0] * 13)))
    return struct.pack("<7I4xQQI4x", 16, 1, 1, 128, 1, 1, 0, 0, ctypes.addressof(kept[-1]), 1)
kept = []
print(*[cuda.cuLaunchKernelEx(config(ctas), kernel_, None, None) for ctas in (8, 16)])
clusters = cuda.cuOccupancyMaxActiveClusters
print(*[(clusters(ctypes.byref(value), kernel_, config(ctas)), value.value) for ctas in (8, 16, 0)])
print(clusters(ctypes.byref(value), function(b"large_cluster"), struct.pack("<7I4xQQI4x", *[1] * 6, 0, 0, 0, 0)))
add(16)
print(attribute(4, 8, 1, 1), attribute(4, 4, 2, 2))
print(cuda.cuLaunchCooperativeKernel(function(b"large_cluster"), 16, 1, 1, 32, 1, 1, 0, None, None))
assert cuda.cuOccupancyMaxPotentialClusterSize(ctypes.byref(value), kernel_, None) == 0
print(value.value)
"""
    )
    done = runner.python(program, modules / "resident.ptx")
    assert (done.returncode, done.stdout) == (0, "0 912\n(0, 10) (912, 0) (912, 0)\n912\n0 912\n912\n8\n"), done.stderr


def test_kernel_of_the_module_of_another_kernel(runner: Runner, modules: Path) -> None:
    """cuFuncGetModule has another handle than the load."""
    program = (
        RESIDENCY
        + """
assert cuda.cuFuncGetModule(ctypes.byref(module), function(b"bounded")) == 0
print(launch(function(b"kernel"), 8, 128, 60 << 10))
"""
    )
    done = runner.python(program, modules / "resident.ptx")
    assert (done.returncode, done.stdout) == (0, "720\n"), done.stderr


# ---- the command


def test_receipt(runner: Runner, modules: Path, tmp_path: Path) -> None:
    receipt = tmp_path / "receipt.json"
    done = runner.command(PROGRAM, modules / "kernel.ptx", "cuModuleLoadData", options=("--receipt", receipt))
    assert done.returncode == 0, done.stderr
    assert "1 modules for SM12x with 1 kernels rewritten, 0 refused" in done.stderr
    record = json.loads(receipt.read_text())
    assert record["gpu"]["capability"] == "9.0" and record["verified_on_sm120"] is False
    assert record["replaced"] == {"cvt.rn.satfinite.e2m1x2.f32": 1}
    assert record | interposed.digests() == record
    assert record["toolchain"]["ptxas"].keys() == {"sha256"}


def test_receipt_has_the_text_of_a_script_in_the_place_of_ptxas(
    runner: Runner, modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may choose options, and then nothing else of the record shows that."""
    own, home = toolchain.find().cuda_home, tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "include").symlink_to(own / "include")
    (home / "nvvm").symlink_to(own / "nvvm")
    for program in (own / "bin").iterdir():
        (home / "bin" / program.name).symlink_to(program)
    script = f'#!/bin/sh\nexec {own}/bin/ptxas --Ofast-compile=max "$@"\n'
    (home / "bin" / "ptxas").unlink()
    (home / "bin" / "ptxas").write_text(script)
    (home / "bin" / "ptxas").chmod(0o700)
    monkeypatch.setenv("CUDA_HOME", str(home))
    receipt = tmp_path / "receipt.json"
    done = runner.command(PROGRAM, modules / "kernel.ptx", "cuModuleLoadData", options=("--receipt", receipt))
    assert done.returncode == 0, done.stderr
    assert json.loads(receipt.read_text())["toolchain"]["ptxas"]["script"] == script


def test_fast_run_has_other_functions_and_no_receipt(runner: Runner, modules: Path, tmp_path: Path) -> None:
    program = "import os, pathlib; print(pathlib.Path(os.environ['SM120KIT_PTX_RUN'], 'functions.ptx').read_text())\n"
    texts = [
        runner.command(program + PROGRAM, modules / "kernel.ptx", "cuModuleLoadData", options=each)
        for each in ((), ("--fast",))
    ]
    assert [text.stdout.count(".visible .func") for text in texts] == [15, 19]
    assert "2^-20" in texts[1].stderr and "2^-20" not in texts[0].stderr
    refused = runner.command("", options=("--fast", "--receipt", tmp_path / "receipt.json"))
    assert refused.returncode == 2 and "--fast" in refused.stderr


def test_module_for_hopper_is_left_alone(runner: Runner, modules: Path) -> None:
    done = runner.command(PROGRAM, modules / "hopper.fatbin", "cuModuleLoadData")
    assert done.returncode == 51 and "nothing was verified" in done.stderr
    assert (runner.records / "module").read_bytes() == (modules / "hopper.fatbin").read_bytes()[:64]


def test_module_without_kernels_verifies_nothing(runner: Runner, modules: Path, tmp_path: Path) -> None:
    """Such as one of data, or of functions that were linked elsewhere, beside kernels that run as code for Hopper."""
    file, receipt = tmp_path / "data.ptx", tmp_path / "receipt.json"
    file.write_text(".version 8.8\n.target sm_120a\n.address_size 64\n.visible .global .b32 data;\n")
    both = f"{PRINTED}print(cuda.cuModuleLoadData(ctypes.byref(module), pathlib.Path(sys.argv[3]).read_bytes()))"
    words = (file, "cuModuleLoadData", modules / "hopper-and-code.fatbin")
    done = runner.command(both, *words, options=("--receipt", receipt))
    assert (done.returncode, done.stdout) == (51, "0\n0\n"), done.stderr
    assert "1 modules for SM12x with 0 kernels rewritten" in done.stderr and not receipt.exists()


def test_refused_module_fails_a_program_that_succeeds(runner: Runner, modules: Path) -> None:
    program = PROGRAM.replace("sys.exit(", "print(")
    done = runner.command(program, modules / "kernel.cubin", "cuModuleLoadData")
    assert (done.returncode, done.stdout) == (11, "209\n")
    assert "1 modules were refused" in done.stderr


def test_errors_of_the_command(runner: Runner, tmp_path: Path) -> None:
    assert runner.command("import os; os.kill(os.getpid(), 9)").returncode == 137
    done = runner.command("", options=("--ptx", tmp_path))
    assert done.returncode == 11 and "has no PTX files with kernels" in done.stderr
    runner.driver = tmp_path
    done = runner.command("")
    assert done.returncode == 41 and "verify run needs a GPU of compute capability 9.0" in done.stderr


# ---- delays

RACY = (
    PRINTED
    + """
import os
seed, first, last, of = (os.environ.get("SM120KIT_PTX_DELAYS") or "0 0 0 -").split()
print("wrong" if int(seed) >= 4 and int(first) <= 2 < int(last) else "right")
"""
)
"""A program whose result depends on a delay at site 2 of its module, from seed 4 on."""


def delays(runner: Runner) -> list[tuple[int, ...]]:
    """The words after the magic ones in the machine code that the driver got."""
    content, magic = (runner.records / "module").read_bytes(), struct.pack("<4I", *perturb.MAGIC)
    return [struct.unpack_from("<4I", content, found.end()) for found in re.finditer(re.escape(magic), content)]


def test_driver_writes_the_delays_into_the_machine_code(runner: Runner, modules: Path) -> None:
    """Of all modules, of one, of another; and none without a seed."""
    part = runner.interposition
    (part.directory / perturb.FLAG).touch()
    assert runner.python(PROGRAM, modules / "resident.ptx", "cuModuleLoadData").returncode == 0
    assert delays(runner) == [(0, 0, 0, perturb.LENGTHS)]
    (module,) = part.modules()
    assert [site["instruction"].split()[0] for site in module["sites"]][:1] == ["bar.sync"] and module["sites"][0]["line"] > 5
    for named, words in (("-", (7, 1, 3)), (module["code"], (7, 1, 3)), ("0-0", (0, 0, 0))):
        program = f"import os\nos.environ['SM120KIT_PTX_DELAYS'] = '7 1 3 {named}'\n{PROGRAM}"
        assert runner.python(program, modules / "resident.ptx", "cuModuleLoadData").returncode == 0
        assert delays(runner) == [(*words, perturb.LENGTHS)]


def test_race_is_bisected_to_its_site(runner: Runner, modules: Path) -> None:
    words = (modules / "resident.ptx", "cuModuleLoadData")
    done = runner.command(RACY, *words, options=("--perturb", "2,5"))
    assert done.returncode == 1, done.stderr
    assert "race: seed 4: exit code 0" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "delayed before: " in line]
    text = (modules / "resident.ptx").read_text().splitlines()
    assert text[int(re.search(r"line (\d+)", line)[1]) - 1].split()[0] == line.split("delayed before: ")[1].split()[0]
    healthy = runner.command(RACY, *words, options=("--perturb", "0,3"))
    assert healthy.returncode == 0 and "no run of 3 seeds differs; 5 runs" in healthy.stdout, healthy.stderr
    assert "not verified" not in healthy.stderr
    unsteady = runner.command(f"{PRINTED}import time\nprint(time.time())", *words, options=("--perturb", "1"))
    assert unsteady.returncode == 51 and "two runs without delays differ" in unsteady.stderr
    fails = runner.command(f"{PRINTED}sys.exit(3)", *words, options=("--perturb", "1,1"))
    assert fails.returncode == 51 and "fails without delays: exit code 3" in fails.stderr and not fails.stdout
    assert runner.command("", options=("--perturb", "1")).returncode == 51  # no module
    for wrong in ("1,0", "", "1,1001", "-1", "1,2,3", "2147483648", "x"):
        assert runner.command("", options=("--perturb", wrong)).returncode == 11


def test_modules_that_no_delay_reaches_are_named(runner: Runner, modules: Path) -> None:
    """Beside one that has delays: a kernel for Hopper in the same program would pass for one that was perturbed."""
    both = f"{PRINTED}print(cuda.cuModuleLoadData(ctypes.byref(module), pathlib.Path(sys.argv[3]).read_bytes()))"
    words = (modules / "resident.ptx", "cuModuleLoadData")
    hopper = runner.command(both, *words, modules / "hopper-and-code.fatbin", options=("--perturb", "1,2"))
    assert hopper.returncode == 0 and hopper.stderr.count("not verified: code for Hopper in memory") == 1, hopper.stderr
    refused = runner.command(both, *words, modules / "machine-code.fatbin", options=("--perturb", "1,2"))
    assert refused.returncode == 11 and "1 modules were refused" in refused.stderr, refused.stderr


# ---- the plug-in of pytest

TESTS = """
import ctypes, pathlib, pytest
cuda, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
def load(name):
    return cuda.cuModuleLoadData(ctypes.byref(module), (pathlib.Path("MODULES") / name).read_bytes() + b"\\0")
def test_ptx(): assert load("kernel.ptx") == 0
def test_hopper(): load("hopper-and-code.fatbin")
def test_machine_code(): load("kernel.cubin")
def test_wrong(): assert load("kernel.ptx") == 1
def test_skips(): load("kernel.cubin") and pytest.skip("not supported")
def test_map():
    two = ctypes.c_uint64 * 2
    assert cuda.cuTensorMapEncodeTiled(bytes(128), 13, 1, None, two(3, 1), two(), two(32, 1), two(1, 1), 0, 0, 0, 0) == 1
@pytest.fixture
def before(): load("kernel.cubin")
def test_before(before): pass
@pytest.fixture
def after():
    yield
    load("kernel.cubin")
def test_after(after): pass
"""

PLUGIN = ("-p", "sm12x_lab.pytest_plugin", "-p", "no:cacheprovider", "--sm12x", "-v", "test_kernels.py")


def under_pytest(
    runner: Runner, modules: Path, directory: Path, *options: str, run: Sequence[object] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """``pytest --sm12x`` of ``TESTS``, started by the command ``run``."""
    (directory / "test_kernels.py").write_text(TESTS.replace("MODULES", str(modules)))
    (directory / "pytest.ini").write_text("[pytest]\n")
    env = {**os.environ, "LD_LIBRARY_PATH": str(runner.driver), "STUB_RECORDS": str(runner.records)}
    env |= {"SM120KIT_STATE": str(runner.records / "state"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
    words = [str(word) for word in (*run, sys.executable, "-m", "pytest", *PLUGIN, *options)]
    return subprocess.run(words, env=env, cwd=directory, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("chosen", "code", "outcomes"),
    [
        ("test_ptx", 0, {"test_ptx": {"PASSED"}}),
        (
            "test_",
            1,
            {
                "test_ptx": {"PASSED"},
                **{f"test_{name}": {"FAILED"} for name in ("hopper", "machine_code", "wrong", "skips", "map")},
                "test_before": {"ERROR"},
                "test_after": {"PASSED", "ERROR"},
            },
        ),
    ],
)
def test_pytest_plugin(
    runner: Runner, modules: Path, tmp_path: Path, chosen: str, code: int, outcomes: dict[str, set[str]]
) -> None:
    """Tests run under the preloaded driver; those with modules that are not verified fail, whatever they assert.

    So do those whose fixtures load them.
    """
    done = under_pytest(runner, modules, tmp_path, "-k", chosen)
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, set[str]] = {}
    for name, outcome in re.findall(r"::(\w+) (PASSED|FAILED|ERROR|SKIPPED)", done.stdout):
        found.setdefault(name, set()).add(outcome)
    assert found == outcomes
    assert ("not verified for SM120; refused: " in done.stdout) == (code == 1)


def test_pytest_under_a_run_that_is_not_strict(runner: Runner, modules: Path, tmp_path: Path) -> None:
    """The plug-in does not start another run; its tests are as strict."""
    run = (sys.executable, "-m", "sm120kit", "verify", "run", "--")
    done = under_pytest(runner, modules, tmp_path, "-k", "test_ptx or test_hopper", run=run)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr


def test_variable_of_a_run_without_its_library_is_no_run(runner: Runner, modules: Path, tmp_path: Path) -> None:
    runner.driver = tmp_path
    done = under_pytest(runner, modules, tmp_path, **{images.RUN_DIRECTORY: str(tmp_path)})
    assert done.returncode == 41 and "passed" not in done.stdout, done.stdout + done.stderr
