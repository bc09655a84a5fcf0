"""TensorBoard's event files: the scalars of `metrics.jsonl` once more, in RUN/tensorboard."""

import importlib.util
from pathlib import Path
from typing import Any

from ..errors import ConfigError

EVENTS = "tensorboard"  # folder of a run


def check_tensorboard() -> None:
    """Refuse to write event files where what writes them is not installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("tensorboard", "needs the package tensorboard, which is not installed",
                          "install it with `pip install 'saecli[tensorboard]'`, or leave {tensorboard} out: "
                          "metrics.jsonl holds the same figures")


class EventFiles:
    """Appends to a run's event files.

    Args:
        folder: the run folder.
        up_to_step: events of later steps, left by a run that was stopped, are void: TensorBoard leaves them out.
    """

    def __init__(self, folder: Path, up_to_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import, and an extra

        self._writer = SummaryWriter(str(folder / EVENTS), purge_step=up_to_step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """Append the figures of a line of `metrics.jsonl`, each under its own name, at the line's step."""
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()  # at once: what a checkpoint goes on from must not be lost with the process

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
