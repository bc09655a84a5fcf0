"""The house's plan, read from the imports: rooms, who alone may import what, and the size of files."""

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "saecli"

ROOMS = ["cli", "show", "geometry", "measure", "train", "extract", "sae", "store", "base"]  # from the top down
ALONE = {"transformers": "extract", "matplotlib": "show", "datasets": "extract", "pydantic": "base", "typer": "cli"}
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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_rooms_below_its_own(path: Path):
    for name in imported_units(path) & {*ROOMS} - {unit(path)}:
        assert unit(path) not in ROOMS or ROOMS.index(name) > ROOMS.index(unit(path)), f"{path} imports {name}"


def test_the_top_of_the_package_is_nine_rooms_and_two_files():
    names = {path.name for path in PACKAGE.iterdir()} - {"__pycache__", "assets", "py.typed"}
    assert names == {*ROOMS, "__init__.py", "__main__.py"}


@pytest.mark.slow
@pytest.mark.parametrize("library", ALONE)
def test_a_heavy_library_has_one_door(library: str):
    users = {unit(path) for path in MODULES
             if any(level == 0 and parts[0] == library for level, parts in imports(path))}
    assert users == {ALONE[library]}


def test_no_file_is_over_400_lines():
    files = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert [str(path) for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []


def circle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Modules each of which imports the next, and the last the first; none where imports make no circle."""
    done: set[str] = set()

    def through(name: str, way: list[str]) -> list[str]:
        if name in way:
            return way[way.index(name):]
        if name in done:
            return []
        found = next(filter(None, (through(other, [*way, name]) for other in sorted(graph.get(name, ())))), [])
        done.add(name)
        return found

    return next(filter(None, (through(name, []) for name in sorted(graph))), [])


def inside(package: Path) -> dict[str, set[str]]:
    """The modules of a package, its `__init__` among them, and which of each other they import: as they are loaded,
    later, or for types alone."""
    names = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/__init__.py")}
    graph = {}
    for path in package.glob("*.py"):
        found = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                 if isinstance(node, ast.ImportFrom)]
        graph[path.stem] = {name for node in found for name in siblings(node, package.name, names)} - {path.stem}
    return graph


def siblings(node: ast.ImportFrom, package: str, names: Collection[str]) -> list[str]:
    """The modules of its own package that an import is from; `__init__` for what only that can have."""
    parts = node.module.split(".") if node.module else []
    if (node.level == 2 and parts[:1] == [package]) or (node.level == 0 and parts[:2] == ["saecli", package]):
        parts = parts[1 if node.level else 2:]
    elif node.level != 1:
        return []
    return [name if name in names else "__init__" for name in parts[:1] or [alias.name for alias in node.names]]


PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_the_modules_of_a_package_import_each_other_in_no_circle(package: Path):
    found = circle(inside(package))
    assert not found, " -> ".join([*found, found[0]])


def test_a_planted_circle_is_seen(tmp_path: Path):
    package = tmp_path / "planted"
    package.mkdir()
    modules = {"__init__": "from .a import one", "a": "def later():\n    from .b import two", "b": "from . import c",
               "c": "import saecli\nfrom saecli.planted.d import four", "d": "from ..other.a import five"}
    planted = {"d": "from .b import two", "c": "from . import one",
               "b": "if TYPE_CHECKING:\n    from ..planted import a"}

    def found() -> list[str]:
        return circle(inside(package))

    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    assert found() == []
    for name, expected in (("d", ["b", "c", "d"]), ("c", ["__init__", "a", "b", "c"]), ("b", ["a", "b"])):
        (package / f"{name}.py").write_text(planted[name])
        assert found() == expected
        (package / f"{name}.py").write_text(modules[name])
    assert circle({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []
