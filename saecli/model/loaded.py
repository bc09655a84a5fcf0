"""A language model and a tokenizer that the user has loaded, in place of a model's name."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.errors import ConfigError
from ..sae.dictionary import name_of
from ..store.schema import hash_request
from .names import MODEL_DTYPES
from .source import ModelSource


@dataclass(frozen=True, eq=False)
class LoadedSource(ModelSource):
    """A loaded model; its content is the hash of its state, configuration and tokenizer."""

    model: Any = None
    tokenizer: Any = None

    @cached_property
    def state(self) -> str:
        """See `state_hash`."""
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
        """What its configuration was loaded from, of a folder the whole path, else the name of its class."""
        return str(Path(self.name).resolve()) if Path(self.name).exists() else self.name

    @property
    def origin(self) -> dict[str, Any]:
        return super().origin | {"loaded": type(self.model).__name__, "state": self.state}

    def dtype_on(self, device: torch.device, wanted: str = "auto") -> str:
        return name_of(next(self.model.parameters()).dtype)


def text_config(model: Any) -> Any:
    """The configuration of a model, or of its part that reads text; ConfigError if it is none of transformers."""
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ConfigError(
            f"the model must be one of transformers, loaded, got {type(model).__name__}; give what "
            "from_pretrained returns"
        )
    return model.config.get_text_config()


def loaded_sources(
    models: Sequence[Any], tokenizer: Any, options: Collection[str], device: str
) -> list[LoadedSource]:
    """The loaded models with their tokenizer; none if models are given by name. ConfigError for a mixture, or for an
    option, or a device, that does nothing."""
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
    idle = [name for name in ("model_revision", "model_dtype") if name in options]
    if device != "auto":
        idle.append("device")
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
            f"tokenizer must be the loaded model's, got {type(tokenizer).__name__}; give what "
            "AutoTokenizer.from_pretrained returns"
        )
    name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
    return LoadedSource(name, "", None, model.config, model=model, tokenizer=tokenizer)


@torch.no_grad()
def state_hash(model: nn.Module, dtype: str | None = None) -> str:
    """Hash of a model's weights, as they are in a dtype if one is given, and of which modules have hooks, but for those
    of transformers, which only take notes. Cost: about 1 GB/s."""
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
    """While open, models have no dropout; after it, each module is in the mode that it had."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
