"""The precision in which a descent step multiplies matrices: float32, TF32, or bfloat16 with sums in float32.

Both narrower ones round the factors of a product, to 10 and 7 bits after the leading one, and add in float32; weights,
gradients, losses and the optimiser stay float32 throughout. Whether a device rounds, and whether that is faster, is
found out by multiplying.

Source: Micikevicius et al., "Mixed Precision Training" (2018); Kalamkar et al., "A Study of BFLOAT16 for Deep Learning
Training" (2019).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import ConfigError
from .torchrun import world

PRECISIONS = ("float32", "tf32", "bf16", "auto")
WORTH = 1.3  # times as fast as float32, from which on `auto` takes bf16
LARGEST = (512, 1024, 2048)  # rows, d_in and latents of the product that is timed, at most: some 2 Gflop
ROUNDS = 5  # of both products in turn, of which the least time counts


def products_in(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """A context in which products of float32 matrices on a device are computed in a precision, those of a backward pass
    too; sparse products stay as they are.

    On a CPU, and for TF32, it is a setting of the whole process, put back at the end: other threads' products follow it
    meanwhile.

    Args:
        precision: float32 for as they are, tf32 or bf16.
        device: of the matrices.
    """
    return _set(precision) if shared_by_threads(precision, device) else _Cast()


def shared_by_threads(precision: str, device: torch.device) -> bool:
    """Whether a precision on a device is a setting of the whole process."""
    return precision != "bf16" or device.type == "cpu"


@contextmanager
def _set(precision: str) -> Iterator[None]:
    """PyTorch's own setting, by which oneDNN and cuBLAS round the factors themselves and give float32 products."""
    if precision == "float32":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if precision == "bf16" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Cast(TorchDispatchMode):
    """Casts the factors of products to bfloat16, and the products back, where the device's library does not itself.

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
    if precision != "float32" and not rounds(precision, device):
        raise ConfigError("precision", "{given} does nothing here: {device} {type} multiplies float32 matrices in "
                                       "float32 all the same", "use {precision} float32", given=precision,
                          type=device.type)


def rounds(precision: str, device: torch.device) -> bool:
    """Whether a device rounds factors in a precision: 1 + 2^-12 becomes 1 in TF32 and in bfloat16."""
    factor = torch.full((64, 64), 1 + 2.0**-12, device=device)
    with products_in(precision, device):
        return bool((factor @ factor == 64).all())


def chosen_precision(device: torch.device, rows: int, d_in: int, d_sae: int) -> str:
    """bf16 where a device multiplies a batch by the encoder at least `WORTH` times as fast in it, else float32.

    The measurement takes a fraction of a second, and is made once per process for a device and shape, so that runs
    trained together agree.

    Args:
        device: of the training.
        rows: B, of a batch.
        d_in: D.
        d_sae: F.

    Raises:
        ConfigError: there are several processes, which would each find another.
    """
    if world() > 1:
        raise ConfigError("precision", "auto cannot be used by several processes, which would each measure for "
                                       "themselves", "name the precision, such as {precision} bf16")
    shape = [min(size, largest) for size, largest in zip((rows, d_in, d_sae), LARGEST, strict=True)]
    return "bf16" if rounds("bf16", device) and _speed_up(device, *shape) >= WORTH else "float32"


@cache
def _speed_up(device: torch.device, rows: int, d_in: int, d_sae: int) -> float:
    """How many times as fast the product of matrices (rows, d_in) and (d_in, d_sae) is in bf16 as in float32."""
    x, W = torch.ones(rows, d_in, device=device), torch.ones(d_sae, d_in, device=device).T
    taken: dict[str, list[float]] = {"float32": [], "bf16": []}
    for _ in range(ROUNDS + 1):
        for precision, seconds in taken.items():
            began = time.perf_counter()
            with products_in(precision, device):
                (x @ W)[0, 0].item()  # waits for the device
            seconds.append(time.perf_counter() - began)
    return min(taken["float32"][1:]) / min(taken["bf16"][1:])
