"""SAEs in the forward passes of a loaded transformers model: codes in the graph, and edited.

    y' = decode(z')                      z' = change(z), z = encode(x); without `error`
    y' = y + (z' - z) W_dec              with it: decode(z') plus the reconstruction error, y - decode(z)

x is read and y replaced; they differ for a transcoder. Special tokens (BOS) keep their activations, and so does the
first token of a text, the attention sink where there is no BOS.

Source: Marks et al., "Sparse Feature Circuits" (2025), for the error as a constant beside the codes.

Shapes: B texts, T tokens of a forward pass, D = d_in, E = d_out, F = d_sae.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from ..base.console import Silent
from ..base.devices import as_usual, without_autocast
from ..base.errors import ConfigError
from ..base.home import Home
from ..model.modules import Modules, blocks_of
from ..model.saes import open_sae
from ..model.source import text_config
from ..sae.dictionary import SAE
from ..sae.library import SAELike
from ..store.origin import HookPoint, module_site
from .placement import Placement, check_distinct, placement

SPECIAL_TOKENS = ("bos", "eos", "pad", "cls", "sep")  # as a configuration names them
Change = Callable[[Tensor], Tensor]  # of codes, (B, T, F)


class Splice:
    """An SAE in the forward passes of a model, each of which calls its methods in this order.

    Args:
        change: edits a copy of the codes.
        error: add the reconstruction error.
        constant: to gradients, the error is a constant.
    """

    def __init__(
        self, at: Placement, change: Change | None, error: bool = True, constant: bool = True
    ) -> None:
        self.at, self.change, self.error, self.constant = at, change, error, constant
        self.sae = at.sae
        self.codes: Tensor | None = None  # of the last forward pass
        self.replaced: Tensor | None = None  # (B, T) bool; None between forward passes
        self._x: Tensor | None = None  # of a transcoder

    def begin(self, replaced: Tensor) -> None:
        self.replaced, self.codes, self._x = replaced, None, None

    def read(self, x: Tensor) -> Tensor:
        self._x = x.clone()  # a model may add to it in place
        return x

    def write(self, y: Tensor) -> Tensor:
        """y', (B, T, E)."""
        read, written = self.at.read, self.at.written
        x = y if read == written else self._x
        if x is None:
            raise ConfigError(
                f"cannot splice {self.at.name}: it reads {read} after {written}, which it predicts; name another run"
            )
        if self.replaced is None:
            raise ConfigError(
                f"cannot splice {self.at.name}: expected a forward pass of the whole model that was "
                "given, got one of a module in it; call the model itself, or give that module"
            )
        if self.sae.W_enc.device != x.device:
            self.sae = self.sae.copy_to(x.device)
        z = self.sae.encode(x)
        self.codes = self._changed(z)
        new = self._with_error(x, y, z) if self.error else self.sae.decode(self.codes, x).to(y)
        return torch.where(self.replaced.to(y.device)[..., None], new, y)

    def _changed(self, z: Tensor) -> Tensor:
        """z', which keeps its gradient."""
        codes = z
        if self.change is not None:
            codes = self.change(z.clone())
            if not isinstance(codes, Tensor) or codes.shape != z.shape:
                got = tuple(codes.shape) if isinstance(codes, Tensor) else type(codes).__name__
                raise ConfigError(
                    f"the change of {self.at.name} must return codes of the shape given, {tuple(z.shape)}, got {got}"
                )
            codes = codes.to(z)
        if torch.is_grad_enabled():
            if not codes.requires_grad:  # nothing before them in the model does
                codes = codes.detach().requires_grad_()
            codes.retain_grad()
        return codes

    @without_autocast
    def _with_error(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        assert self.codes is not None
        if not self.constant:
            return y + ((self.codes - z) @ self.sae.W_dec).to(y)
        step = (self.codes - z.detach()) @ self.sae.W_dec
        if self.sae.W_skip is not None:
            rows = x.to(step)
            step = step + (rows - rows.detach()) @ self.sae.W_skip  # 0, with the skip's gradient
        return y.detach() + step.to(y)


def hooks_of(parts: Sequence[Splice]) -> Sequence[tuple[HookPoint, Callable[[Tensor], Tensor]]]:
    """In order: an SAE that reads where another one writes reads what that one leaves."""
    writes = [(part.at.written, part.write) for part in parts]
    reads = [(part.at.read, part.read) for part in parts if part.at.read != part.at.written]
    return writes + reads


@contextmanager
def splices(
    model: nn.Module,
    parts: Sequence[Splice],
    special: Sequence[int] | None = None,
    everywhere: bool = False,
    modules: Modules | None = None,
) -> Iterator[None]:
    """While open, SAEs act in a model's forward passes: unless `everywhere`, not at a text's first token and `special`
    ones, by default BOS, EOS, CLS, SEP and padding. Given the model's `modules`, it is not traced again."""
    config = text_config(model)
    name = getattr(config, "name_or_path", "") or type(model).__name__
    for part in parts:
        part.at.check(config.hidden_size, config.num_hidden_layers, name)
    if modules is None:
        modules = Modules(model, blocks_of(model, config.num_hidden_layers, name))
    for part in parts:
        modules.at(part.at.written)  # which may run the model, before hooks act in it
    if special is None:
        given = [getattr(config, f"{kind}_token_id", None) for kind in SPECIAL_TOKENS]
        special = [token for ids in given if ids is not None for token in np.atleast_1d(ids)]
    special_ids = torch.tensor(special, dtype=torch.int64, device="cpu")

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token_ids = kwargs.get("input_ids", args[0] if args else None)  # none with inputs_embeds
        tokens = kwargs["inputs_embeds"][..., 0] if token_ids is None else token_ids
        replaced = torch.ones_like(tokens, dtype=torch.bool)
        if not everywhere:
            if token_ids is not None:
                replaced &= ~torch.isin(token_ids, special_ids.to(token_ids.device))
            replaced[_first_tokens(replaced, kwargs)] = False
        for part in parts:
            part.begin(replaced)

    def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for part in parts:
            part.replaced = None
            if part.codes is None:
                raise modules.never_ran(part.at.written)

    with ExitStack() as opened:
        opened.enter_context(model.register_forward_pre_hook(begin, with_kwargs=True))
        opened.enter_context(model.register_forward_hook(end))
        for hook_point, hook in hooks_of(parts):
            opened.enter_context(modules.intercepted(hook_point, hook))
        yield


def _first_tokens(tokens: Tensor, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The indices of each text's first token among those of a forward pass, (B, T): none where the cache holds tokens
    before them."""
    texts = torch.arange(len(tokens), device=tokens.device)
    # transformers named the argument past_key_values, later cache
    caches = [value for value in arguments.values() if isinstance(value, Cache)]
    if any(cache.get_seq_length() for cache in caches):
        return texts[:0], texts[:0]
    mask = arguments.get("attention_mask")  # 0 at padding, perhaps on the left
    if isinstance(mask, Tensor) and mask.shape == tokens.shape:
        return texts, mask.to(tokens.device).long().argmax(1)
    positions = arguments.get("position_ids")
    if mask is None or positions is None or positions.shape != tokens.shape:
        return texts, torch.zeros_like(texts)
    # A static cache's mask has other shapes. The first token is the last at position 0, which padding may have too.
    at_end = (positions.to(tokens.device) == 0).flip(1).long().argmax(1)
    return texts, tokens.shape[1] - 1 - at_end


class SplicedCodes(Mapping[Hashable, Tensor]):
    """The codes of the last forward pass, (B, T, F) each: by key or name, see `spliced`, or by position, from 0."""

    def __init__(self, parts: Mapping[Hashable, Splice]) -> None:
        self._parts = parts

    def __getitem__(self, key: Hashable) -> Tensor:
        if key not in self._parts and isinstance(key, int) and 0 <= key < len(self):
            key = [*self._parts][key]
        part = self._parts[key]
        if part.codes is None:
            raise ConfigError(f"there are no codes of {part.at.name} yet: run the model first")
        return part.codes

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        codes = {key: part.codes for key, part in self._parts.items()}
        shapes = {key: None if z is None else tuple(z.shape) for key, z in codes.items()}
        return f"SplicedCodes({shapes})"


@contextmanager
def spliced(
    model: nn.Module,
    sae: SAELike | Sequence[SAELike] | Mapping[Any, SAELike],
    *,
    error: bool = True,
    change: Change | Mapping[Any, Change] | None = None,
    everywhere: bool = False,
    home: str | Path | Home | None = None,
) -> Iterator[SplicedCodes]:
    """While open, SAEs reconstruct activations in every forward pass of a transformers model.

        with saecli.spliced(model, "first") as codes:
            model(**tokenizer("Once", return_tensors="pt")).logits[0, -1, token].backward()
        attribution = codes["first"].grad * codes["first"].detach()  # (B, T, F)

    Where gradients are enabled, codes keep theirs after `backward`. To gradients the error is a constant: what reaches
    an earlier SAE's codes comes through later ones'. In generation the last forward pass has one token. Integrated
    gradients: codes times the mean of their gradients with `change=lambda z: a * z`, a = 1/n, 2/n, ..., 1.

    Args:
        sae: as in `evaluate`; several as a list, or as a mapping from your own names. An SAE that does not record its
            hook point has it as its key, as in `{(12, "resid_post"): sae}`, or a module's name. `codes` has a mapping's
            keys, else names as given, and positions, such as `codes[0]`.
        error: add the reconstruction error; the model's output then stays the same, bit for bit, unless codes change.
        change: a function of codes, (B, T, F), which it may edit in place, that returns those to decode and to find in
            `codes`. For several SAEs a mapping from keys to functions.
        everywhere: also at special tokens (BOS, EOS, padding) and at the first token of a text, which otherwise keep
            their activations, as in `sae eval`, and whose codes have no gradient.
    """
    keyed = _keyed(sae)
    if change is not None and not isinstance(change, Mapping):
        if len(keyed) > 1:
            raise ConfigError(
                f"change must be a mapping from keys to functions with {len(keyed)} SAEs, got one function; "
                f"give {{{next(iter(keyed))!r}: function}}"
            )
        change = dict.fromkeys(keyed, change)
    changes = dict(change or {})
    if unknown := changes.keys() - keyed.keys():
        raise ConfigError(
            f"change names {', '.join(map(repr, unknown))}: expected keys of the SAEs, {', '.join(map(repr, keyed))}"
        )
    if unfit := [each for each in changes.values() if not callable(each)]:
        raise ConfigError(f"change must be a function of codes, got {unfit[0]!r}; give one")
    placement_of = as_usual(_placement_of)
    acts = {key: placement_of(Home.at(home), each, key) for key, each in keyed.items()}
    check_distinct(acts.values())
    parts = {key: Splice(at, changes.get(key), error) for key, at in acts.items()}
    with splices(model, [*parts.values()], everywhere=everywhere):
        yield SplicedCodes(parts)


def _keyed(sae: SAELike | Sequence[SAELike] | Mapping[Any, SAELike]) -> dict[Hashable, SAELike]:
    if isinstance(sae, Mapping):
        return dict(sae)
    several = [sae] if sae is None or isinstance(sae, SAE | str | Path) else sae
    keys = [str(each) if isinstance(each, str | Path) else at for at, each in enumerate(several)]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"{twice[0]} is named twice: expected each SAE once; leave one out")
    return dict(zip(keys, several, strict=True))


def _placement_of(home: Home, sae: SAELike, key: Hashable) -> Placement:
    opened = open_sae(home, sae, Silent())
    subject, saved = opened
    if saved.sae.widths:
        raise ConfigError(
            f"cannot splice {subject.name}, a crosscoder: its codes need the activations at all its hook points before "
            "the first is replaced; measure it by `sae eval`, or add latents at one by saecli.steering"
        )
    layer, site = None, None
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], int | np.integer):
        layer, site = int(key[0]), key[1]
    elif isinstance(key, str) and key.endswith((":in", ":out")):  # which an SAE's own must be
        site = module_site(key)
    if site is None and not saved.origin.read[0].site:
        if not isinstance(key, str) or key == sae:
            raise ConfigError(
                f"{subject.name} records no hook point; give it as a key, such as "
                '{(12, "resid_post"): sae} or {"model.layers.12.mlp:out": sae}'
            )
        site = module_site(key)
    return placement(opened, layer, site)
