"""The precision in which a descent step multiplies matrices: float32, TF32, or bfloat16 with sums in float32.

Both narrower ones round the factors of a product, to 10 and 7 bits after the leading one, and add in float32; bfloat16
rounds the product too. Weights, gradients, losses and the optimiser stay float32 throughout.

Source: Micikevicius et al., "Mixed Precision Training" (2018); Kalamkar et al., "A Study of BFLOAT16 for Deep Learning
Training" (2019).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import ConfigError

PRECISIONS = ("float32", "tf32", "bf16", "auto")


def products_in(precision: str) -> AbstractContextManager[Any]:
    """A context in which products of float32 matrices are computed in a precision, those of a backward pass
    too; sparse products stay as they are.

    tf32 is a setting of the whole process, put back at the end: other threads' products follow it meanwhile.

    Args:
        precision: float32 for as they are, tf32 or bf16.
    """
    return _Cast() if precision == "bf16" else _tf32() if precision == "tf32" else nullcontext()


@contextmanager
def _tf32() -> Iterator[None]:
    """PyTorch's own setting, by which cuBLAS rounds the factors itself and gives float32 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Cast(TorchDispatchMode):
    """Casts the factors of products to bfloat16, and the products back.

    Unlike `torch.autocast` it reaches the backward pass of our own functions, and leaves results in float32.
    """

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.mm.default:
            return _cast_product(*args)
        if func is torch.ops.aten.addmm.default and not kwargs:
            return args[0] + _cast_product(*args[1:])
        return func(*args, **(kwargs or {}))


def _cast_product(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left.bfloat16(), right.bfloat16()).to(left.dtype)


def demand_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision in which a device does not multiply, by a ConfigError."""
    if precision == "bf16" and not multiplies_bf16(device):
        raise ConfigError(f"--precision {precision} is slower than float32 here: --device {device.type} has no "
                          "bfloat16 products; use --precision float32", option="precision")
    if precision == "tf32" and not _rounds_tf32(device):
        raise ConfigError(f"--precision {precision} does nothing here: --device {device.type} multiplies float32 "
                          "matrices in float32 all the same; use --precision float32", option="precision")


def multiplies_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 matrices itself: a CPU with AVX512-BF16 or AMX, a GPU from Ampere on."""
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _rounds_tf32(device: torch.device) -> bool:
    """Whether a device rounds factors to TF32, in which 1 + 2^-12 is 1."""
    factor = torch.full((64, 64), 1 + 2.0**-12, device=device)
    with _tf32():
        return bool((factor @ factor == 64).all())
