"""``sm120kit build``: build a wheel, or the wheels and the image of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sm120kit.cli.options import Base, Limits, LocalPatches, SharedCache, Sources, argument, option, recipe_names
from sm120kit.core import console
from sm120kit.core.memory import available_bytes, resident_bytes
from sm120kit.core.records import Stage
from sm120kit.images.repeated_builds import inputs_of, recognized, remember

if TYPE_CHECKING:
    from sm120kit.wheels.build_records import BuildRequest
    from sm120kit.wheels.compile import Progress


@dataclass(frozen=True)
class KernelOptions:
    """Which kernels are compiled, and for which archs."""

    arch: Annotated[
        list[str] | None, option("--arch ARCH", "Target: sm_120f, sm_120a or sm_121a; repeatable; default: the recipe's.")
    ] = None
    kernels: Annotated[
        str | None,
        option(
            "--kernels GROUP",
            (
                "Kernels to compile ahead of time: none, quick (17 CPU-minutes), serve or all (2.7 CPU-hours); default: the"
                " recipe's, which is all for vLLM and SGLang."
            ),
        ),
    ] = None

    def request(self, *, from_source: bool = False, stage: Stage = Stage.PACK) -> BuildRequest:
        """The request of a build with these kernels.

        Raises:
            NotFound: an arch does not exist.
        """
        from sm120kit.recipes import parse_arch
        from sm120kit.wheels.build_records import BuildRequest

        archs = tuple(parse_arch(text) for text in self.arch or ())
        return BuildRequest(archs, self.kernels, from_source, stage)


@dataclass(frozen=True)
class BuildOptions:
    """What else is built, where the build stops, the directory for its wheels, and how the result is printed."""

    from_source: Annotated[
        bool, option("--from-source", "For an engine: also compile the modules that its recipe lists, see docs/build.md.")
    ] = False
    to: Annotated[Stage | None, option("--to STAGE", "Stop after fetch, patch, plan or pack (the wheel).")] = None
    dry_run: Annotated[bool, option("--dry-run", "Print the plan and compile nothing.")] = False
    output: Annotated[Path, option("--output -o DIR", "Directory for the wheel.")] = Path("wheelhouse")
    json: Annotated[bool, option("--json", "Print the records as JSON.")] = False
    patch: LocalPatches = None


def build(
    engine: Annotated[
        str,
        argument(
            "ENGINE",
            "As vllm, sglang, flashinfer or vllm@0.19.1, or a recipe, by name or file.",
            autocompletion=recipe_names,
        ),
    ],
    *,
    kernels: KernelOptions,
    steps: BuildOptions,
    limits: Limits,
    base: Base = "",
    cache: SharedCache,
    sources: Sources,
) -> None:
    """Build a patched FlashInfer wheel, or an image of vLLM or SGLang with it.

    The source is fetched, patched, compiled for SM12x and checked. An image is tagged only if it passes its checks. Needs no
    GPU.
    """
    workspace = sources.workspace()
    other = steps.to or steps.dry_run or steps.json or steps.patch or cache.cache_push  # which does more than make an image
    whole = not other and "/" not in engine and not engine.endswith(".toml")
    request = (engine, kernels, replace(steps, output=Path()), base, cache, sources, limits)
    inputs = inputs_of(request) if whole else ""
    if found := recognized(inputs, steps.output, workspace):
        console.info(f"nothing to do for {found.reference}: the image and its checks are there")
        console.data(found.reference)
        return
    from sm120kit.cli import build_output  # its imports take longer than all of the above

    finished = build_output.run(engine, kernels, steps, base, cache.used_by(sources.run_options(limits)))
    if finished and inputs and inputs == inputs_of(request):
        remember(inputs, *finished, workspace)


@contextmanager
def watcher() -> Iterator[Callable[[Progress], None]]:
    """Print a line for each compiled unit with its cost; on a terminal also show running units, time left and memory.

    After a unit that failed none is started: what is shown is that the running ones end.
    """
    printed = compiled = 0
    started: dict[str, float] = {}
    with console.status() as show:

        def watch(progress: Progress) -> None:
            nonlocal printed, compiled
            now = time.monotonic()
            units = {unit.output for unit in progress.units}
            ended = [event for event in progress.finished if event.output in units]
            running = {unit.output: now - started.setdefault(unit.output, now) for unit in progress.running}
            left = f"about {progress.seconds_left(running) / 60:.1f} min left"
            if any(event.exit_code for event in ended):
                left = "the build stops when the running compilers end"
            for event in ended[printed:]:
                printed += 1
                compiled += event.exit_code == 0
                state = f"exit code {event.exit_code}" if event.exit_code else f"compiled {compiled} of {len(units)}"
                cost = f"{event.seconds:.0f} s, {event.peak_bytes / 2**30:.1f} GiB"
                console.info(f"{state}, {Path(event.output).name}: {cost}; {left}")
            used = sum(resident_bytes(unit.pid) for unit in progress.running) / 2**30
            names = ", ".join(Path(unit.output).name for unit in progress.running)
            memory = f"{used:.1f} GiB used, {available_bytes() / 2**30:.1f} GiB available"
            if names:
                show(f"compile {compiled + 1} of {len(units)}; {left}; {memory}; compiling {names}")

        yield watch
