"""A module imports only from strictly lower layers, rich and subprocess each have one door, and no stage knows another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "sm120kit"
LAYERS = {
    "cli": 13,
    "measuring": 12,
    "reproducing": 12,
    "launching": 11,
    "delivery": 10,
    "engines": 9,
    "proving": 9,
    "pipeline": 8,
    "fromsource": 8,
    "verifying": 8,
    "tiling": 7,
    "locking": 7,
    "trees": 6,
    **dict.fromkeys(
        [
            "sources",
            "patches",
            "lock",
            "tiles",
            "emulate",
            "prove",
            "plan",
            "build",
            "image",
            "imagediff",
            "verify",
            "registry",
            "attest",
            "launch",
            "bench",
            "roofline",
            "doctor",
            "explain",
            "kld",
        ],
        5,
    ),
    **dict.fromkeys(["recipe", "host", "gitrepo", "cubin", "daemon", "memory", "toolchain", "checkpoint"], 4),
    "workspace": 3,
    **dict.fromkeys(["process", "console"], 2),
    **dict.fromkeys(["records", "errors"], 1),
}
ONE_DOOR = {"subprocess": "process", "rich": "console", "docker": "daemon"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if room_of(path) not in ("__init__", "__main__"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    assert room in LAYERS, f"{room} has no layer"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] in ONE_DOOR:
            assert room == ONE_DOOR[parts[0]], f"{path.name} imports {parts[0]}: that is {ONE_DOOR[parts[0]]}'s"
        if parts[0] == "sm120kit" and len(parts) > 1 and parts[1] in LAYERS and parts[1] != room:
            assert LAYERS[parts[1]] < LAYERS[room], f"{room} imports {parts[1]}"
