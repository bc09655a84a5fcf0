"""Hugging Face causal language models: loaded, read at one site, or spliced there. Alone in importing transformers.

A site is a place in block L, counted from 0:

    resid_pre     the block's input: `hidden_states[L]`, which the paper's code takes
    resid_post    the block's output: Gemma Scope's layer L, SAELens' `blocks.L.hook_resid_post`
    attn_out      what attention adds to the residual stream
    mlp_out       what the MLP adds to the residual stream

They are read by hooks on the modules and not from `hidden_states`, whose last entry is normalised.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import errors as hub_errors
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers import __version__ as transformers_version
from transformers.utils import logging

from .errors import ConfigError, ModelError
from .hub import why_unreachable

TINY_GEMMA2 = "tiny-gemma2"
BUNDLED = {TINY_GEMMA2: Path(__file__).parent / "assets" / TINY_GEMMA2}
SITES = ("resid_post", "resid_pre", "mlp_out", "attn_out")
# What damaged or foreign files make the library raise; older versions of the hub's client lack the last.
UNLOADABLE = (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError, SafetensorError,
              UnpicklingError,
              *([hub_errors.StrictDataclassError] if hasattr(hub_errors, "StrictDataclassError") else []))
OFFLINE_ADVICE = f"or use --model {TINY_GEMMA2}, which is bundled, or the folder of a downloaded model"


@dataclass(frozen=True)
class ModelSource:
    """Where a model is: bundled, in a local folder, or on the Hugging Face hub.

    Args:
        name: as the user gave it.
        location: what `from_pretrained` takes.
        revision: the hub commit; None where there is none to pin, as for folders.
        config: the model's configuration.
    """

    name: str
    location: str
    revision: str | None
    config: Any

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return self.config.get_text_config().num_hidden_layers

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.config.get_text_config().hidden_size

    @property
    def positions(self) -> int | None:
        """Tokens in a window at most: the positions that the model learned; None where none are named."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    def default_layer(self) -> int:
        """The middle block, which is 12 of Gemma-2-2B's 26."""
        return (self.layers - 1) // 2

    def check_layer(self, layer: int) -> None:
        """Refuse a block that is not there.

        Raises:
            ConfigError: it is not.
        """
        if not 0 <= layer < self.layers:
            raise ConfigError(f"{self.name} has layers 0 to {self.layers - 1}, got --layer {layer}")

    def check_context(self, context: int) -> None:
        """Refuse windows with more tokens than the model has positions.

        Raises:
            ConfigError: they have.
        """
        if self.positions is not None and context > self.positions:
            raise ConfigError(f"{self.name} takes windows of at most {self.positions:,} tokens, got --context "
                              f"{context:,}; lower it")

    def identity(self) -> dict[str, Any]:
        """What decides the weights, as part of a request's hash: revision, or sizes and times of a folder's files."""
        if self.name in BUNDLED or self.revision:
            return {"model": self.name, "revision": self.revision}
        files = sorted(path for path in Path(self.location).iterdir() if path.is_file())
        stamps = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
        return {"model": str(Path(self.location).resolve()), "revision": None, "files": stamps}


def find_model(name: str) -> ModelSource:
    """Find a model without loading its weights.

    Args:
        name: a bundled model's name, a folder, or a hub id.

    Raises:
        ModelError: there is none, it is gated, or the hub cannot be reached; the message says what to do.
    """
    if not name.strip():  # the path of an empty name is the working directory
        raise ModelError(f"--model is empty: expected a folder, a hub id such as google/gemma-2-2b, or {TINY_GEMMA2}")
    local = name in BUNDLED or Path(name).is_dir()
    if not local and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(f"no model {name!r}: expected a folder, a hub id such as google/gemma-2-2b, or {TINY_GEMMA2}")
    location = str(BUNDLED.get(name, name))
    offline = None if local else why_unreachable()
    if offline and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise ModelError(f"{name} is not on this machine and the Hugging Face hub cannot be reached ({offline}): "
                         f"connect to the network (a gated model also wants its licence accepted at "
                         f"https://huggingface.co/{name}, and `hf auth login`), {OFFLINE_ADVICE}")
    try:
        # Without the word, the library asks on stdout whether to run the Python code of a model's folder.
        config = AutoConfig.from_pretrained(location, local_files_only=local or offline is not None,
                                            trust_remote_code=False)
    except UNLOADABLE as error:
        raise _explained(name, error) from error
    if not getattr(config.get_text_config(), "num_hidden_layers", None):
        raise ModelError(f"{name} has no layers to read from: expected a num_hidden_layers above 0 in its "
                         f"configuration, got none; use another model")
    return ModelSource(name, location, None if local else getattr(config, "_commit_hash", None), config)


