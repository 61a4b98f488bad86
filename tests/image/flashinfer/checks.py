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


def driver():
    """Make CUDA's runtime and driver libraries known, as a CUDA build of torch does. True when there is a real driver."""
    import torch

    site = Path(torch.__file__).parents[1]
    for library in sorted(site.glob("nvidia/**/lib/libcudart.so.*")) + sorted(site.glob("nvidia/**/lib/libnvrtc.so.*")):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    try:
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
        return True
    except OSError:
        return False


def specs(expected):
    """FlashInfer's own specification of every module that was compiled ahead."""
    import torch

    if torch.version.cuda is None:
        torch.version.cuda = "13.0"  # as a CUDA build says; the generators ask for it where there is no nvcc
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "12.0f")
    for generator in expected["generators"]:
        module, _, function = generator.partition(":")
        yield getattr(importlib.import_module(module), function)()


def check_compiled_ahead(expected):
    """FlashInfer finds every module of ours where it looks first, and would not compile it."""
    names = []
    for spec in specs(expected):
        assert spec.is_aot, f"{spec.name} would be compiled at first use: there is no {spec.aot_path}"
        names.append(spec.name)
    assert sorted(names) == sorted(expected["modules"]), f"{names}, the image says {expected['modules']}"
    assert os.environ.get("FLASHINFER_DISABLE_JIT") == "1", "FLASHINFER_DISABLE_JIT is not set"
    return {"compiled ahead": ", ".join(names)}


def check_modules_load(expected):
    """Every module of ours loads, and nothing is compiled on the way."""
    real = driver()
    before = set(Path.home().rglob("*"))
    loaded = []
    for spec in specs(expected):
        if not real and b"libcuda.so.1" in Path(spec.aot_path).read_bytes():
            continue
        spec.build_and_load()
        loaded.append(spec.name)
    made = [str(path) for path in set(Path.home().rglob("*")) - before if path.suffix in (".so", ".o", ".ninja", ".cu")]
    assert not made, f"was compiled: {', '.join(made)}"
    left = sorted(set(expected["modules"]) - set(loaded))
    if not loaded:
        raise NotRun(f"no driver here: {', '.join(left)} needs libcuda.so.1")  # noqa: F821 - the runner provides it
    return {"loaded": ", ".join(loaded), "not loaded for want of a driver": ", ".join(left)}


def check_answer(expected):
    """A host function of a compiled module answers what a table of e2m1 values says."""
    if "fp4_quantization_120f" not in expected["modules"]:
        raise NotRun("the quantization module is not in this image")  # noqa: F821
    import torch

    driver()
    (spec,) = (spec for spec in specs(expected) if spec.name == "fp4_quantization_120f")
    module = spec.build_and_load()
    codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    scales = torch.arange(120, 136, dtype=torch.uint8).reshape(2, 8)
    out = torch.empty(2, 256, dtype=torch.float32)
    module.mxfp4_dequantize_host(codes, scales, out, 32)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row in range(2):
        for column in range(256):
            code = int(codes[row, column // 2]) >> (4 * (column % 2)) & 15
            right = values[code & 7] * (-1.0 if code & 8 else 1.0) * 2.0 ** (int(scales[row, column // 32]) - 127)
            assert float(out[row, column]) == right, f"row {row}, column {column}: {float(out[row, column])}, not {right}"
    return {"answers compared": "512"}
