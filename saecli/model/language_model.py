"""A loaded language model, whose activations are read or replaced at hook points.

Module hooks read them: the last of transformers' `hidden_states` is normalised. Only the blocks wanted are kept, under
the whole model's configuration.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    GenerationConfig,
)
from transformers.utils import logging

from ..base.devices import free_memory, moved
from ..base.errors import MachineError, ModelError, SaeError, one_line
from ..base.machine import is_out_of_memory
from ..base.words import size_words
from ..store.origin import SIDES, HookPoint
from .blocks import Reached, calling, norms_of, weights_read
from .modules import Modules, blocks_of, folded
from .source import (
    LoadedSource,
    ModelSource,
    explained,
    find_model,
    from_pretrained,
    in_eval_mode,
    unread_weights,
)

Result = TypeVar("Result")
TRIED = 8  # tokens
ROUNDING_TOLERANCE = 1e-2  # relative difference by rounding


class LanguageModel:
    """A loaded language model and its tokenizer.

    Args:
        head: load the unembedding too; refuses a model whose tokens see later ones, unless it is "any" and the model
            predicts masked tokens, for which `mask_token` stands.
        weights_seed: of random weights, as the architecture initialises them; None for the model's own.
        last: the last layer to keep; None for all.

    A `LoadedSource` is results as it is, with its head, dtype and device.
    """

    def __init__(
        self,
        source: ModelSource,
        device: torch.device,
        head: bool | Literal["any"] = False,
        dtype: str = "auto",
        weights_seed: int | None = None,
        last: int | None = None,
    ) -> None:
        self.source, self.device = source, device
        self.mask_token: int | None = None
        with _loading(source):
            self.tokenizer = load_tokenizer(source)
            if head == "any" and _predicts_masked(source):
                self.mask_token = self.tokenizer.mask_token_id
            self.model: Any = self._loaded(bool(head), dtype, weights_seed, last)
            if not hasattr(self.model.get_input_embeddings(), "weight"):
                raise ModelError(
                    f"{source.name} reads no tokens: expected a causal language model, got a "
                    f"{type(self.model).__name__}; use another model"
                )
            self.modules = _modules(self.model, source)
            self._norms = [norms_of(block, source.d_model) for block in self.blocks]
            if isinstance(source, LoadedSource):
                self.device = self.model.get_input_embeddings().weight.device
            else:
                if last is not None:
                    del self.blocks[last + 1 :]
                self.model.to(device).eval().requires_grad_(False)
        self._check_causal(bool(head))

    def _loaded(self, head: bool, dtype: str, weights_seed: int | None, last: int | None) -> Any:
        source = self.source
        loader: Any = AutoModel
        if head:
            loader = _with_head(source) if self.mask_token is None else AutoModelForMaskedLM
        if isinstance(source, LoadedSource):
            return source.model
        settings: dict[str, Any] = {
            "dtype": getattr(torch, source.dtype_on(self.device, dtype)),
            "trust_remote_code": False,
        }
        if getattr(source.config.get_text_config(), "attn_logit_softcapping", None) is not None:
            settings["attn_implementation"] = "eager"  # fused kernels ignore the soft cap
        if weights_seed is None:
            return _with_weights(source, loader, settings, last)
        with torch.random.fork_rng(devices=[]):  # drawn on the CPU, the same for every device
            torch.manual_seed(weights_seed)
            return loader.from_config(source.config, **settings)

    @torch.no_grad()
    def _check_causal(self, head: bool) -> None:
        if not head or self.mask_token is not None:
            return
        tokens = torch.arange(TRIED) % self.vocabulary
        token_ids = torch.stack([tokens, torch.cat([tokens[:1], tokens[1:].flip(0)])])
        first, other = self.logits(token_ids, torch.ones_like(token_ids))[:, 0]
        if (first - other).abs().max() > ROUNDING_TOLERANCE * first.abs().max():
            raise ModelError(
                f"{self.source.name} predicts no next token: expected a causal language model, got one whose tokens "
                "see later ones; use another model, or leave --model out if it is optional"
            )

    @property
    def vocabulary(self) -> int:
        return self.model.get_input_embeddings().weight.shape[0]

    def check_tokens(self, token_ids: Tensor) -> None:
        """ModelError for tokens without an embedding; a tokenizer may have more than its model."""
        if (largest := int(token_ids.max())) >= self.vocabulary:
            raise ModelError(
                f"{self.source.name} cannot read the token {largest}: its embedding has "
                f"{self.vocabulary} tokens; use the tokenizer that the model was trained with"
            )

    @torch.no_grad()
    def read(
        self,
        token_ids: Tensor,
        mask: Tensor,
        points: Sequence[HookPoint],
        take: Callable[[Tensor], Result],
    ) -> list[Result]:
        """The activations, (B, T, D), at distinct hook points, mapped by `take`, which must copy: the model may add to
        them in place. `token_ids` and `mask`, 0 at padding, are (B, T). The pass stops at the last point."""
        self.check_tokens(token_ids)
        results: dict[HookPoint, Result] = {}

        def note(point: HookPoint, activations: Tensor) -> Tensor:
            results[point] = take(activations)
            if len(results) == len(points):
                raise Reached
            return activations

        with ExitStack() as hooks:
            for point in points:
                hooks.enter_context(self.modules.intercepted(point, partial(note, point)))
            try:
                self.forward(token_ids, mask)
            except Reached:
                return [results[point] for point in points]
        never = next(point for point in points if point not in results)
        raise self.modules.never_ran(never)

    def logits(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """The logits, (B, T, vocabulary), float32; needs the head."""
        return self.forward(token_ids, mask).logits.float()

    def new_cache(self) -> Cache:
        """For `next_logits`, of no tokens yet."""
        return DynamicCache(config=self.model.config)

    def next_logits(self, token_ids: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """The logits after the last token, (B, vocabulary), float32, given the tokens, (B, T), after those that the
        cache holds, which are added to it; `mask` is of all. Needs the head."""
        # transformers named the argument past_key_values, later cache.
        names = inspect.signature(self.model.forward).parameters
        placed = {"cache" if "cache" in names else "past_key_values": cache}
        with self.reporting():
            output = self.model(
                input_ids=moved(token_ids, self.device),
                attention_mask=moved(mask, self.device),
                use_cache=True,
                **placed,
            )
        return output.logits[:, -1].float()

    def forward(self, token_ids: Tensor, mask: Tensor, positions: Tensor | None = None) -> Any:
        """`mask`: 0 at padding, (B, T), or added to attention's logits, (B, 1, T, T), with `positions`, (B, T)."""
        placed = {} if positions is None else {"position_ids": moved(positions, self.device)}
        with self.reporting(), _rotary_of_each_window(self.model, mask):
            return self.model(
                input_ids=moved(token_ids, self.device),
                attention_mask=moved(mask, self.device),
                use_cache=False,
                **placed,
            )

    @torch.no_grad()
    def continuation(
        self, token_ids: Tensor, most: int, temperature: float, seed: int
    ) -> list[int]:
        """The ids of the next 1 to `most` tokens after a prompt, (1, T), with its special tokens; loaded with its head.

        The end-of-text token ends it. A `temperature` of 0 takes the likeliest token each time. `seed` is for sampling;
        torch's own generators are left unchanged.
        """
        given = self.model.generation_config
        # All that could come from the model's own defaults, such as top-k, is set.
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        )
        config = GenerationConfig(
            max_new_tokens=most,
            num_beams=1,
            repetition_penalty=1.0,
            bos_token_id=given.bos_token_id,
            eos_token_id=given.eos_token_id,
            pad_token_id=0 if given.pad_token_id is None else given.pad_token_id,
            **sampling,
        )
        token_ids = token_ids.to(self.device)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            with self.reporting():
                generated = self.model.generate(
                    token_ids, attention_mask=torch.ones_like(token_ids), generation_config=config
                )
        return generated[0, token_ids.shape[1] :].tolist()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """While open, there is no dropout, and errors in the model's code become ModelErrors that name it."""
        try:
            with in_eval_mode([self.model]):
                yield
        except (Reached, SaeError):
            raise
        # A model's code is the library's or its author's, and raises anything.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f"{self.source.name} cannot run on these tokens: its forward pass failed with {type(error).__name__}: "
                f"{one_line(error)}; check its weights and config.json, or use another model"
            ) from error

    @property
    def blocks(self) -> nn.ModuleList:
        return self.modules.blocks

    def reads(self, point: HookPoint) -> Tensor | None:
        """How strongly later blocks read each dimension at a hook point, (D,); None if unknown."""
        if point.layer is None or not point.has_model_width or point.site == "mlp_in":
            return None
        tried = self.modules.streams  # of blocks that are not loaded the norms have the same names
        before = {name for stream in tried for name in stream.before}
        after = {name for stream in tried for name in stream.after}
        norms: list[nn.Module] = []
        if point.site in ("resid_mid", "attn_out"):
            norms += [norm for name, norm in self._norms[point.layer].items() if name in after]
        first_block = point.layer if point.site == "resid_pre" else point.layer + 1
        for of_block in self._norms[first_block:]:
            if before & of_block.keys():  # else attention reads the stream itself, as in OLMo 2
                norms += [norm for name, norm in of_block.items() if name in before | after]
        return weights_read(norms)


