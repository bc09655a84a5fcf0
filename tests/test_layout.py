"""The rooms and what each may import; sizes of files; private names of libraries, by the version they were seen in."""

import ast
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import modeling_utils

from saecli.base.devices import products_in

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "saecli"

# From the top down.
ROOMS = "cli show geometry derive measure train splice extract model sae store base".split()
DOORS = {
    "transformers": {"model", "splice"},
    "matplotlib": {"show"},
    "datasets": {"extract"},
    "pydantic": {"base"},
    "typer": {"cli"},
    "rich": {"base", "show", "cli"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(path for folder in ("examples", "tests") for path in (ROOT / folder).rglob("*.py"))


def unit(path: Path) -> str:
    """The module or package directly below saecli that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def walked(path: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


@cache
def nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a file, wherever they stand in it."""
    return [node for node in walked(path) if isinstance(node, ast.Import | ast.ImportFrom)]


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


def test_what_scripts_import_of_the_package_is_there():
    """Of scripts, too, that need a library of their own and that no default test runs."""
    for script in SCRIPTS:
        for node in nodes(script):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("saecli"):
                exec(ast.unparse(node), {})


def test_the_top_of_the_package_is_its_rooms_a_readme_and_two_files():
    names = {path.name for path in PACKAGE.iterdir()} - {"__pycache__", "assets", "py.typed"}
    assert names == {*ROOMS, "README.md", "__init__.py", "__main__.py"}


@pytest.mark.parametrize("library", DOORS)
def test_a_heavy_library_is_imported_by_its_rooms_alone(library: str):
    users = {
        unit(path)
        for path in MODULES
        if any(level == 0 and parts[0] == library for level, parts in imports(path))
    }
    assert users <= DOORS[library]


def test_no_formatted_file_has_over_500_lines():
    files = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    lengths = {str(path): path.read_text(encoding="utf-8").count("\n") for path in files}
    assert [path for path, length in lengths.items() if length > 500] == []


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


SEEN = {
    "torch.utils._python_dispatch": "torch 2.13.0",  # of TorchDispatchMode, which its documentation names
    "_is_avx512_bf16_supported": "torch 2.13.0; torch.cpu.get_capabilities, which is public, is not in 2.6",
    "_is_amx_tile_supported": "torch 2.13.0",
    "_indices": "torch 2.13.0; indices() sorts a gradient first",
    "_values": "torch 2.13.0",
    "_forward_hooks": "torch 2.13.0, and since 0.1; nothing public says whether a module has hooks",
    "_forward_pre_hooks": "torch 2.13.0, and since 0.2",
    "_exit": "Python's documentation has it",
    "_replace": "Python's documentation has it",
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names() -> Iterator[tuple[str, Path]]:
    """Private attributes of what is not of the file, and private modules and names that are imported."""
    for path in MODULES:
        own = {
            getattr(node, "name", None) or getattr(node, "attr", None)
            for node in walked(path)
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
        }
        for node in walked(path):
            if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
                if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                    yield node.attr, path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                module = node.module or ""
                if any(map(private, module.split("."))):
                    yield module, path
                yield from ((alias.name, path) for alias in node.names if private(alias.name))


def test_every_private_name_of_a_library_is_listed():
    used = {name for name, _ in names()}
    assert used == SEEN.keys(), [(name, path) for name, path in names() if name not in SEEN]


def test_the_processor_says_whether_it_multiplies_bfloat16():
    known = {
        name
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("flags")
        for name in line.split()
    }
    if not known:
        pytest.skip("only Linux on x86 lists its instructions there")
    assert torch.cpu._is_avx512_bf16_supported() == ("avx512_bf16" in known)
    assert torch.cpu._is_amx_tile_supported() == ("amx_tile" in known)


def test_a_dispatch_mode_sees_the_products_of_a_backward_pass():
    left, right = torch.randn(3, 5, requires_grad=True), torch.randn(5, 2)
    with products_in("bf16"):
        (left @ right).sum().backward()
    expected = (torch.ones(3, 2).bfloat16() @ right.T.bfloat16()).float()
    torch.testing.assert_close(left.grad, expected, rtol=0, atol=0)


def test_a_sparse_gradient_keeps_the_order_of_its_values():
    indices, values = torch.tensor([[1, 0, 1], [2, 0, 2]]), torch.tensor([1.0, 2.0, 3.0])
    with torch.sparse.check_sparse_tensor_invariants(False):
        gradient = torch.sparse_coo_tensor(indices, values, (2, 3))
    assert gradient._indices().tolist() == indices.tolist()
    assert gradient._values().tolist() == values.tolist()


def test_transformers_opens_checkpoints_by_a_name_that_can_be_replaced():
    """Where this fails, `language_model._unmapped` does nothing, and loading a model takes more resident memory."""
    assert vars(modeling_utils)["safe_open"] is safe_open
