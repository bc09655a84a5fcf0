"""What can go wrong, as one tree.

    SaeError
    |-- ConfigError, FormatError, RunError      (ValueError)
    |-- StoreError, ModelError, HubError        (OSError)
    `-- TrainingError, MachineError, PeerError  (RuntimeError)

Each message is one sentence: what failed; expected X, got Y; what to do.
"""

from collections.abc import Iterator
from typing import Self


class SaeError(Exception):
    """Base of every error that the command line reports as one sentence and exit status 1, a `ConfigError` 2.

        ConfigError(f"--k must be at most --d-sae, {most}, got {k}; lower --k or raise --d-sae")

    Options are spelt as on the command line; in Python --d-sae is d_sae.
    """

    def within(self, before: str = "", after: str = "") -> Self:
        """The same error, with words before its sentence or after it."""
        return type(self)(
            (f"{before}: " if before else "") + str(self) + (f"; {after}" if after else "")
        )


class ConfigError(SaeError, ValueError):
    """An option or argument that cannot work."""


class StoreError(SaeError, OSError):
    """An activation store or one of its shards that is missing, damaged or of another version."""


class FormatError(SaeError, ValueError):
    """A file whose contents are not what its format demands."""


class RunError(SaeError, ValueError):
    """A training run that is missing, foreign or unfinished."""


class ModelError(SaeError, OSError):
    """A language model or a text source that cannot be loaded."""


class HubError(SaeError, OSError):
    """A repository of SAEs on the Hugging Face hub that cannot be read or written."""


class TrainingError(SaeError, RuntimeError):
    """A training run that cannot go on."""


class MachineError(SaeError, RuntimeError):
    """A machine, or what it grants this process, that has too little of something."""


class PeerError(SaeError, RuntimeError):
    """Another process of the same command that has ended, or that ends this one."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it came from, one after another."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def one_line(error: BaseException) -> str:
    """The error's message in one line of at most 300 characters, without its final stop."""
    message = " ".join(str(error).split()) or type(error).__name__
    return (message if len(message) <= 300 else f"{message[:300]}...").rstrip(".")
