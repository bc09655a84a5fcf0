"""A language model run with some latents of an SAE changed at every token.

    add       x' = x + scale W_dec[i]            the code of latent i plus scale
    clamp     x' = x + (scale - z_i) W_dec[i]    the code set to scale
    ablate    x' = x - z_i W_dec[i]              the code set to 0

summed over the chosen latents i, with z the codes of x: the reconstruction error stays. A transcoder's codes are of the
activations that it reads, and those that it predicts are changed. A crosscoder's need all its hook points at once: its
latents can be added at one of them. Special tokens (BOS) keep their activations, as does the first token of a text, the
attention sink where there is no BOS.

Sources: Turner et al., "Steering Language Models With Activation Engineering" (2023), for adding; Templeton et al.,
"Scaling Monosemanticity" (2024), for clamping. Shapes: T tokens, N of them not special, S chosen latents, E = d_out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from ..base.console import Listener, Silent
from ..base.devices import as_usual
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.options import checked
from ..base.words import counted
from ..extract.texts import REPEATED
from ..model.language_model import LanguageModel
from ..model.modules import Modules
from ..model.saes import open_sae
from ..model.tokenizer import TokenTexts, affixes, special_ids, text_ids
from ..model.windows import stored_activations
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import SAELike, Subject
from ..splice.placement import Placement, placement
from ..splice.spliced import Splice, splices
from ..store.origin import place_given, point_words
from ..store.values import TextWindow
from .arguments import HomeLike, Layer, Method, Module, Site
from .latents import chosen_latents
from .measured import own_codes

if TYPE_CHECKING:
    from ..model.source import ModelSource

SCANNED_ROWS, SCANNED_PRODUCTS = 1 << 16, 1 << 38  # of the store at most


class OnStore(NamedTuple):
    """Each chosen latent's largest code on rows of the store of training."""

    codes: list[float]
    rows: int  # 0 without the store


@dataclass(frozen=True)
class CodeEdits:
    """Latents whose codes are changed: by a scale that is added, or to a scale."""

    latents: list[int]
    adds: list[bool]  # else its code is set
    scales: list[float]

    def __call__(self, z: Tensor) -> Tensor:
        """The codes, (..., F), changed in place."""
        scales, adds = z.new_tensor(self.scales), torch.tensor(self.adds, device=z.device)
        codes = z[..., self.latents]
        z[..., self.latents] = torch.where(adds, codes + scales, scales)
        return z


class Change(NamedTuple):
    placement: Placement
    method: str
    latents: list[int]
    scales: list[float]  # of each latent; empty if not given

    @property
    def edits(self) -> CodeEdits:
        return CodeEdits(self.latents, [self.method == "add"] * len(self.latents), self.scales)

    def demand_scales(self, reason: str = "") -> None:
        if not self.scales:
            raise ConfigError(
                f"--scale is needed with --method {self.method}, in units of the code{reason}"
            )

    def scaled_by(self, on_store: OnStore) -> "Change":
        """With the largest codes on the store for scales that are not given."""
        if self.scales:
            return self
        if not on_store.rows:
            self.demand_scales(
                f": the store of {self.placement.name}'s training, with the largest codes, is not here"
            )
        for latent, code in zip(self.latents, on_store.codes, strict=True):
            if code <= 0:
                rows = counted(on_store.rows, "row")
                self.demand_scales(f": latent {latent} does not fire on {rows} of the run's store")
        return self._replace(scales=on_store.codes)


def change_of(
    placement: Placement,
    method: str,
    latents: int | Sequence[int],
    scale: float | Sequence[float] | None,
) -> Change:
    numbers = chosen_latents(latents, placement.sae.d_sae, placement.name)
    if method == "ablate":
        if scale is not None:
            raise ConfigError("--scale does nothing with --method ablate; leave it out, or clamp")
        scale = 0.0
    scales = np.ravel([] if scale is None else scale).astype(float)
    if len(scales) not in (0, 1, len(numbers)):
        raise ConfigError("--scale must be given once, or once for each latent")
    if not np.isfinite(scales).all():
        raise ConfigError(f"--scale must be finite, got {', '.join(map(str, scales))}")
    if len(scales) == 1:
        scales = scales.repeat(len(numbers))
    return Change(placement, method, numbers, scales.tolist())


