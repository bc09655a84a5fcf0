"""The devices that torch computes on."""

import torch

from .distributed import processes
from .errors import ConfigError
from .launch import local_world


def device_named(name: str) -> torch.device:
    """The device that `--device` asks for.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda:") and processes() > 1 and local_world() > 1:
        raise ConfigError(f"--device {name} gives one GPU to all {local_world()} processes of this machine: expected "
                          f"one each; use --device cuda, which does, or cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device)  # sums are float64, which not every device has
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"--device {name} cannot be used: {reason}; use cpu, cuda or auto") from error
    return device
