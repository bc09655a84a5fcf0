"""The nine rooms, read from the imports: what each may import, and the size of files."""

import ast
from collections.abc import Collection
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "saecli"

# From the top down.
ROOMS = "cli show geometry measure train extract sae store base".split()
DOORS = {
    "transformers": {"extract"},
    "matplotlib": {"show"},
    "datasets": {"extract"},
    "pydantic": {"base"},
    "typer": {"cli"},
    "rich": {"base", "show", "cli"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    """The module or package directly below saecli that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a file, wherever they stand in it."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


@cache
def imports(path: Path) -> list[tuple[int, list[str]]]:
    """Each import's level (0: absolute) and the dotted parts of what is imported from."""
    levels = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            levels += [(0, alias.name.split(".")) for alias in node.names]
        else:
            parts = node.module.split(".") if node.module else []
            levels += [
                (node.level, parts or [alias.name])
                for alias in (node.names if not parts else node.names[:1])
            ]
    return levels


def imported_units(path: Path) -> set[str]:
    depth = len(path.relative_to(PACKAGE).parts)
    units = {parts[0] for level, parts in imports(path) if level == depth}
    return units | {
        parts[1]
        for level, parts in imports(path)
        if level == 0 and parts[0] == "saecli" and parts[1:]
    }


def test_a_module_imports_only_rooms_below_its_own():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in MODULES
        if unit(path) in ROOMS
        for name in imported_units(path) & {*ROOMS[: ROOMS.index(unit(path))]}
    ]
    assert wrong == []


def test_the_top_of_the_package_is_nine_rooms_and_two_files():
    names = {path.name for path in PACKAGE.iterdir()} - {"__pycache__", "assets", "py.typed"}
    assert names == {*ROOMS, "__init__.py", "__main__.py"}


@pytest.mark.parametrize("library", DOORS)
def test_a_heavy_library_is_imported_by_its_rooms_alone(library: str):
    users = {
        unit(path)
        for path in MODULES
        if any(level == 0 and parts[0] == library for level, parts in imports(path))
    }
    assert users <= DOORS[library]


LONGEST = 500  # lines of a formatted file


def test_no_file_is_overlong():
    files = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert [
        str(path) for path in files if len(path.read_text(encoding="utf-8").splitlines()) > LONGEST
    ] == []


def inside(package: Path) -> dict[str, set[str]]:
    """The modules of a package, its `__init__` among them, and which of each other they import."""
    names = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    return {
        path.stem: {
            name
            for node in nodes(path)
            if isinstance(node, ast.ImportFrom)
            for name in siblings(node, package.name, names)
        }
        - {path.stem}
        for path in package.glob("*.py")
    }


def siblings(node: ast.ImportFrom, package: str, names: Collection[str]) -> list[str]:
    """The modules of its own package that an import is from; `__init__` for what only that can have."""
    parts = node.module.split(".") if node.module else []
    if (node.level == 2 and parts[:1] == [package]) or (
        node.level == 0 and parts[:2] == ["saecli", package]
    ):
        parts = parts[1 if node.level else 2 :]
    elif node.level != 1:
        return []
    return [
        name if name in names else "__init__"
        for name in parts[:1] or [alias.name for alias in node.names]
    ]


def test_the_modules_of_a_package_import_each_other_in_no_circle():
    for package in PACKAGE.glob("*/**/"):
        try:
            TopologicalSorter(inside(package)).prepare()
        except CycleError as error:
            pytest.fail(" -> ".join(error.args[1]))
