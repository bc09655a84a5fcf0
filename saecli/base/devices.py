"""Torch devices, and the precision in which they multiply float32 matrices: float32 or bfloat16.

bfloat16 rounds factors and product to 7 bits after the leading one, and adds in float32; all else stays float32.

Source: Micikevicius et al., "Mixed Precision Training" (2018).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ClassVar, ParamSpec, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import ConfigError, one_line
from .machine import available_memory
from .processes import local_world

P = ParamSpec("P")
R = TypeVar("R")
AHEAD = 2  # batches on their way to a device


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """The function in its operands' own dtype."""
    return torch.autocast("cuda", enabled=False)(torch.autocast("cpu", enabled=False)(function))


def as_usual(function: Callable[P, R]) -> Callable[P, R]:
    """The function with torch's settings as it starts, whatever the caller has set; autocast's copies of weights would
    go stale as these are trained."""
    plain = without_autocast(function)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        dtype, device = torch.get_default_dtype(), torch.get_default_device()
        on_cpu = nullcontext() if device.type == "cpu" else torch.device("cpu")
        with torch.inference_mode(False), torch.enable_grad(), on_cpu:
            torch.set_default_dtype(torch.float32)
            try:
                return plain(*args, **kwargs)
            finally:
                torch.set_default_dtype(dtype)

    return called


def device_named(name: str) -> torch.device:
    """The device for a value of `--device`; ConfigError if there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    processes = local_world()
    each_has_one = name == "cuda" and torch.cuda.device_count() >= processes
    if name.startswith("cuda") and processes > 1 and not each_has_one:
        raise ConfigError(
            f"--device {name} has no GPU for each of the {processes} processes of this machine: use --device cuda "
            "with a process per GPU, or --device cpu"
        )
    try:
        device = torch.device(name)
    except RuntimeError:  # its message lists every kind of device that torch has had
        raise ConfigError(f"--device must be cpu, cuda, cuda:N or auto, got {name!r}") from None
    try:
        # Sums are float64, which not every device has.
        torch.zeros(1, dtype=torch.float64, device=device).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"--device {name} cannot be used here: {one_line(error)}; use cpu or auto"
        ) from error
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # else pinned memory makes a context on GPU 0 too
    return device


def free_memory(device: torch.device, processes: int = 1) -> int:
    """Bytes that are free on a GPU, or of the machine's memory for each process."""
    if device.type != "cuda":
        return available_memory() // processes
    # What torch has reserved and not allocated is used again.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    # Copies from pageable memory would block.
    return tensor.pin_memory().to(device, non_blocking=True)


def add_at(sums: Tensor, places: Tensor, values: Tensor) -> None:
    """`sums[places] += values` for sums (F,), places and values (n,), with repeated places, in deterministic order."""
    if sums.device.type == "cpu":
        sums.scatter_add_(0, places, values)
    else:  # sorts on CUDA; on a CPU its threads race
        sums.index_put_((places,), values, accumulate=True)


def batches_on(batches: Iterable[np.ndarray | Tensor], device: torch.device) -> Iterator[Tensor]:
    """Batches, (B, D), on a device, in their own dtype; uint16 holds the bits of bfloat16. To CUDA a stream copies them
    from pinned memory, `AHEAD` batches early."""
    if device.type != "cuda":
        yield from (moved(_tensor(batch), device) for batch in batches)
        return
    stream = torch.cuda.Stream(device)
    under_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()
    for batch in batches:
        with torch.cuda.stream(stream):
            under_way.append((moved(_tensor(batch), device), stream.record_event()))
        if len(under_way) > AHEAD:
            yield _arrived(*under_way.popleft())
    yield from (_arrived(*pair) for pair in under_way)


def _tensor(batch: np.ndarray | Tensor) -> Tensor:
    tensor = torch.as_tensor(batch)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def _arrived(tensor: Tensor, copied: "torch.cuda.Event") -> Tensor:
    stream = torch.cuda.current_stream(tensor.device)
    stream.wait_event(copied)
    tensor.record_stream(stream)  # its memory is not reused before this stream is done with it
    return tensor


def products_in(precision: str) -> AbstractContextManager[Any]:
    return _Cast() if precision == "bf16" else nullcontext()


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which matrices of a dtype are multiplied here."""
    return torch.bfloat16 if _Cast.depth else dtype


class _Cast(TorchDispatchMode):
    """Casts factors of products to bfloat16, and products back, in backward passes too."""

    depth: ClassVar[int] = 0

    def __enter__(self) -> Self:
        _Cast.depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _Cast.depth -= 1
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.mm.default:
            return _cast_product(*args)
        if func is torch.ops.aten.addmm.default and not kwargs:
            return args[0] + _cast_product(*args[1:])
        return func(*args, **(kwargs or {}))


def _cast_product(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left.bfloat16(), right.bfloat16()).to(left.dtype)


def demand_precision(precision: str, device: torch.device) -> None:
    if precision == "bf16" and not multiplies_bf16(device):
        raise ConfigError(
            f"--precision {precision} is slower than float32 here: --device {device.type} has no "
            "bfloat16 products; use --precision float32"
        )


def multiplies_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 matrices itself: a CPU with AVX512-BF16 or AMX, a GPU from Ampere on."""
    if device.type == "cpu":
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