def largest_on_store(
    home: Home, opened: tuple[Subject, SavedSAE], device: str, latents: list[int]
) -> OnStore:
    largest = torch.full((len(latents),), -torch.inf)
    rows = 0
    for codes in own_codes(home, opened, device, SCANNED_ROWS, SCANNED_PRODUCTS):
        largest = largest.maximum(codes.dense()[:, latents].amax(0).float().cpu())
        rows += codes.shape[0]
    return OnStore(largest.tolist(), rows)


def steerable(
    opened: tuple[Subject, SavedSAE],
    method: str,
    model: "str | ModelSource | None",
    layer: int | None,
    site: str | None,
) -> Placement:
    """An SAE where it acts; of a crosscoder the decoder of one hook point."""
    if not opened[1].sae.widths:
        return placement(opened, layer, site)
    crosscoder = placement(opened, None, None)
    if method != "add":
        raise ConfigError(
            f"--method must be add with {crosscoder.name}, a crosscoder, whose codes need all hook points at "
            f"once, got {method}"
        )
    name = model if isinstance(model, str | None) else model.spec
    if name is not None and Path(name).is_dir():  # as stores name it
        name = str(Path(name).resolve())
    candidates = []
    for number, point in enumerate(crosscoder.writes):
        spec = str(crosscoder.models[point.model])
        of_model = len(crosscoder.models) == 1 or name in (None, spec, spec.partition("@")[0])
        if of_model and layer in (None, point.layer) and site in (None, point.site):
            candidates.append(number)
    if len(candidates) != 1:
        points = [
            f"{point_words(point.layer, point.site, ' ')} of {crosscoder.models[point.model]}"
            for point in crosscoder.writes
        ]
        raise ConfigError(
            f"--model, --layer and --site must choose one hook point of {crosscoder.name}, "
            f"{', '.join(points)}, got {len(candidates)}"
        )
    point, sae = crosscoder.writes[candidates[0]], crosscoder.sae
    place = sae.hook_columns[candidates[0]]
    part = SAE(
        sae.W_enc[place],
        sae.b_enc,
        sae.W_dec[:, place],
        sae.b_dec[place],
        sae.activation,
        sae.activation_parameters,
    )
    models = (crosscoder.models[point.model],)
    return Placement(crosscoder.name, part, models, (point,), (point,), crosscoder.prepend_bos)


@checked
@contextmanager
def steering(
    model: nn.Module,
    sae: SAELike,
    latents: int | Sequence[int],
    *,
    method: Method = "add",
    scale: float | Sequence[float] | None = None,
    layer: Layer = None,
    site: Site = None,
    module: Module = None,
    special: Sequence[int] | None = None,
    home: HomeLike = None,
) -> Iterator[None]:
    """While open, a transformers model runs with latents of an SAE changed at every token.

        with saecli.steering(model, "first", 12, scale=8):
            model.generate(**tokenizer("Once", return_tensors="pt"))

    Args:
        sae: as in `evaluate`; one in memory needs `layer` and `site`, or `module`, the hook point that it reads.
        method: add, clamp or ablate; `scale` is in units of the code, one for all latents or each.
        special: token ids whose activations stay; by default BOS, EOS and padding.
    """
    name = getattr(model.config, "name_or_path", None)
    opened = as_usual(open_sae)(Home.at(home), sae, Silent())
    sae_at = as_usual(steerable)(opened, method, name, *place_given(layer, site, module))
    change = change_of(sae_at, method, latents, scale)
    change.demand_scales()
    with editing(model, sae_at, change.edits, special):
        yield


@contextmanager
def editing(
    model: nn.Module,
    sae_at: Placement,
    edit: Callable[[Tensor], Tensor],
    special: Sequence[int] | None,
    modules: Modules | None = None,
) -> Iterator[None]:
    """While open, codes, (B, T, F), are changed by a function that may edit them in place."""
    # With the error constant, the gradient of what comes before would pass through the codes alone.
    splice = Splice(sae_at, edit, error=True, constant=False)
    with splices(model, [splice], special, modules=modules):
        yield


