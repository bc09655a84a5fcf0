"""The devices that torch computes on."""

import torch

from .errors import ConfigError


def device_named(name: str) -> torch.device:
    """The device that `--device` asks for.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device)  # sums are float64, which not every device has
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"--device {name} cannot be used: {reason}; use cpu, cuda or auto") from error
    return device
