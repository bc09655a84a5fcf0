"""Finding a language model without loading its weights."""

import re
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers import __version__ as transformers_version

from ..base.errors import ConfigError, ModelError
from ..base.machine import why_refused, why_unreachable
from .options import BUNDLED, MODEL_DTYPES, TINY_GEMMA2

# What the library raises for damaged or foreign files; older versions of the hub's client lack the last.
UNLOADABLE: tuple[type[Exception], ...] = (
    AttributeError,
    ImportError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    SafetensorError,
    UnpicklingError,
    *([hub_errors.StrictDataclassError] if hasattr(hub_errors, "StrictDataclassError") else []),
)
DTYPE_WORD = (
    "dtype" if tuple(map(int, transformers_version.split(".")[:2])) >= (4, 56) else "torch_dtype"
)
OFFLINE_ADVICE = (
    f"or use --model {TINY_GEMMA2}, which is bundled, or the folder of a downloaded model"
)


@dataclass(frozen=True)
class ModelSource:
    """A model that is bundled, in a local folder, or on the Hugging Face hub."""

    name: str  # as the user gave it
    location: str  # argument of `from_pretrained`
    revision: str | None  # the hub commit; None for folders
    config: Any  # transformers'

    @property
    def layers(self) -> int:
        return self.config.get_text_config().num_hidden_layers

    @property
    def d_model(self) -> int:
        return self.config.get_text_config().hidden_size

    @property
    def positions(self) -> int | None:
        """`max_position_embeddings`, the longest window in tokens; None if there is none."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    def default_layer(self) -> int:
        """The middle block: 12 of Gemma-2-2B's 26."""
        return (self.layers - 1) // 2

    def dtype_on(self, device: torch.device, wanted: str = "auto") -> str:
        """The precision of a forward pass; `auto` is float32 on a CPU, where half precision is slow and rarely native,
        elsewhere the checkpoint's own, or float32 if that is none of `MODEL_DTYPES`."""
        if wanted != "auto":
            return wanted
        named = next(
            (
                str(found).removeprefix("torch.")
                for config in (self.config.get_text_config(), self.config)
                if (found := getattr(config, DTYPE_WORD, None)) is not None
            ),
            None,
        )
        return named if device.type != "cpu" and named in MODEL_DTYPES else "float32"

    def check_context(self, context: int) -> None:
        if self.positions is not None and context > self.positions:
            raise ConfigError(
                f"{self.name} takes windows of at most {self.positions:,} tokens, got --context "
                f"{context:,}; lower it"
            )

    def identity(self) -> dict[str, Any]:
        """The part of a request's hash for the weights: the revision, or sizes and times of a folder's files."""
        if self.name in BUNDLED or self.revision:
            return {"model": self.name, "revision": self.revision}
        files = sorted(path for path in Path(self.location).iterdir() if path.is_file())
        stamps = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
        return {"model": str(Path(self.location).resolve()), "revision": None, "files": stamps}


def find_model(name: str) -> ModelSource:
    """The model of a bundled model's name, a folder, or a hub id; ModelError if it is missing or gated, or the hub
    cannot be reached."""
    if not name.strip():  # the path of an empty name is the working directory
        raise ConfigError(
            f"--model is empty; give a folder, a hub id such as google/gemma-2-2b, or {TINY_GEMMA2}"
        )
    if name.rstrip("/") in BUNDLED:  # as a shell completes the name of a folder
        name = name.rstrip("/")
    local = name in BUNDLED or Path(name).is_dir()
    try:
        if not local:
            validate_repo_id(name)
    except hub_errors.HFValidationError as error:
        raise ModelError(
            f"no model {name!r}: give a folder, a hub id such as google/gemma-2-2b, or "
            f"{TINY_GEMMA2}"
        ) from error
    location = str(BUNDLED.get(name, name))
    offline = None if local else why_unreachable()
    if offline and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise ModelError(
            f"{name} is not on this machine and the Hugging Face hub cannot be reached ({offline}): "
            f"connect to the network (a gated model also wants its licence accepted at "
            f"https://huggingface.co/{name}, and `hf auth login`), {OFFLINE_ADVICE}"
        )
    try:
        # If trust_remote_code is not given, the library asks on stdout whether to run a model's Python code.
        config = AutoConfig.from_pretrained(
            location, local_files_only=local or offline is not None, trust_remote_code=False
        )
    except UNLOADABLE as error:
        raise explained(name, error) from error
    if not getattr(config.get_text_config(), "num_hidden_layers", None):
        raise ModelError(
            f"{name} has no num_hidden_layers in its configuration, and so no layers to read from; use "
            f"another model"
        )
    return ModelSource(
        name, location, None if local else getattr(config, "_commit_hash", None), config
    )


def explained(name: str, error: BaseException) -> ModelError:
    """Why a model could not be loaded, and what to do."""
    if "trust_remote_code" in str(error):
        return ModelError(
            f"{name} comes with Python code of its own, and this tool runs no code from a model's "
            f"folder; use a model whose architecture transformers has"
        )
    if isinstance(
        error, UnpicklingError
    ):  # the library's message says how to run the file's code all the same
        return ModelError(
            f"cannot load the model {name}: its weights are a pickle that is damaged or holds code; use "
            f"a model with model.safetensors"
        )
    if "backend tokenizer" in str(error):
        return no_tokenizer(name)
    cause: BaseException | None = error
    while cause is not None:
        if reason := why_refused(name, cause):
            return ModelError(f"{reason}, {OFFLINE_ADVICE}")
        cause = cause.__cause__ or cause.__context__
    said = re.sub(
        r":\s*\n\s*", ": ", str(error).strip()
    )  # a line that ends in a colon says nothing alone
    reason = (said.splitlines() or [type(error).__name__])[0].rstrip(".")
    return ModelError(
        f"cannot load the model {name}: {reason}; give the files of a Hugging Face causal language "
        f"model"
    )


def no_tokenizer(name: str) -> ModelError:
    return ModelError(
        f"cannot load the tokenizer of {name}: it has no readable tokenizer.json or the like next to the "
        f"weights; save the tokenizer there too"
    )
