"""FlashInfer is the patched one, and finds the modules that were compiled ahead without a compiler."""

import ctypes
import importlib
import json
import os
from importlib import metadata
from pathlib import Path


def origin():
    """What the patched wheel says about itself."""
    return json.loads(metadata.distribution("flashinfer-python").read_text("sm120kit.json"))


def check_patched(expected):
    """The installed package is of the commit, tree, plan and patches that the image claims."""
    said = origin()
    for key in ("recipe", "commit", "tree", "plan"):
        assert said[key] == expected[key], f"{key} is {said[key]}, the image says {expected[key]}"
    patches = [f"{patch['project']}/{patch['slug']}@{patch['sha256'][:12]}" for patch in said["patches"]]
    assert patches == expected["patches"], f"patches {patches}, the image says {expected['patches']}"
    assert said["modules"] == expected["modules"], f"modules {said['modules']}, the image says {expected['modules']}"
    return {"commit": said["commit"], "tree": said["tree"], "patches": str(len(patches))}


def check_import(expected):
    """It imports, says its version, and complains about nothing."""
    import flashinfer

    assert flashinfer.__version__ == expected["version"], f"{flashinfer.__version__}, not {expected['version']}"
    return {"flashinfer": flashinfer.__version__}


def check_driver(expected):
    """Which driver the checks that follow are answered by: the host's, or a stand-in that knows no GPU."""
    answer = ctypes.CDLL("libcuda.so.1").cuInit(0)
    if "SM120KIT_STANDIN" in os.environ:
        assert answer == 100, f"the stand-in's cuInit answers {answer}, not CUDA_ERROR_NO_DEVICE"
        return {"driver": "a stand-in: every call answers CUDA_ERROR_NO_DEVICE"}
    return {"driver": f"the host's; cuInit answers {answer}"}


def specs(expected):
    """FlashInfer's own specification of every module that was compiled ahead; from here on nothing may be compiled."""
    import torch

    if torch.version.cuda is None:  # what a CUDA build of torch says and brings along
        torch.version.cuda = "13.0"
        site = Path(torch.__file__).parents[1]
        for library in sorted(site.glob("nvidia/**/lib/libcudart.so.*")) + sorted(site.glob("nvidia/**/lib/libnvrtc.so.*")):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "12.0f")
    for generator in expected["generators"]:
        module, _, function = generator.partition(":")
        yield getattr(importlib.import_module(module), function)()


def check_compiled_ahead(expected):
    """FlashInfer finds every module of ours where it looks first, and would not compile it."""
    assert expected["allowed"]["tools"] or os.environ.get("FLASHINFER_DISABLE_JIT") == "1", "FLASHINFER_DISABLE_JIT is not set"
    names = []
    for spec in specs(expected):
        assert spec.is_aot, f"{spec.name} would be compiled at first use: there is no {spec.aot_path}"
        names.append(spec.name)
    assert sorted(names) == sorted(expected["modules"]), f"{names}, the image says {expected['modules']}"
    return {"compiled ahead": ", ".join(names)}


def check_modules_load(expected):
    """Every module of ours loads, and nothing is compiled on the way."""
    before = set(Path.home().rglob("*"))
    loaded = []
    for spec in specs(expected):
        spec.build_and_load()
        loaded.append(spec.name)
    made = [str(path) for path in set(Path.home().rglob("*")) - before if path.suffix in (".so", ".o", ".ninja", ".cu")]
    assert not made, f"was compiled: {', '.join(made)}"
    return {"loaded": ", ".join(loaded)}


def module(expected, name):
    """A loaded module of ours."""
    if name not in expected["modules"]:
        raise NotRun(f"{name} is not in this image")  # noqa: F821 - the runner provides it
    return next(spec for spec in specs(expected) if spec.name == name).build_and_load()


def check_tactics(expected):
    """The FP4 GEMM offers a tactic for every two kernels that it must have: each is compiled for two output types."""
    name = "fp4_gemm_cutlass_sm120"
    tactics = module(expected, name).fp4_gemm_tactic_num()
    kernels = sum(expected["kernels"].get(name, {}).values())
    if not kernels:
        raise NotRun(f"it offers {tactics}; the recipe does not say how many kernels {name} has")  # noqa: F821
    assert 2 * tactics == kernels, f"{tactics} tactics, and the recipe expects {kernels} kernels"
    return {"FP4 GEMM tactics": str(tactics)}


def check_answer(expected):
    """A host function of a compiled module answers what a table of e2m1 values says."""
    quantization = module(expected, "fp4_quantization_120f")
    import torch

    codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    scales = torch.arange(120, 136, dtype=torch.uint8).reshape(2, 8)
    out = torch.empty(2, 256, dtype=torch.float32)
    quantization.mxfp4_dequantize_host(codes, scales, out, 32)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row in range(2):
        for column in range(256):
            code = int(codes[row, column // 2]) >> (4 * (column % 2)) & 15
            right = values[code & 7] * (-1.0 if code & 8 else 1.0) * 2.0 ** (int(scales[row, column // 32]) - 127)
            assert float(out[row, column]) == right, f"row {row}, column {column}: {float(out[row, column])}, not {right}"
    return {"answers compared": "512"}
