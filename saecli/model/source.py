"""Where a language model is: bundled, in a folder, in a GGUF file, on the hub, or loaded by the user; loads no weights.

transformers' own reader makes a GGUF file's packed weights dense.
"""

import io
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.constants import HF_HOME
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
    find_adapter_config_file,
)

from ..base.devices import multiplies_bf16
from ..base.errors import ConfigError, ModelError, causes, one_line
from ..base.files import appearing_whole, file_sha256
from ..base.machine import why_refused, why_unreachable
from ..sae.dictionary import name_of
from ..store.origin import ModelName
from ..store.schema import hash_request
from . import BUNDLED, MODEL_DTYPES, TINY_GEMMA2

GGUF = ".gguf"
# Files in a model's folder that neither its weights nor its tokenizer are read from.
UNREAD = re.compile(r"^\.|\.(md|py|h5|msgpack|onnx|ot|pt|pth|gguf)$")
LARGE = 1 << 24  # bytes
NO_CONVERSION = "DISABLE_SAFETENSORS_CONVERSION"
WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
# Of transformers: 5.17 takes other weights for Gemma 3, 5.22 leaves out BOS, with no word of it.
READS_GGUF = (5, 23)
# Types of models whose first token has the position after the padding token's id.
AFTER_PADDING = r"(xlm-)?roberta(-prelayernorm|-xl)?|camembert|data2vec-text|esm|ibert|longformer|luke|mpnet|xmod"
# Tensors of models with scaled rotary embeddings (Llama 3.1, Phi 3.5) that the reader has no place for.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# More than the metadata and names of tensors; Gemma 3's 262,144 tokens take 10 MB.
HEAD_BYTES = 1 << 26
OFFLINE_ADVICE = (
    f"or use --model {TINY_GEMMA2}, which is bundled, or the folder of a downloaded model"
)


@dataclass(frozen=True)
class ModelSource:
    name: str  # as the user gave it, without a revision
    location: str  # a folder or file, or the id on the hub
    revision: str | None  # the hub commit; None for folders and files
    config: Any  # transformers'

    @cached_property
    def content(self) -> str | None:
        """A commit on the hub, or a hash of files; None if bundled."""
        path = Path(self.location)
        if self.revision is not None or self.name in BUNDLED:
            return self.revision
        if path.is_file():
            return _cached_sha256(path)
        files = [file for file in path.iterdir() if file.is_file() and not UNREAD.search(file.name)]
        return hash_request({file.name: _cached_sha256(file) for file in files})

    @property
    def id(self) -> str:
        """Its name, or whole path, in stores and files of SAEs."""
        local = self.name not in BUNDLED and self.revision is None
        return str(Path(self.location).resolve()) if local else self.name

    @property
    def spec(self) -> str:
        return ModelName(self.id, self.revision).spec

    @property
    def origin(self) -> dict[str, Any]:
        """What `store.json` adds to the request."""
        commit = {} if self.revision is None else {"revision": self.revision}
        return {"layers": self.layers, **commit}

    @property
    def layers(self) -> int:
        return self.config.get_text_config().num_hidden_layers

    @property
    def d_model(self) -> int:
        return self.config.get_text_config().hidden_size

    @property
    def positions(self) -> int | None:
        """The most tokens of a window, by `max_position_embeddings`; None if unlimited."""
        config = self.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None)
        if isinstance(longest, int) and re.fullmatch(AFTER_PADDING, config.model_type):
            longest -= (config.pad_token_id or 0) + 1
        return longest if isinstance(longest, int) and longest > 0 else None

    def default_layer(self) -> int:
        """The middle block: 12 of Gemma-2-2B's 26."""
        return (self.layers - 1) // 2

    def dtype_on(self, device: torch.device, wanted: str = "auto") -> str:
        """The precision of a forward pass; `auto` is the checkpoint's where the device multiplies in it, else float32,
        as always of the bundled model on CPUs, where its figures are to be the same."""
        if wanted != "auto":
            return wanted
        text_config = self.config.get_text_config()
        recorded = getattr(text_config, "dtype", None) or getattr(self.config, "dtype", None)
        named = str(recorded).removeprefix("torch.")
        if device.type != "cpu":
            return named if named in MODEL_DTYPES else "float32"
        native = named == "bfloat16" and self.name not in BUNDLED and multiplies_bf16(device)
        return "bfloat16" if native else "float32"

    def check_context(self, context: int) -> None:
        if self.positions is not None and context > self.positions:
            raise ConfigError(
                f"{self.name} takes windows of at most {self.positions:,} tokens, got --context {context:,}; lower it"
            )

    def identity(self) -> dict[str, Any]:
        return {"model": self.id, "weights": self.content}

    def note(self) -> str | None:
        """What transformers leaves out of a GGUF file, if anything."""
        path = named_file(self.location)
        if path is None:
            return None
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        scaled = " and ".join(name for name in ROPE_FACTORS if name.encode() in head)
        if not scaled:
            return None
        return (
            f"{path.name}: transformers leaves out {scaled}, the factors of its rotary embedding, so "
            "rows differ from the model's; its folder from the hub has them"
        )


