"""The private names of libraries that saecli reads are listed here, with the version in which they were seen, and do
there what saecli takes them for."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import modeling_utils

from saecli.base.devices import _Cast

PACKAGE = Path(__file__).parents[1] / "saecli"
SEEN = {
    "torch.utils._python_dispatch": "torch 2.13.0",  # of TorchDispatchMode, which its documentation names
    "_is_avx512_bf16_supported": "torch 2.13.0; torch.cpu.get_capabilities, which is public, is not in 2.6",
    "_is_amx_tile_supported": "torch 2.13.0",
    "_indices": "torch 2.13.0; indices() sorts a gradient first",
    "_values": "torch 2.13.0",
    "_getframe": "Python 3.11",
    "_exit": "Python's documentation has it",
    "_replace": "Python's documentation has it",
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names() -> Iterator[tuple[str, Path]]:
    """Private attributes of what is not of the file, and private modules and names that are imported."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = {
            getattr(node, "name", None) or getattr(node, "attr", None)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
        }
        for node in ast.walk(tree):
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
    with _Cast():
        (left @ right).sum().backward()
    expected = (torch.ones(3, 2).bfloat16() @ right.T.bfloat16()).float()
    torch.testing.assert_close(left.grad, expected, rtol=0, atol=0)


def test_a_sparse_gradient_keeps_the_order_of_its_values():
    indices, values = torch.tensor([[1, 0, 1], [2, 0, 2]]), torch.tensor([1.0, 2.0, 3.0])
    gradient = torch.sparse_coo_tensor(indices, values, (2, 3), check_invariants=False)
    assert gradient._indices().tolist() == indices.tolist()
    assert gradient._values().tolist() == values.tolist()


def test_transformers_opens_checkpoints_by_a_name_that_can_be_replaced():
    """Where this fails, `language_model._unmapped` does nothing, and loading a model takes more resident memory."""
    assert vars(modeling_utils)["safe_open"] is safe_open
