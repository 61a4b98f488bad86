"""Record the kernels of Triton that each process of a server launches, as ``compile.py`` reads them.

Python imports this module when it starts, if the entrypoint has put its directory on the path: where the variable
``SM120KIT_RECORD_TRITON`` names a directory, which gets a file for each process, with a line of JSON for each kernel.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
from pathlib import Path


def install():
    """Let Triton call :func:`write` for each kernel that it compiles or finds in its cache."""
    from triton import knobs

    before = knobs.runtime.jit_post_compile_hook

    def hook(**named):
        write(**named)
        return before(**named) if before else None

    knobs.runtime.jit_post_compile_hook = hook


def write(*, compile, fn, **_):
    """Append a kernel, unless its constants cannot be serialized."""
    if not compile.get("specialization_data"):
        return
    data = json.loads(compile["specialization_data"])
    line = {
        "function": f"{fn.module}:{fn.name}",
        "signature": data["signature"],
        "constants": [data["constant_keys"], data["constant_vals"]],
        "attributes": [data["attrs_keys"], data["attrs_vals"]],
        "options": {name: value for name, value in data["options"].items() if name != "extern_libs"},
    }
    directory = Path(os.environ["SM120KIT_RECORD_TRITON"])
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls :func:`install` once ``triton.knobs`` is imported, so that other processes do not import Triton."""

    def find_spec(self, name, path, target=None):
        if name != "triton.knobs":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            sys.modules[name] = module
            install()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("SM120KIT_RECORD_TRITON"):
    sys.meta_path.insert(0, AfterImport())