def find_model(name: str, revision: str | None = None) -> ModelSource:
    """The model of a bundled name, folder, GGUF file, or hub id, there at a `revision`, also as ID@REVISION; ModelError
    if it is missing or gated, or the hub cannot be reached."""
    file = named_file(name)
    if file is None and not Path(name).is_dir():
        name, _, at = name.partition("@")
        if at and revision not in (None, at):
            raise ConfigError(
                f"--model names {at} of {name}, and --model-revision {revision}: give one of the two"
            )
        revision = revision or at or None
    if name not in BUNDLED and file is None and not Path(name).is_dir():
        return _on_hub(name, revision)
    if revision is not None:
        raise ConfigError(
            f"a revision does nothing with {name}, which is not on the hub; leave it out"
        )
    location = str(BUNDLED.get(name, name))
    return ModelSource(name, location, None, _config(name, location))


def check_downloaded(spec: str) -> None:
    """ModelError if a model, by its `spec`, is gone or would have to be downloaded."""
    if spec in BUNDLED or Path(spec).exists():
        return
    if Path(spec).is_absolute():
        raise ModelError(f"{spec} is no longer there; name the model with --model")
    name, _, revision = spec.partition("@")
    found = [try_to_load_from_cache(name, file, revision=revision or None) for file in WEIGHT_FILES]
    if not any(isinstance(path, str) for path in found):
        raise ModelError(f"{spec} is not on this machine; --model {spec} gets it from the hub")


def _on_hub(name: str, revision: str | None) -> ModelSource:
    offline = why_unreachable() is not None
    try:
        commit = HfApi().resolve_revision(name, revision=revision, local_files_only=offline)
    # The library raises anything for damaged or foreign names.
    except Exception as error:
        raise explained(ModelName(name, revision).spec, error) from error
    config = _config(name, name, commit.resolved)
    return ModelSource(name, name, commit.resolved, config)


def _config(name: str, location: str, revision: str | None = None) -> Any:
    """The configuration of a whole model: what transformers makes of an adapter depends on whether peft is there."""
    try:
        if not Path(location).is_file() and find_adapter_config_file(
            location, **_reading(revision)
        ):
            raise ModelError(
                f"{name} holds an adapter (adapter_config.json): expected a whole model; save the two merged "
                f"(peft's `merge_and_unload`) in a folder of their own, or name the base model"
            )
        config = from_pretrained(AutoConfig, location, revision)
    except ModelError:
        raise
    except Exception as error:  # transformers raises anything for damaged or foreign files
        raise explained(ModelName(name, revision).spec, error) from error
    if not getattr(config.get_text_config(), "num_hidden_layers", None):
        raise ModelError(
            f"{name} has no num_hidden_layers in its configuration, and so no layers to read from; use another model"
        )
    return config