def _rotary_of_each_window(model: nn.Module, mask: Tensor) -> AbstractContextManager[None]:
    """While open, rotary embeddings that depend on a batch's longest window and on earlier passes (dynamic NTK,
    longrope) are in each window those of its own length."""
    lengths = mask.sum(1).tolist()
    return calling(
        {
            module: partial(_embedded, module, lengths)
            for module in model.modules()  # of several kinds of layers, rope_type is a mapping
            if re.search("dynamic|longrope", str(getattr(module, "rope_type", "")))
        }
    )


def _embedded(
    module: Any, lengths: list[int], x: Tensor, position_ids: Tensor, *args: Any, **more: Any
) -> tuple[Tensor, ...]:
    parts = []
    for row, length in enumerate(lengths):
        positions = position_ids[row % len(position_ids), None].clamp(max=length - 1)
        fresh = type(module)(module.config).to(x.device)  # which knows no lengths of earlier passes
        parts.append(fresh(x[:1], positions, *args, **more))
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


@contextmanager
def _loading(source: ModelSource) -> Iterator[None]:
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # without the head, its weights would be reported as unexpected
    logging.disable_progress_bar()
    try:
        yield
    except SaeError:
        raise
    except Exception as error:  # transformers raises anything for damaged or foreign files
        raise explained(source.name, error) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _predicts_masked(source: ModelSource) -> bool:
    config = source.config
    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not decodes


