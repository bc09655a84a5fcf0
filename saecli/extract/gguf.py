"""Language models in a GGUF file, whose packed weights transformers' own reader makes dense."""

import io
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers

from ..base.errors import ModelError

SUFFIX = ".gguf"
# Tensors of models with scaled rotary embeddings (Llama 3.1, Phi 3.5) that the reader has no place for.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# More than the metadata and names of tensors; Gemma 3's 262,144 tokens take 10 MB.
HEAD_BYTES = 1 << 26
PREFIX = "sae-gguf-"  # of a temporary folder's name
PACKAGES = ("gguf", "accelerate")  # which the reader imports
# What the reader raises for damaged files, besides what transformers raises for those of a folder.
DAMAGE: tuple[type[Exception], ...] = (ArithmeticError, LookupError, MemoryError, struct.error)


def named_file(name: str) -> Path | None:
    """The file, if a model's name is that of a GGUF file."""
    path = Path(name)
    if path.suffix.lower() != SUFFIX or path.is_dir():
        return None
    if not path.is_file():
        raise ModelError(f"there is no file {name}; give the path of a GGUF file, or a hub id")
    return path


def demand_packages(name: str) -> None:
    lacking = [package for package in PACKAGES if find_spec(package) is None]
    if not hasattr(
        transformers, "GgufConfig"
    ):  # earlier versions read blocks without their weights
        lacking.append("transformers>=5.24")
    if lacking:
        raise ModelError(
            f"cannot read {name}: GGUF files need the package {' and '.join(lacking)}, which is not "
            f"installed; run `pip install 'saecli[gguf]'`"
        )


def notes_on(path: Path) -> tuple[str, ...]:
    """What the reader does to a model."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    notes = [f"{path.name}: its packed weights are made dense, as transformers reads them"]
    if scaled := [name for name in ROPE_FACTORS if name.encode() in head]:
        notes.append(
            f"{path.name}: transformers leaves out {' and '.join(scaled)}, the factors of its rotary "
            f"embedding, so rows differ from the model's; its folder from the hub has them"
        )
    return tuple(notes)


@contextmanager
def place_of(location: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """While open, the first argument of `from_pretrained` and those by name. A GGUF file gets a folder of its own: from
    the files next to it transformers would take another model's tokenizer."""
    path = named_file(location)
    if path is None:
        yield location, {}
        return
    # The reader draws progress bars that no setting of transformers hides.
    with TemporaryDirectory(prefix=PREFIX) as folder, redirect_stderr(io.StringIO()):
        Path(folder, path.name).symlink_to(path.resolve())
        yield folder, {"gguf_file": path.name}


def without_folder(message: str) -> str:
    """A message without the path of the folder of `place_of`."""
    return re.sub(rf"[^\s'\"]*{PREFIX}[^/]*/", "", message)


def dense() -> dict[str, Any]:
    """Arguments of `from_pretrained` that make all weights dense."""
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}
