"""A loaded language model, whose activations are read at some places or replaced at one.

Sites (see `places.py`) are read by module hooks rather than from `hidden_states`, whose last entry is normalised.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ..base.devices import moved
from ..base.errors import ConfigError, ModelError, SaeError, one_line
from ..base.memory import is_out_of_memory
from .model_source import DTYPE_WORD, UNLOADABLE, ModelSource, explained, no_tokenizer
from .places import Place
from .weights import Outline

MLP = ("mlp", "feed_forward", "ffn")  # what architectures call a block's MLP


def hook_point(block: nn.Module, site: str) -> tuple[nn.Module, bool]:
    """The module whose output (or input, where the flag is set) is the site.

    Gemma-2 and its successors normalise the outputs of attention and MLP before adding them, so those norms' outputs
    are the sites; such a block has a `post_feedforward_layernorm`.

    Raises:
        ConfigError: the block has no module of a known name for the site.
    """
    is_input = site in ("resid_pre", "mlp_in")
    if site in ("resid_pre", "resid_post"):
        return block, is_input
    normed = hasattr(block, "post_feedforward_layernorm")
    names = {"mlp_in": MLP,
             "mlp_out": ("post_feedforward_layernorm",) if normed else MLP,
             "attn_out": ("post_attention_layernorm",) if normed else ("self_attn", "attention", "attn",
                                                                       "self_attention")}[site]
    for name in names:
        if hasattr(block, name):
            return getattr(block, name), is_input
    raise ConfigError(f"--site {site} is unknown in {type(block).__name__}: expected a part named "
                      f"{' or '.join(names)}; use resid_post or resid_pre", option="site")


@contextmanager
def intercepted(block: nn.Module, site: str, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While open, forward passes replace the activations, (B, T, D), at a site of a block by `replace(activations)`."""
    module, is_input = hook_point(block, site)

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


Taken = TypeVar("Taken")


class LanguageModel:
    """A loaded language model and its tokenizer.

    Args:
        source: where it is.
        device: where it runs.
        head: load the unembedding too, which only `logits` needs.
        dtype: precision of weights and forward pass; see `ModelSource.dtype_on`.
        weights_seed: draw the weights anew, as the architecture initialises them, by this seed; None for the model's.
        last: the last layer that is read, after which no block is loaded where that is safe; None for all blocks, as
            `logits` and random weights take them.

    Attributes:
        size: number of parameters, including those of blocks that are not loaded.
        blocks: its transformer blocks.

    Raises:
        ModelError: weights or tokenizer cannot be loaded.
    """

    def __init__(self, source: ModelSource, device: torch.device, head: bool = False, dtype: str = "auto",
                 weights_seed: int | None = None, last: int | None = None) -> None:
        self.source, self.device = source, device
        settings: dict[str, Any] = {DTYPE_WORD: getattr(torch, source.dtype_on(device, dtype)),
                                    "trust_remote_code": False}
        if getattr(source.config.get_text_config(), "attn_logit_softcapping", None) is not None:
            settings["attn_implementation"] = "eager"  # fused kernels ignore the soft cap
        loader = AutoModelForCausalLM if head else AutoModel
        quiet = logging.get_verbosity()
        logging.set_verbosity_error()  # without the head, its weights would be reported as unexpected
        logging.disable_progress_bar()
        try:
            self.tokenizer = load_tokenizer(source)
            outline = Outline(source, loader, settings)
            if weights_seed is None:
                model = outline.load(source.layers if last is None else last + 1)
            else:
                with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU, the same for every device
                    torch.manual_seed(weights_seed)
                    model = loader.from_config(source.config, **settings)
            self.model = model.to(device).eval()
        except ModelError:
            raise
        except UNLOADABLE as error:
            raise explained(source.name, error) from error
        finally:
            logging.set_verbosity(quiet)
        self.model.requires_grad_(False)
        if not hasattr(self.model.get_input_embeddings(), "weight"):
            raise ModelError(f"{source.name} reads no tokens: expected a causal language model, got a "
                             f"{type(self.model).__name__}; use another model")
        self.size, self.blocks = outline.size, self.model.get_submodule(outline.path)

    @property
    def vocabulary(self) -> int:
        """Number of token ids with an embedding."""
        return self.model.get_input_embeddings().weight.shape[0]

    def check_tokens(self, token_ids: Tensor) -> None:
        """Raise a ModelError for tokens without an embedding: a tokenizer may have more tokens than its model."""
        if (largest := int(token_ids.max())) >= self.vocabulary:
            raise ModelError(f"{self.source.name} cannot read the token {largest}: expected token ids below "
                             f"{self.vocabulary}, the size of its embedding; use the tokenizer that the model was "
                             f"trained with")

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return next(self.model.parameters()).dtype

    @torch.no_grad()
    def read(self, token_ids: Tensor, mask: Tensor, places: Sequence[Place],
             take: Callable[[Tensor], Taken]) -> list[Taken]:
        """The activations at some places; the forward pass stops at the last one.

        Args:
            token_ids: (B, T), int64.
            mask: 1 at tokens, 0 at padding, (B, T).
            places: where to read, each once.
            take: maps the activations at a place, (B, T, D) in the model's dtype and on its device, to a result; it
                must copy, for a model may then add to them in place.

        Returns:
            The result of `take` at each place.
        """
        self.check_tokens(token_ids)
        found: dict[Place, Taken] = {}

        def note(place: Place, activations: Tensor) -> Tensor:
            found[place] = take(activations)
            if len(found) == len(places):
                raise _Reached
            return activations

        with ExitStack() as hooks:
            for place in places:
                hooks.enter_context(self.intercepted(*place, partial(note, place)))
            try:
                self._forward(token_ids, mask)
            except _Reached:
                return [found[place] for place in places]
        never = next(place for place in places if place not in found)
        raise ModelError(f"{self.source.name} never ran its layer {never.layer}: its blocks are not called one by one")

    @torch.no_grad()
    def logits(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """The logits, (B, T, vocabulary), float32; arguments as in `read`. Needs a model loaded with its head."""
        return self._forward(token_ids, mask).logits.float()

    def _forward(self, token_ids: Tensor, mask: Tensor) -> Any:
        with self.told():
            return self.model(input_ids=moved(token_ids, self.device), attention_mask=moved(mask, self.device),
                              use_cache=False)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Raise a ModelError for an error in the model's own code, which does not name the model."""
        try:
            yield
        except (_Reached, SaeError):
            raise
        except Exception as error:  # a model's code is the library's or its author's, and raises anything
            if is_out_of_memory(error):
                raise
            raise ModelError(f"{self.source.name} cannot run on these tokens: its forward pass failed with "
                             f"{type(error).__name__}: {one_line(error)}; check its weights and config.json, or use "
                             f"another model") from error

    @contextmanager
    def intercepted(self, layer: int, site: str, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """`intercepted` at a site of a block of this model."""
        with intercepted(self.blocks[layer], site, replace):
            yield


class _Reached(Exception):  # noqa: N818 - not an error
    """Ends a forward pass once all wanted activations have been read."""


def load_tokenizer(source: ModelSource) -> Any:
    """A model's tokenizer; ModelError if its files are missing or cannot be read."""
    try:
        found = AutoTokenizer.from_pretrained(source.location, revision=source.revision, trust_remote_code=False)
    except UNLOADABLE as error:
        raise explained(source.name, error) from error
    # If the files are missing, the library makes an empty tokenizer for some architectures.
    if len(found) <= len(set(found.all_special_ids)):
        raise no_tokenizer(source.name)
    return found