class Sampling(NamedTuple):
    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Prompts:
    model: LanguageModel
    texts: Sequence[str]
    inputs: list[Tensor]  # (1, T) each
    special: list[int]  # token ids whose activations stay
    read: Tensor  # what the SAE encodes, (N, D)
    written: Tensor  # where it acts, (N, E)

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        texts: Sequence[str],
        sae_at: Placement,
        encodes: bool,
        sampling: Sampling,
        listener: Listener,
    ) -> Self:
        """`encodes`: the SAE is no part of a crosscoder."""
        prefix = affixes(model.tokenizer, sae_at.prepend_bos).prefix
        most = sampling.max_new_tokens
        inputs = [prompt_ids(model, prefix, text, most, listener) for text in texts]
        special = sorted(special_ids(model.tokenizer, control=False))
        read, written = _activations(model, inputs, special, sae_at)
        return cls(model, texts, inputs, special, read if encodes else read[:0], written)

    def continued(
        self, change: Change, sampling: Sampling, listener: Listener
    ) -> list[dict[str, str]]:
        model, texts = self.model, TokenTexts(self.model.tokenizer)
        label = f"continuing with {model.source.name}"
        continuations = []
        with listener.progress(label, len(self.texts), "prompts") as show:
            for done, (prompt, token_ids) in enumerate(zip(self.texts, self.inputs, strict=True)):
                show(done)
                plain = texts.joined(model.continuation(token_ids, *sampling))
                steering = model.model, change.placement, change.edits, self.special
                with editing(*steering, model.modules):
                    steered = texts.joined(model.continuation(token_ids, *sampling))
                continuations.append({"prompt": prompt, "plain": plain, "steered": steered})
        return continuations


def prompt_ids(
    model: LanguageModel, prefix: list[int], prompt: str, most: int, listener: Listener
) -> Tensor:
    """(1, T), after the special tokens that windows begin with."""
    own_ids, is_repeated = text_ids(model.tokenizer, prompt, prefix)
    if is_repeated:
        listener.warn(f"--prompt {REPEATED}")
    token_ids = [*prefix, *own_ids]
    room = (model.source.positions or torch.inf) - len(token_ids)
    if most > room:
        raise ConfigError(
            f"--max-new-tokens must be at most {max(0, room)}, the positions of {model.source.name} that "
            f"--prompt leaves, got {most}; lower it, or shorten the text"
        )
    inputs = torch.tensor(token_ids, dtype=torch.int64)[None]
    model.check_tokens(inputs)
    return inputs


def _activations(
    model: LanguageModel, inputs: list[Tensor], special: list[int], sae_at: Placement
) -> tuple[Tensor, Tensor]:
    """Where the SAE reads and writes, (N, D) and (N, E), at the tokens that are changed."""
    windows = []
    for token_ids in inputs:
        changed = ~np.isin(token_ids[0].numpy(), special)
        changed[:1] = False
        windows.append(TextWindow(token_ids[0].numpy(), changed))
    points = list(dict.fromkeys([sae_at.read, sae_at.written]))
    batches = stored_activations(model, windows, points, 1)
    at_points = [torch.cat(parts).float() for parts in zip(*batches, strict=True)]
    return at_points[0], at_points[-1]


def steering_document(
    prompts: Prompts,
    change: Change,
    on_store: OnStore,
    sampling: Sampling,
    labels: Mapping[int, str],
    continuations: list[dict[str, str]],
) -> dict[str, Any]:
    sae_at = change.placement
    norms = prompts.written.norm(dim=1)
    return {
        "run": sae_at.name,
        "model": prompts.model.source.name,
        **sae_at.origin.to_json(),
        "method": change.method,
        "activation_norm": float(norms.quantile(0.5)) if len(norms) else None,
        "store_rows": on_store.rows or None,
        "latents": _latent_lines(change, prompts.read, on_store, labels),
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed if sampling.temperature else None,
        "continuations": continuations,
    }


def _latent_lines(
    change: Change, x: Tensor, on_store: OnStore, labels: Mapping[int, str]
) -> list[dict[str, Any]]:
    sae = change.placement.sae
    codes = sae.copy_to(x.device).encode(x)[:, change.latents]  # (N, S)
    return [
        {
            "latent": latent,
            "scale": change.scales[number],
            "decoder_norm": float(sae.W_dec[latent].norm()),
            "prompt_max": float(codes[:, number].max()) if len(codes) else None,
            "store_max": on_store.codes[number] if on_store.rows else None,
            "label": labels.get(latent),
        }
        for number, latent in enumerate(change.latents)
    ]
