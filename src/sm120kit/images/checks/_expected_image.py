"""What an image must contain and do: the input of its checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ExpectedImage:
    """Required properties of an image, from its labels and recipe. The checks compare them with the installed files.

    ``generators`` are the calls of FlashInfer's generators of the compiled modules; ``kernels`` the patterns of
    ``expect_kernels`` with the minimum count per module; ``complete`` whether the modules are those of the kernel group
    ``all``; ``left_out`` distributions that are required by others and deliberately absent; ``overridden`` those whose version
    the recipe sets against the requirements of others; ``leave_out`` patterns of the files that are absent, by
    distribution, and ``imports`` the Python modules that must be importable without them; ``wrong_record`` patterns of
    files of which RECORD has another hash, as in their upstream wheel.

    For an engine: ``env`` must be set in the container, ``serve`` is the start command, and ``arguments`` are the arguments of
    each configuration after ``serve``; ``served`` its environment, quantization, and the architecture of its model, which is
    None if it is not recorded; ``backends`` what it selects on SM12x, see :func:`sm120kit.images.backends.expected`; ``b12x``
    the kernels of b12x that are compiled into the image.

    Unless ``read_all``, files are not hashed again that were hashed while their layers were unpacked, and an image that differs
    from a checked one in Python files only gets quick checks. ``digests`` are these hashes by path, for the check ``files``.

    ``quick`` is why only the checks are run that run no code of the image, empty if all are; ``changed`` are then the paths of
    files in which the image differs from the checked one, ``changed_modules`` the Python modules among them, and
    ``driver_stub`` the names in the driver's stub.
    """

    kind: str
    recipe: str
    version: str
    commit: str
    tree: str
    plan: str
    archs: tuple[str, ...]
    modules: tuple[str, ...]
    patches: tuple[str, ...]
    distributions: dict[str, str]
    generators: tuple[dict[str, Any], ...] = ()
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    complete: bool = False
    left_out: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    leave_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    wrong_record: dict[str, tuple[str, ...]] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    serve: tuple[str, ...] = ()
    arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    served: dict[str, dict[str, Any]] = field(default_factory=dict)
    backends: dict[str, dict[str, Any]] = field(default_factory=dict)
    b12x: dict[str, Any] = field(default_factory=dict)
    read_all: bool = True
    digests: dict[str, str] = field(default_factory=dict, repr=False)
    quick: str = ""
    changed: tuple[str, ...] | None = None
    changed_modules: tuple[str, ...] = ()
    driver_stub: tuple[str, ...] = ()
