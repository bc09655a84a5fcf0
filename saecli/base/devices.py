"""Torch devices."""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from .errors import ConfigError, one_line
from .memory import available_memory
from .torchrun import local_world, world

AHEAD = 2  # batches on their way to a device

def device_named(name: str) -> torch.device:
    """The device for a value of `--device`; ConfigError if there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda:") and world() > 1 and local_world() > 1:
        raise ConfigError(f"--device {name} gives one GPU to all {local_world()} processes of this machine: expected "
                          "one each; use --device cuda, which does, or cpu", option="device")
    try:
        device = torch.device(name)
    except RuntimeError:  # its message lists every kind of device that torch has had
        raise ConfigError(f"--device must be cpu, cuda, cuda:N or auto, got {name!r}", option="device") from None
    try:
        torch.zeros(1, dtype=torch.float64, device=device).item()  # sums are float64, which not every device has
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(f"--device {name} cannot be used here: {one_line(error)}; use cpu, cuda or auto",
                          option="device") from error
    return device


def free_memory(device: torch.device, processes: int = 1) -> int:
    """Bytes that are free on a device, of the machine's own memory for each of its processes."""
    if device.type != "cuda":
        return available_memory() // processes
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, to be used again
    return torch.cuda.mem_get_info(device)[0] + cached


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; from a CPU it is copied without blocking, and its memory can be reused. Where it is there
    already, the tensor itself."""
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # copies from pageable memory would block


def add_at(sums: Tensor, places: Tensor, values: Tensor) -> None:
    """Add each value at its place of a vector, several to one perhaps, in an order that is the same on every run.

    Args:
        sums: changed in place, (F,).
        places: indices into it, (n,).
        values: in the vector's dtype, (n,).
    """
    if sums.device.type == "cpu":
        sums.scatter_add_(0, places, values)
    else:
        sums.index_put_((places,), values, accumulate=True)  # which sorts on CUDA; on a CPU its threads race


def carried(batches: Iterable[np.ndarray | Tensor], device: torch.device) -> Iterator[Tensor]:
    """Copies of batches, (B, D), on a device, in order and in their own dtype; uint16 holds the bits of bfloat16. For a
    CPU, the batches themselves.

    On CUDA they go through a stream of their own, from pinned memory that torch uses in turn, `AHEAD` batches before
    they are asked for: a copy and the steps before it then overlap.
    """
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
    """A tensor that another stream copies, for use by the current one."""
    stream = torch.cuda.current_stream(tensor.device)
    stream.wait_event(copied)
    tensor.record_stream(stream)  # its memory is not reused before this stream is done with it
    return tensor