def _explained(name: str, error: BaseException) -> ModelError:
    """Why a model could not be loaded, and what to do."""
    if "trust_remote_code" in str(error):
        return ModelError(f"{name} comes with Python code of its own, and this tool runs no code from a model's "
                          f"folder: expected an architecture that transformers has; use another model")
    if isinstance(error, UnpicklingError):  # of which the library says how to run the file's code all the same
        return ModelError(f"cannot load the model {name}: expected weights that hold nothing but tensors, got a pickle "
                          f"that is damaged or holds code; use a model with model.safetensors")
    if "backend tokenizer" in str(error):
        return _no_tokenizer(name)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, GatedRepoError):
            return ModelError(f"{name} is gated: accept its licence at https://huggingface.co/{name}, then run "
                              f"`hf auth login`, {OFFLINE_ADVICE}")
        if isinstance(cause, RepositoryNotFoundError):
            return ModelError(f"the Hugging Face hub has no model {name}, or it is private: check the name and "
                              f"`hf auth login`, {OFFLINE_ADVICE}")
        cause = cause.__cause__ or cause.__context__
    said = re.sub(r":\s*\n\s*", ": ", str(error).strip())  # a line that ends so says nothing yet
    reason = (said.splitlines() or [type(error).__name__])[0].rstrip(".")
    return ModelError(f"cannot load the model {name}: {reason}; expected the files of a Hugging Face causal language "
                      f"model")


def _no_tokenizer(name: str) -> ModelError:
    return ModelError(f"cannot load the tokenizer of {name}: expected its files, such as tokenizer.json, beside the "
                      f"weights, got none that can be read; save the tokenizer there too")