def _with_head(source: ModelSource) -> Any:
    for mapping, loader in (
        (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
    ):
        if type(source.config) in mapping and not _predicts_masked(source):
            return loader
    raise ModelError(
        f"{source.name} predicts no next token: expected a causal language model, got one of type "
        f"{source.config.model_type}; use another model, or leave --model out if it is optional"
    )


def load_tokenizer(source: ModelSource) -> Any:
    if isinstance(source, LoadedSource):
        return source.tokenizer
    try:
        tokenizer = from_pretrained(AutoTokenizer, source.location, source.revision)
    except Exception as error:  # the package tokenizers raises nothing more special
        raise explained(source.name, error, "tokenizer of") from error
    # If the files are missing, the library makes an empty tokenizer for some architectures.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ModelError(
            f"cannot load the tokenizer of {source.name}: no readable tokenizer.json or the like is next to "
            "the weights; save it there too"
        )
    return tokenizer


def _with_weights(
    source: ModelSource, loader: Any, settings: dict[str, Any], last: int | None
) -> Any:
    kind = MODEL_MAPPING.get(type(source.config), None) if loader is AutoModel else None
    if last is not None and isinstance(kind, type):
        shortened = settings | {"state_dict": unread_weights(source)}
        with suppress(AttributeError):  # of code that looks for other parts of all blocks
            return _with_weights(source, _shortened(kind, source, last), shortened, None)
    model, info = from_pretrained(
        loader,
        source.location,
        source.revision,
        config=source.config,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # else the error names none
        **settings,
    )
    unfit = {name for name, *_ in info["mismatched_keys"]}
    missing = _needed(model, source).intersection(info["missing_keys"])
    if lacking := sorted(unfit | missing):
        shape, more = tuple(model.state_dict()[lacking[0]].shape), len(lacking) - 1
        raise ModelError(
            f"cannot load the model {source.name}: its checkpoint has no weights of shape {shape} for "
            f"{lacking[0]}{f' and {more} more' if more else ''}; use one that config.json describes"
        )
    return model