def _cached_sha256(path: Path) -> str:
    """A large file's is kept in the user's cache until the file changes."""
    stamp = path.stat()
    if stamp.st_size < LARGE:
        return file_sha256(path)
    times = [stamp.st_mtime_ns, stamp.st_ctime_ns]
    key = hash_request({"file": [str(path.resolve()), stamp.st_ino, stamp.st_size, *times]})
    cache = Path(HF_HOME, "saecli", key)
    with suppress(OSError):
        return cache.read_text()
    digest = file_sha256(path)
    with suppress(OSError):  # of a cache that cannot be written
        cache.parent.mkdir(parents=True, exist_ok=True)
        with appearing_whole(cache) as temporary:
            temporary.write_text(digest)
    return digest


def explained(name: str, error: BaseException, part: str = "model") -> ModelError:
    """Why a model, or its tokenizer as `part`, could not be loaded."""
    if "trust_remote_code" in str(error):
        return ModelError(
            f"{name} comes with Python code of its own, and this tool runs no code from a model's "
            f"folder; use a model whose architecture transformers has"
        )
    # The library's message says how to run the file's code all the same.
    if isinstance(error, UnpicklingError):
        return ModelError(
            f"cannot load the model {name}: its pickle is damaged or holds code; use a model with model.safetensors"
        )
    repo = name.partition("@")[0]  # of a hub model
    for cause in causes(error):
        if isinstance(cause, RevisionNotFoundError):
            return ModelError(
                f"{name} is no branch, tag or commit on the hub; correct --model-revision"
            )
        if reason := why_refused(repo, cause):
            return ModelError(f"{reason}, {OFFLINE_ADVICE}")
        if isinstance(cause, RevisionResolutionError | LocalEntryNotFoundError):
            return ModelError(
                f"{name} is not on this machine and the Hugging Face hub cannot be reached "
                f"({why_unreachable() or one_line(cause)}): connect to the network (a gated model also wants its "
                f"licence accepted at https://huggingface.co/{repo}, and `hf auth login`), {OFFLINE_ADVICE}"
            )
    return ModelError(
        f"cannot load the {part} {name}: {type(error).__name__}: {one_line(error)}; give the hub id, "
        f"folder or GGUF file of a causal language model"
    )


def named_file(name: str) -> Path | None:
    """The GGUF file that a model's name is, if any."""
    path = Path(name)
    if path.suffix.lower() != GGUF or path.is_dir():
        return None
    if not path.is_file():
        raise ModelError(f"there is no file {name}; give the path of a GGUF file, or a hub id")
    return path


