"""Entrypoint of the images of engines: ``serve.py PROGRAM ARGUMENT...`` becomes the recipe's serve command.

Without an NVIDIA driver the engines end in a traceback when they are imported, even for their help. Then ``--help`` and
``--version`` are answered here, from the options recorded with the recipe, and anything else ends with the reason.

Kernels of b12x that were compiled with the image are added to b12x's cache, which is a volume or memory: what the image has in
its place is hidden. Of kernels of Triton that were compiled with the image, Triton's cache gets the lists of files, which name
those in the image. With ``SM120KIT_RECORD_TRITON``, a directory, the server's processes list their kernels there.

The pages of the engines mount caches below ``/root``, such as ``-v ~/.cache/huggingface:/root/.cache/huggingface``. The home
directory of this image's user gets links to such mounts, or the container ends with the mount that works.
"""

import ctypes
import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

ENGINES = ("vllm", "sglang")
HELP = Path(__file__).with_name("help.txt")
B12X_ENTRIES = Path(__file__).parent / "b12x" / "entries"
TRITON_ENTRIES, TRITON_RECORDER = (Path(__file__).parent / "triton_ahead" / name for name in ("entries", "record"))
MOUNTS, ROOT_HOME = Path("/proc/self/mountinfo"), Path("/root")


def has_driver():
    """Whether the driver's library can be loaded; container runtimes mount it together with a GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def b12x_cache():
    """The directory of b12x's cache, as ``_cute_compile_cache_dir`` selects it (b12x 0.8.3: ``cute/runtime_patches.py``; 1.5.1,
    which has a manifest of each kernel: ``_lib/compiler.py``).
    """
    variables, name = {"B12X_COMPILE_CACHE_DIR": ""}, "compile"
    if not any(B12X_ENTRIES.glob("*/*.json")):
        variables, name = {"B12X_CUTE_COMPILE_CACHE_DIR": "", "CUTE_DSL_CACHE_DIR": "b12x_object_cache"}, "cute_compile"
    for variable, below in (variables | {"XDG_CACHE_HOME": f"b12x/{name}"}).items():
        if os.environ.get(variable):
            return Path(os.environ[variable], below)
    return Path.home() / ".cache" / "b12x" / name


def add(source, files, directory, package):
    """Copy the files that a cache lacks, and return whether it has all. Servers that start at once may share it: each file
    appears whole.
    """
    try:
        for file in sorted(files):
            target = directory / file.relative_to(source)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
                shutil.copyfile(file, partial)
                partial.replace(target)
    except OSError as error:
        print(f"warning: {directory}: {error.strerror}: {package} compiles its kernels on first use", file=sys.stderr)
        return False
    return True


def add_b12x_entries():
    """Copy the entries that b12x's cache lacks."""
    add(B12X_ENTRIES, B12X_ENTRIES.glob("*/*.*"), b12x_cache(), "b12x")


def add_triton_entries():
    """Let Triton's cache name the kernels in the image that it lacks. It is where a variable says, also for vLLM, which else
    has one for each model (``compilation/compiler_interface.py`` of 0.33.0), and then can be where this one cannot be written.
    """
    if not TRITON_ENTRIES.is_dir():
        return
    directory = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    if add(TRITON_ENTRIES, TRITON_ENTRIES.glob("*/__grp__*.json"), directory, "Triton"):
        os.environ["TRITON_CACHE_DIR"] = str(directory)


def mounts(below):
    """The mount points below a directory, outermost first."""
    points = [line.split()[4] for line in MOUNTS.read_text().splitlines()]
    points = [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point) for point in points]
    return sorted(Path(point) for point in points if Path(point).is_relative_to(below))


def link_mounts():
    """Link what is mounted below ``/root`` into the home directory. Ends with the reason if that is not possible."""
    home = Path.home()
    for source in mounts(ROOT_HOME) if home != ROOT_HOME else ():
        target = home / source.relative_to(ROOT_HOME)
        try:
            next(source.iterdir(), None) if source.is_dir() else source.open("rb").close()
            if not (target.exists() and target.samefile(source)):
                target.parent.mkdir(parents=True, exist_ok=True)
                if target.is_dir():
                    target.rmdir()  # only if it is empty
                target.symlink_to(source)
        except OSError as error:
            print(f"error: {source} is mounted, and this container cannot use it: {error.strerror}", file=sys.stderr)
            print(f"hint: docker run -v DIRECTORY:{target}; if only you may read it, --user $(id -u):0", file=sys.stderr)
            sys.exit(1)


def answer(argv):
    """Print help, version, or why nothing is served; returns the exit code."""
    if any(argument == "-h" or argument.partition("=")[0] == "--help" for argument in argv):
        print(HELP.read_text(), end="")
    elif "--version" in argv:
        print(*(engine.version for name in ENGINES for engine in metadata.distributions(name=name)))
    else:
        print("error: this container has no NVIDIA driver, and serving needs a GPU", file=sys.stderr)
        print("hint: docker run --gpus all; --help and --version work without one", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if not has_driver():
        sys.exit(answer(sys.argv[1:]))
    link_mounts()
    add_b12x_entries()
    add_triton_entries()
    if os.environ.get("SM120KIT_RECORD_TRITON"):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TRITON_RECORDER), os.environ.get("PYTHONPATH"))))
    os.execvp(sys.argv[1], sys.argv[1:])  # the server is this process, with its signals and its exit code
