"""The house: which package may import which, and how large a module may grow."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import ciflows

ROOT = Path(ciflows.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
ANYWHERE = {"", "errors", "files", "settings", "devices", "pixels", "progress", "optional"}
COMMAND = ("cli", "cli_options", "cli_output", "estimator", "__main__")
# What each package may import beside itself and ANYWHERE; CONTRIBUTING.md draws the same arrows.
ARROWS = {
    "core": set(),
    "networks": {"core"},
    "layers": {"core", "networks"},
    "models": {"core", "networks", "layers"},
    "tables": {"core", "networks", "layers"},
    "datasets": {"core", "tables"},
    "diagnostics": {"core", "networks", "layers", "models"},
    "training": {"core", "networks", "layers", "models", "diagnostics"},
    "speed": {"core", "networks", "layers", "models", "training"},
    "report": {"core", "networks", "layers", "models", "tables", "datasets", "diagnostics", "training"},
}
ARROWS["vi"] = {"core", "networks", "training"}
ARROWS["bridges"] = {"core", "layers", "models"}
ARROWS["runs"] = {*ARROWS, "report"}
ARROWS |= {part: {*ARROWS, "runs", *COMMAND} for part in COMMAND}
HOOK = "core/hook.py"  # the only file below training that may import speed
LINES, LONG = 400, {"cli.py"}


def room(module: str) -> str:
    """The package of a module's full name, such as "core" of "ciflows.core.flow"."""
    return [*module.split("."), ""][1]


def imported(path: Path) -> set[str]:
    """The packages of ciflows that a file imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "ciflows":
            names += [f"ciflows.{alias.name}" for alias in node.names if (ROOT / alias.name).is_dir()]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names.append(node.module or "")
    return {room(name) for name in names if name.split(".")[0] == "ciflows"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    name = path.relative_to(ROOT)
    if name.name == "__init__.py" and len(name.parts) == 1:
        return  # it offers names of all packages, and imports them on first use
    own = name.parts[0].removesuffix(".py")
    allowed = ANYWHERE | {own} | ARROWS.get(own, set())
    allowed |= {"speed"} if name.as_posix() == HOOK else set()
    assert imported(path) - allowed == set()


def test_modules_are_short() -> None:
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > LINES and name not in LONG} == {}


def test_no_module_name_occurs_twice() -> None:
    places = defaultdict(list)
    for path in FILES:
        if path.name != "__init__.py":
            places[path.name].append(path.relative_to(ROOT).as_posix())
    # settings.py: the base class, and the settings of training built on it
    expected = {"settings.py": ["settings.py", "training/settings.py"]}
    assert {name: where for name, where in places.items() if len(where) > 1} == expected