def from_pretrained(kind: Any, location: str, revision: str | None = None, **settings: Any) -> Any:
    """`kind.from_pretrained`; of a GGUF file in a folder of its own, else transformers takes a tokenizer from the files
    next to it."""
    # If trust_remote_code is not given, the library asks on stdout whether to run a model's Python code.
    settings |= {"trust_remote_code": False, **_reading(revision)}
    path = named_file(location)
    if settings.get("state_dict") is not None:
        return kind.from_pretrained(None, **settings)
    if path is None:
        with _no_conversion():
            return kind.from_pretrained(location, **settings)
    here = transformers.__version__
    if tuple(int(part) for part in here.split(".")[:2]) < READS_GGUF:
        raise ModelError(
            f"transformers {here} reads some GGUF files wrongly: other weights, or no BOS; run "
            f"`pip install --upgrade transformers`, for 5.23 or newer"
        )
    if kind not in (AutoConfig, AutoTokenizer):
        settings["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # The reader draws progress bars that no setting of transformers hides.
    with TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        Path(folder, path.name).symlink_to(path.resolve())
        return kind.from_pretrained(folder, gguf_file=path.name, **settings)


@contextmanager
def _no_conversion() -> Iterator[None]:
    """While open, transformers opens no pull request on the hub to convert a model to safetensors."""
    before = os.environ.get(NO_CONVERSION)
    os.environ[NO_CONVERSION] = before or "1"
    try:
        yield
    finally:
        del os.environ[NO_CONVERSION]
        if before is not None:
            os.environ[NO_CONVERSION] = before


def unread_weights(source: ModelSource) -> dict[str, Any] | None:
    """The tensors of a checkpoint in safetensors, each read when taken, where transformers maps all into memory; None
    of other formats."""
    if named_file(source.location) or getattr(source.config, "quantization_config", None):
        return None
    where = {"path_or_repo_id": source.location, **_reading(source.revision)}
    try:
        paths = [cached_file(filename=SAFE_WEIGHTS_NAME, **where)]
    except OSError:  # no such file
        try:
            index = Path(str(cached_file(filename=SAFE_WEIGHTS_INDEX_NAME, **where)))
        except OSError:
            return None
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        paths = [cached_file(filename=shard, **where) for shard in shards]
    files = [safe_open(path, framework="pt", backend="pread") for path in paths]
    return {name: file.get_slice(name) for file in files for name in file.offset_keys()}


def _reading(revision: str | None) -> dict[str, Any]:
    return {
        "revision": revision,
        "local_files_only": revision is None or why_unreachable() is not None,
    }


@dataclass(frozen=True, eq=False)
class LoadedSource(ModelSource):
    """A loaded model of transformers."""

    model: Any = None
    tokenizer: Any = None

    @cached_property
    def state(self) -> str:
        return state_hash(self.model)

    @cached_property
    def content(self) -> str:
        return hash_request(
            {
                "weights": self.state,
                "config": self.config.to_json_string(),
                "tokens": self.tokenizer.get_vocab(),
                "template": self.tokenizer.chat_template,
            }
        )

    @property
    def id(self) -> str:
        """The name, or folder's whole path, that it was loaded from, else its class."""
        return str(Path(self.name).resolve()) if Path(self.name).exists() else self.name

    @property
    def origin(self) -> dict[str, Any]:
        return super().origin | {"loaded": type(self.model).__name__, "state": self.state}

    def dtype_on(self, device: torch.device, wanted: str = "auto") -> str:
        return name_of(next(self.model.parameters()).dtype)


def text_config(model: Any) -> Any:
    """The configuration of a model's part that reads text; ConfigError if it is none of transformers."""
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ConfigError(
            f"model must be one of transformers, loaded, got {type(model).__name__}; give what from_pretrained returns"
        )
    return model.config.get_text_config()


def loaded_sources(
    models: Sequence[Any], tokenizer: Any, options: Collection[str], device: str
) -> list[LoadedSource]:
    """The loaded models, none if all are names; ConfigError for a mixture, or an option or device that does nothing."""
    by_name = [model for model in models if isinstance(model, str)]
    if 0 < len(by_name) < len(models):
        raise ConfigError(
            f"models must be all loaded, or all named, got {by_name[0]} among loaded ones"
        )
    if by_name:
        if tokenizer is not None:
            raise ConfigError(
                f"tokenizer does nothing with {by_name[0]}, which has its own; leave it out"
            )
        return []
    given = {*options, "device"} if device != "auto" else options
    idle = [name for name in ("model_revision", "model_dtype", "device") if name in given]
    if idle:
        raise ConfigError(
            f"{idle[0]} does nothing with a loaded model, which is read as it is; leave it out"
        )
    return [_loaded_source(model, tokenizer) for model in models]


def _loaded_source(model: Any, tokenizer: Any) -> LoadedSource:
    text_config(model)
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        raise ConfigError(
            f"a loaded model must be on one device, got weights on {' and '.join(sorted(devices))}; load "
            "it without device_map, or on one GPU"
        )
    dtype = name_of(next(model.parameters()).dtype)
    if dtype not in MODEL_DTYPES:
        raise ConfigError(
            f"a loaded model must have weights of float32, bfloat16 or float16, got {dtype}; convert them"
        )
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise ConfigError(
            f"tokenizer must be the loaded model's, got {type(tokenizer).__name__}; give that of AutoTokenizer"
        )
    name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
    return LoadedSource(name, "", None, model.config, model=model, tokenizer=tokenizer)


@torch.no_grad()
def state_hash(model: nn.Module, dtype: str | None = None) -> str:
    """Hash of a model's weights, in a dtype if given, and of which modules have hooks other than transformers' own.
    Cost: about 1 GB/s."""
    digest = sha256()
    for name, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
                digest.update(f"hook of {name}".encode())
    for name, tensor in model.state_dict().items():
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(getattr(torch, dtype))
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def in_eval_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """While open, models have no dropout; each module then returns to its mode."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
