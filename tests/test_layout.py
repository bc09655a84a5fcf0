"""The house's plan, read from the imports: floors, who alone may import what, and the size of files."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "saecli"

FLOORS = [
    {"assets", "errors", "network", "torchrun", "wording"},
    {"interrupts"},
    {"files", "memory", "tables"},
    {"documents"},
    {"config", "console", "distributed", "home"},
    {"products"},
    {"activations", "arrays", "devices", "language_model", "ridge", "store", "texts"},
    {"harvest", "inventory", "sae"},
    {"formats", "metrics", "spline"},
    {"hub"},
    {"latent_survey", "plots", "solvers", "splice", "subjects"},
    {"training"},
    {"evaluation"},
    {"html_report", "publishing", "spline_measures"},
    {"api", "commands", "root_help"},
    {"cli"},
    {"__init__", "__main__"},
]
ALONE = {"transformers": "language_model", "matplotlib": "plots", "datasets": "texts", "pydantic": "documents",
         "typer": ("commands", "cli", "root_help")}
MODULES = sorted(PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    """The module or package directly below saecli that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each import's level (0: absolute) and the dotted parts of what is imported from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            yield from ((node.level, parts or [alias.name]) for alias in (node.names if not parts else node.names[:1]))


def imported_units(path: Path) -> set[str]:
    depth = len(path.relative_to(PACKAGE).parts)
    found = {parts[0] for level, parts in imports(path) if level == depth}
    return found | {parts[1] for level, parts in imports(path) if level == 0 and parts[0] == "saecli" and parts[1:]}


def floor_of(name: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if name in names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_floors_below_its_own(path: Path):
    for name in imported_units(path) - {unit(path), "__version__"}:
        assert floor_of(name) < floor_of(unit(path)), f"{path} imports {name}"


@pytest.mark.parametrize("library", ALONE)
def test_a_heavy_library_has_one_door(library: str):
    users = {unit(path) for path in MODULES
             if any(level == 0 and parts[0] == library for level, parts in imports(path))}
    assert users <= set([ALONE[library]] if isinstance(ALONE[library], str) else ALONE[library])


def test_store_and_solvers_never_see_each_other():
    for path in MODULES:
        if unit(path) in ("solvers", "ridge", "sae", "spline", "metrics"):
            assert "store" not in imported_units(path), path
        if unit(path) in ("console", "home") or path.name in ("list.py", "listing.py"):
            assert all(parts[0] != "torch" for _, parts in imports(path)), path
        if unit(path) == "store":  # which lists stores without it, and reads rows with it
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert not [node for node in tree.body if "torch" in ast.unparse(node).split()[:2]], path


def test_no_file_is_over_400_lines():
    files = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert [str(path) for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []
