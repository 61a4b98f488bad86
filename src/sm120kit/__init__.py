"""Patch and build vLLM, SGLang and FlashInfer for NVIDIA SM12x GPUs, with evidence."""

__version__: str


def __getattr__(name: str) -> str:
    """Read ``__version__`` from the installed metadata on first use: importing what reads it would double the start-up time."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sm120kit")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
