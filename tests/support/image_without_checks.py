"""Build an image without its checks, which ``sm120kit build`` runs: ``python image_without_checks.py ENGINE --base BASE ...``.

Prints the image's id. Errors end as those of sm120kit.
"""

from __future__ import annotations

import argparse
import sys

from sm120kit.cli import entry
from sm120kit.cli.options import Sources
from sm120kit.core import console, reporting
from sm120kit.images import delivery
from sm120kit.recipes.target import resolve
from sm120kit.wheels import image_wheels
from sm120kit.wheels.build_records import BuildRequest


def build(arguments: argparse.Namespace) -> None:
    options = Sources(offline=arguments.offline).run_options()
    target, request = resolve(arguments.engine, options), BuildRequest(group=arguments.kernels)
    assert target.engine
    base = delivery.prepare(arguments.base, target.recipe, target.engine.closure, options)
    result = delivery.engine_image(image_wheels.build(target.engine, request), base, options)
    console.info(f"{'built' if result.ran else 'nothing to do for'} {result.context.reference}")
    console.data(result.image.id)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("--base", default="")
    parser.add_argument("--kernels")
    parser.add_argument("--offline", action="store_true")
    parsed = parser.parse_args()
    with reporting.use(console):
        sys.exit(entry.run(lambda: build(parsed)))
