"""Torch devices."""

import torch
from torch import Tensor

from .errors import ConfigError, one_line
from .memory import available_memory
from .torchrun import local_world, world


def device_named(name: str) -> torch.device:
    """The device for a value of `--device`; ConfigError if there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda:") and world() > 1 and local_world() > 1:
        raise ConfigError("device", "{given} gives one GPU to all {processes} processes of this machine: expected one "
                                    "each", "use {device} cuda, which does, or cpu", given=name,
                          processes=local_world())
    try:
        device = torch.device(name)
    except RuntimeError:  # its message lists every kind of device that torch has had
        raise ConfigError("device", "must be cpu, cuda, cuda:N or auto, got {given}", given=repr(name)) from None
    try:
        torch.zeros(1, dtype=torch.float64, device=device).item()  # sums are float64, which not every device has
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError("device", "{given} cannot be used here: {reason}", "use cpu, cuda or auto", given=name,
                          reason=one_line(error)) from error
    return device


def free_memory(device: torch.device, processes: int = 1) -> int:
    """Bytes that are free on a device, of the machine's own memory for each of its processes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory() // processes


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device without blocking; its memory can then be reused. For a CPU, the tensor itself.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # copies from pageable memory would block
