"""``sm120kit build`` of vLLM and SGLang: the plan of an image, what is built here, and the image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sm120kit import console

if TYPE_CHECKING:
    from sm120kit.engines import Engine
    from sm120kit.fromsource import Built
    from sm120kit.trees import Options
    from sm120kit.workspace import Workspace


def show_plan(engine: Engine, workspace: Workspace) -> None:
    """What the image is made of: every wheel, what is patched, what stays official and why."""
    item, closure, plan = engine.recipe, engine.closure, engine.kernels.plan
    console.data(f"{item.name} ({item.state}): build id {engine.build_id}")
    console.data(f"Python {closure.python} on {closure.platform}; base image {engine.lock.base_image}")
    console.data(f"rests on {engine.lock.rests_on}\n")
    sizes = {wheel: workspace.downloads / wheel.sha256 / wheel.filename for wheel in closure.wheels}
    known = {wheel: path.stat().st_size for wheel, path in sizes.items() if path.is_file()}
    console.table(
        ("wheel", "version", "MB", "sha256"),
        (
            (wheel.name, wheel.version, f"{known[wheel] / 1e6:.1f}" if wheel in known else "", wheel.sha256[:12])
            for wheel in closure.wheels
        ),
    )
    console.data(
        f"{len(closure.wheels)} wheels; {len(known)} are at hand, {sum(known.values()) / 1e6:.1f} MB; "
        "the index does not say how big the others are\n"
    )
    console.table(("built here", "why"), ((part.what, part.reason) for part in item.built))
    console.table(("stays official", "why"), ((part.what, part.reason) for part in item.official))
    if item.environment.overrides:
        console.table(
            ("overridden", "version", "why"),
            ((name, given.version, given.reason) for name, given in item.environment.overrides.items()),
        )
    console.table(
        ("source", "version", "tree", "patched tree"),
        ((one.project, one.version, one.tree, one.patched_tree) for one in engine.lock.sources),
    )
    console.table(("patch", "sha256"), ((patch.path, patch.sha256) for patch in engine.lock.patches))
    if plan is not None:
        units = [unit for module in plan.modules for unit in module.units]
        console.data(
            f"FlashInfer plan {plan.digest}: {len(plan.modules)} modules, {len(units)} units, "
            f"about {sum(unit.estimate_seconds for unit in units) / 60:.0f} CPU-minutes, "
            f"at most {max((unit.estimate_bytes for unit in units), default=0) / 2**30:.1f} GiB for one unit"
        )
        console.table(("left out", "reason"), ((left.what, left.reason) for left in plan.left_out))
    if engine.source is not None:
        _show_own_wheel(engine.source)
    console.data("unverified on SM120: no kernel was run")


def _show_own_wheel(source: Built) -> None:
    """What of the engine's own wheel is patched, and what is built from source."""
    plan = source.plan
    console.data(
        f"\n{plan.engine} {plan.version}+sm120kit.{plan.digest[:12]}: the official wheel packed again, tree {plan.tree}"
    )
    console.table(
        ("replaced in it", "patch"),
        ((path, f"{patch.project}/{patch.slug}") for path, patches in source.overlaid.items() for patch in patches),
    )
    if not plan.modules:
        return
    console.data(f"from source for {' '.join(plan.archs)}:")
    console.table(
        ("module", "unit", "expected memory", "expected time"),
        (
            (module.name, unit.source, f"{unit.estimate_bytes / 2**30:.1f} GiB", f"{unit.estimate_seconds:.0f} s")
            for module in plan.modules
            for unit in module.units
        ),
    )
    console.table(("stand-in for", "why"), ((left.what, left.reason) for left in plan.left_out))


def show_built(engine: Engine, wheel: Path) -> None:
    """What was built here, and what it takes the place of."""
    console.say(f"lock of {engine.recipe.name} holds: build id {engine.build_id}")
    console.say(f"{wheel.name} takes the place of the official FlashInfer beside {len(engine.closure.wheels)} locked wheels")
    if engine.source is not None and engine.source.artifacts is not None:
        built = engine.source
        console.say(f"{'built' if built.ran else 'nothing to do for'} {built.wheel.name}; records and logs: {built.directory}")
        console.say(f"it takes the place of the official {engine.recipe.engine} {engine.recipe.version}")


def deliver(engine: Engine, options: Options, base: str, network: str, *, context_only: bool, json: bool) -> None:
    """Make the image, run its checks, and show what came of it. Exit code 1 when a check fails."""
    import time

    from sm120kit import delivery
    from sm120kit.cli.image import show_context, show_report

    started = time.monotonic()
    found = delivery.engine_image(engine, options, base, network=network, context_only=context_only, tell=console.say)
    if found.image is None:
        show_context(found.context)
        return
    seconds = time.monotonic() - started
    console.say(
        f"{'built' if found.ran else 'nothing to do for'} {found.context.reference} in {seconds:.1f} s: {found.image.id}"
    )
    show_report(delivery.named(found.image, options.workspace, console.say), json=json)
