"""Checks of the patched FlashInfer and of its modules compiled ahead of time."""

import ctypes
import importlib
import json
import os
from importlib import metadata
from pathlib import Path

QUICK = ("patched",)
"""Checks of an image that differs from a checked one in Python files only."""


def origin():
    """The content of the installed wheel's ``sm120kit.json``: recipe, sources, patches, modules."""
    return json.loads(metadata.distribution("flashinfer-python").read_text("sm120kit.json"))


def check_patched(expected):
    """Commit, tree, plan, patches and modules of the installed package are those in the labels of the image."""
    installed = origin()
    for key in ("recipe", "commit", "tree", "plan"):
        assert installed[key] == expected[key], f"{key} is {installed[key]}, the label is {expected[key]}"
    patches = [f"{patch['project']}/{patch['slug']}@{patch['sha256'][:12]}" for patch in installed["patches"]]
    assert patches == expected["patches"], f"patches {patches}, the label is {expected['patches']}"
    assert installed["modules"] == expected["modules"], f"modules {installed['modules']}, the label is {expected['modules']}"
    return {"commit": installed["commit"], "tree": installed["tree"], "patches": str(len(patches))}


def check_import(expected):
    """FlashInfer imports without a warning and has the expected version."""
    import flashinfer

    assert flashinfer.__version__ == expected["version"], f"{flashinfer.__version__}, not {expected['version']}"
    return {"flashinfer": flashinfer.__version__}


def check_driver(expected):
    """Report which CUDA driver the following checks use: the host's, or a stub without a GPU."""
    code = ctypes.CDLL("libcuda.so.1").cuInit(0)
    if names := os.environ.get("SM120KIT_DRIVER_STUB"):
        assert code == 100, f"the stub's cuInit returns {code}, not CUDA_ERROR_NO_DEVICE"
        return {"driver": "a stub: every call returns CUDA_ERROR_NO_DEVICE", "driver functions": names}
    return {"driver": f"the host's; cuInit returns {code}"}


def specs(expected):
    """Yield FlashInfer's JIT specification of every module compiled ahead of time. From then on FlashInfer must not compile."""
    import torch

    os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "12.0f")
    for call in expected["generators"]:
        module, _, function = call["generator"].partition(":")
        arguments = {
            name: getattr(torch, value.removeprefix("torch.")) if str(value).startswith("torch.") else value
            for name, value in call.get("arguments", {}).items()
        }
        yield getattr(importlib.import_module(module), function)(**arguments)


def check_compiled_ahead(expected):
    """FlashInfer finds every module of ours among its compiled ones, and would not compile it."""
    names = []
    for spec in specs(expected):
        assert spec.is_aot, f"{spec.name} would be compiled on first use: {spec.aot_path} is missing"
        names.append(spec.name)
    assert sorted(names) == sorted(expected["modules"]), f"modules {names}, the label is {expected['modules']}"
    return {"compiled ahead": ", ".join(names)}


def check_modules_load(expected):
    """Every module of ours loads without being compiled."""
    before = set(Path.home().rglob("*"))
    loaded = []
    for spec in specs(expected):
        spec.build_and_load()
        loaded.append(spec.name)
    new = [str(path) for path in set(Path.home().rglob("*")) - before if path.suffix in (".so", ".o", ".ninja", ".cu")]
    assert not new, f"was compiled: {', '.join(new)}"
    return {"loaded": ", ".join(loaded)}
