"""Record which files of the image's Python environment a process reads and which directories it lists.

In the process of the checks, :func:`start` records into a set. The Python programs that a check starts import this module as
``sitecustomize`` and append to the file in ``SM120KIT_READS``. ``*NAME`` stands for a program that could not be followed.
"""

import os
import sys

VARIABLE = "SM120KIT_READS"
UNKNOWN = "*"
_NATIVE = {"ldconfig", "uname", "nvidia-smi", "ninja", "gcc", "g++", "cc", "c++", "ld", "nvcc", "ptxas", "objdump", "lscpu"}
"""Programs that read no Python file, whatever their variables."""


def start(site, add):
    """Call ``add`` with each path below ``site`` that this process opens or lists."""

    def hook(event, arguments):
        if event in ("open", "os.listdir", "os.scandir"):
            path = arguments[0]
            path = os.fsdecode(path) if isinstance(path, bytes) else path
            if isinstance(path, str) and path.startswith(site):
                add(path)
        elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec") and (name := _not_followed(*arguments)):
            add(UNKNOWN + name)

    sys.addaudithook(hook)


def _not_followed(program, argv, *others):
    """The name of a program that is not recorded although it may run Python: it lacks the variables or ignores them."""
    environment, words = others[-1], [argv] if isinstance(argv, str | bytes | os.PathLike) else list(argv)
    words = [os.fsdecode(word) for word in words]
    name = os.fsdecode(program or words[0]).rpartition("/")[2]
    names = {os.fsdecode(key) for key in (os.environ if environment is None else environment)}
    isolated = name.startswith("python") and any(word.startswith("-") and {*word[1:]} & {*"IES"} for word in words[1:2])
    followed = {VARIABLE, "PYTHONPATH"} <= names and not isolated
    return "" if followed or name in _NATIVE else name


def _start_in_child():
    file, seen = os.environ.get(VARIABLE), set()
    if not file:
        return
    log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def add(path):
        if path not in seen:
            seen.add(path)
            os.write(log, f"{path}\n".encode(errors="surrogateescape"))

    start(f"{sys.prefix}/lib/", add)


if __name__ == "sitecustomize":
    _start_in_child()
