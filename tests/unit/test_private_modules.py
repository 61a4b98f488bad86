"""Modules named with an underscore are imported by their own package only; every other module has a user elsewhere."""

import grimp
import pytest

UNUSED_ELSEWHERE = ("sm120kit.cli", "sm120kit.probes", "sm120kit.engines", "sm120kit.images.checks.suites")
"""Packages whose modules are found by name: commands, probes, engines, and programs that run in an image."""


def package(module: str) -> str:
    return ".".join(module.split(".")[:2])


@pytest.fixture(scope="module")
def importers() -> dict[str, set[str]]:
    """The modules that import each module of sm120kit, the laboratory's included."""
    graph = grimp.build_graph("sm120kit", "sm12x_lab", cache_dir=None)
    return {name: graph.find_modules_that_directly_import(name) for name in graph.modules if name.startswith("sm120kit.")}


def test_private_modules_are_imported_by_their_package_only(importers: dict[str, set[str]]) -> None:
    private = {name: users for name, users in importers.items() if name.rsplit(".", 1)[-1].startswith("_")}
    foreign = {name: abroad for name, users in private.items() if (abroad := {u for u in users if package(u) != package(name)})}
    assert len(private) > 60
    assert not foreign


def test_public_modules_are_imported_elsewhere(importers: dict[str, set[str]]) -> None:
    modules = {
        name: users
        for name, users in importers.items()
        if users and name.count(".") > 1 and not any(other.startswith(f"{name}.") for other in importers)
    }
    public = {
        name: users
        for name, users in modules.items()
        if not name.rsplit(".", 1)[-1].startswith("_") and not name.startswith(UNUSED_ELSEWHERE)
    }
    assert {name for name, users in public.items() if all(package(user) == package(name) for user in users)} == set()
