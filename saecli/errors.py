"""What can go wrong, as one tree.

    SaeError
    |-- ConfigError   (ValueError)   an option or argument that cannot work
    |-- StoreError    (OSError)      an activation store or one of its shards
    |-- FormatError   (ValueError)   a file in a format that cannot be read or written
    |-- RunError      (ValueError)   a training run that is missing, foreign or unfinished
    |-- ModelError    (OSError)      a language model or text that cannot be loaded
    |-- HubError      (OSError)      a repository of SAEs on the Hugging Face hub that cannot be read or written
    |-- TrainingError (RuntimeError) a training run that cannot go on
    |-- MachineError  (RuntimeError) a machine that has too little of something
    `-- PeerError     (RuntimeError) another process of the same command that has ended

Each message is one sentence: what failed; expected X, got Y; what to do.
"""


class SaeError(Exception):
    """Base of every error that the command line reports as one sentence and exit status 1."""


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


def one_line(error: BaseException) -> str:
    """The error's message in one line, without its final stop, cut where it becomes a page."""
    message = " ".join(str(error).split()) or type(error).__name__
    return (message if len(message) <= 300 else f"{message[:300]}...").rstrip(".")