def _shortened(kind: Any, source: ModelSource, last: int) -> Any:
    """A class of models that makes, and so loads, only the norms of the blocks after the last."""

    def initialise(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        blocks = _modules(self, source).blocks
        for number in range(last + 1, len(blocks)):
            norms = nn.Module()
            for path, norm in norms_of(blocks[number], source.d_model).items():
                *parents, name = path.split(".")
                home = norms
                for parent in parents:
                    home.add_module(parent, getattr(home, parent, nn.Module()))
                    home = home.get_submodule(parent)
                home.add_module(name, norm)
            blocks[number] = norms

    return type(kind.__name__, (kind,), {"__init__": initialise, "__module__": kind.__module__})


def _needed(model: Any, source: ModelSource) -> set[str]:
    """Names of parameters, without a head up to the last block's: a checkpoint may lack BERT's pooler."""
    names = [name for name, _ in model.named_parameters()]
    if model.get_output_embeddings() is not None:
        return set(names)
    blocks = f"{_modules(model, source).path}."
    last = max(index for index, name in enumerate(names) if name.startswith(blocks))
    return set(names[: last + 1])


def _modules(model: Any, source: ModelSource) -> Modules:
    return Modules(model, blocks_of(model, source.layers, source.name))


def modules_of(source: ModelSource) -> Modules:
    """A model's modules, without weights unless it is loaded."""
    if isinstance(source, LoadedSource):
        return _modules(source.model, source)
    config = deepcopy(source.config)  # which the next line changes
    with torch.device("meta"):  # where other kinds of attention ask for values
        return _modules(AutoModel.from_config(config, attn_implementation="eager"), source)


def check_memory(source: ModelSource, device: torch.device) -> None:
    """MachineError if a model's weights exceed a device's free memory; loads none."""
    numbers = sum(parameter.numel() for parameter in modules_of(source).model.parameters())
    needed = numbers * getattr(torch, source.dtype_on(device)).itemsize
    if needed > (free := free_memory(device)):
        raise MachineError(
            f"{source.name} does not fit into memory: weights take {size_words(needed)}, {size_words(free)} are free"
        )


def modules_document(model: str, revision: str | None) -> dict[str, Any]:
    """The modules of a model that run; loads no weights.

    Returns:
        `model`, and `modules`: each by name, `*` for a layer's or expert's number, with the `layers` that have it, none
        outside of blocks, and the sites that its `in` and `out` are, or None.
    """
    source = find_model(model, revision)
    modules = modules_of(source)
    in_block = re.compile(rf"{re.escape(modules.path)}\.(\d+)(?:\.|$)")
    layers: dict[tuple[str | None, ...], list[int]] = {}
    for path, module in modules.model.named_modules():
        runs = type(module).forward is not nn.Module.forward  # lists of modules have none
        if path and runs:
            sites = [modules.sites.get((path, side)) for side in SIDES]
            numbers = layers.setdefault((folded(modules.name(path)), *sites), [])
            layer = in_block.match(path)
            if layer is not None and int(layer[1]) not in numbers:
                numbers.append(int(layer[1]))
    keys = ("module", *SIDES, "layers")
    lines = [dict(zip(keys, (*line, numbers), strict=True)) for line, numbers in layers.items()]
    return {"model": source.name, "modules": lines}