class LanguageModel:
    """A loaded language model and its tokenizer.

    Args:
        source: where it is.
        device: where it runs.
        head: load the unembedding as well, which only `logits` needs.

    Raises:
        ModelError: weights or tokenizer cannot be loaded.
    """

    def __init__(self, source: ModelSource, device: torch.device, head: bool = False) -> None:
        self.source, self.device = source, device
        # On a CPU half precision is slow and rarely native; elsewhere the precision the weights came in serves.
        dtype = torch.float32 if device.type == "cpu" else "auto"
        dtype_word = "dtype" if _version(transformers_version) >= (4, 56) else "torch_dtype"
        settings: dict[str, Any] = {dtype_word: dtype, "revision": source.revision, "trust_remote_code": False}
        if getattr(source.config.get_text_config(), "attn_logit_softcapping", None) is not None:
            settings["attn_implementation"] = "eager"  # the fused kernels leave the soft cap out
        loader = AutoModelForCausalLM if head else AutoModel
        quiet = logging.get_verbosity()
        logging.set_verbosity_error()  # loading without the head is meant, and reported as unexpected weights
        logging.disable_progress_bar()
        try:
            self.tokenizer = _tokenizer(source)
            self.model = loader.from_pretrained(source.location, **settings).to(device).eval()
        except ModelError:
            raise
        except UNLOADABLE as error:
            raise _explained(source.name, error) from error
        finally:
            logging.set_verbosity(quiet)
        self.model.requires_grad_(False)
        if not hasattr(self.model.get_input_embeddings(), "weight"):
            raise ModelError(f"{source.name} reads no tokens: expected a causal language model, got a "
                             f"{type(self.model).__name__}; use another model")
        self.blocks = _blocks(self.model, source)

    @property
    def vocabulary(self) -> int:
        """Token ids that the model has embeddings for, counted from 0."""
        return self.model.get_input_embeddings().weight.shape[0]

    def check_tokens(self, token_ids: Tensor) -> None:
        """Refuse tokens without an embedding: a tokenizer may know more than its model.

        Raises:
            ModelError: there is one.
        """
        if (largest := int(token_ids.max())) >= self.vocabulary:
            raise ModelError(f"{self.source.name} cannot read the token {largest}: expected token ids below "
                             f"{self.vocabulary}, the size of its embedding; use the tokenizer that the model was "
                             f"trained with")

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return next(self.model.parameters()).dtype

    @torch.no_grad()
    def read(self, token_ids: Tensor, mask: Tensor, layer: int, site: str) -> Tensor:
        """The activations at a site; the forward pass stops there, so later blocks and logits cost nothing.

        Args:
            token_ids: (B, T), int64.
            mask: 1 at tokens, 0 at padding, (B, T).
            layer: block, from 0.
            site: one of `SITES`.

        Returns:
            Activations, (B, T, D), in the model's dtype and on its device.
        """
        self.check_tokens(token_ids)
        found: list[Tensor] = []

        def stop(activations: Tensor) -> Tensor:
            found.append(activations)
            raise _Reached

        with self.intercepted(layer, site, stop):
            try:
                self.model(input_ids=token_ids.to(self.device), attention_mask=mask.to(self.device), use_cache=False)
            except _Reached:
                return found[0]
        raise ModelError(f"{self.source.name} never ran its layer {layer}: its blocks are not called one by one")

    @torch.no_grad()
    def logits(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """The logits, (B, T, vocabulary), float32; takes what `read` takes, and a model loaded with its head."""
        output = self.model(input_ids=token_ids.to(self.device), attention_mask=mask.to(self.device), use_cache=False)
        return output.logits.float()

    @contextmanager
    def intercepted(self, layer: int, site: str, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """While open, forward passes go on from `replace(activations)` in place of the activations at a site.

        Args:
            layer: block, from 0.
            site: one of `SITES`.
            replace: maps activations (B, T, D) to activations of that shape.
        """
        module, is_input = _hook_point(self.blocks[layer], site)

        def on_input(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if args:
                return (replace(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": replace(kwargs["hidden_states"])}

        def on_output(module: nn.Module, args: tuple, output: Any) -> Any:
            return (replace(output[0]), *output[1:]) if isinstance(output, tuple) else replace(output)

        handle = (module.register_forward_pre_hook(on_input, with_kwargs=True) if is_input
                  else module.register_forward_hook(on_output))
        try:
            yield
        finally:
            handle.remove()


class _Reached(Exception):  # noqa: N818 - not an error: it ends a forward pass that has served
    """Ends a forward pass once the wanted activations are there."""


def _tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer.

    Raises:
        ModelError: its files are missing or cannot be read.
    """
    found = AutoTokenizer.from_pretrained(source.location, revision=source.revision, trust_remote_code=False)
    # Where the files are missing the library makes an empty tokenizer up, at least for some architectures.
    if len(found) <= len(set(found.all_special_ids)):
        raise _no_tokenizer(source.name)
    return found


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def _blocks(model: nn.Module, source: ModelSource) -> nn.ModuleList:
    """The model's list of transformer blocks: the outermost module list as long as the configuration says."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == source.layers]
    if not lists:
        raise ModelError(f"cannot find the blocks of {source.name}: expected a module list of length {source.layers}, "
                         f"as its configuration says, got none")
    return lists[0]


def _hook_point(block: nn.Module, site: str) -> tuple[nn.Module, bool]:
    """The module whose output, or where the flag is set whose input, is the site.

    Gemma-2 and its heirs normalise what attention and MLP give before adding it, so that their sites are the
    outputs of those norms; the mark of such a block is `post_feedforward_layernorm`.
    """
    if site in ("resid_pre", "resid_post"):
        return block, site == "resid_pre"
    normed = hasattr(block, "post_feedforward_layernorm")
    names = {"mlp_out": ("post_feedforward_layernorm",) if normed else ("mlp", "feed_forward", "ffn"),
             "attn_out": ("post_attention_layernorm",) if normed else ("self_attn", "attention", "attn",
                                                                       "self_attention")}[site]
    for name in names:
        if hasattr(block, name):
            return getattr(block, name), False
    raise ConfigError(f"--site {site} is unknown in {type(block).__name__}: expected a part named "
                      f"{' or '.join(names)}; use resid_post or resid_pre")
