"""A language model run with some latents of an SAE changed at every token.

    add       x' = x + scale W_dec[i]            the code of latent i plus scale
    clamp     x' = x + (scale - z_i) W_dec[i]    the code set to scale
    ablate    x' = x - z_i W_dec[i]              the code set to 0

summed over the chosen latents i, with z the codes of x: the reconstruction error stays. A transcoder's codes are of the
activations that it reads, and those that it predicts are changed. A crosscoder's need all its hook points, perhaps of
several models, at once: its latents can be added at one of them. Special tokens (BOS) keep their activations, and so
does the first token of a text, which is the attention sink where there is no BOS.

Sources: Turner et al., "Steering Language Models With Activation Engineering" (2023), for adding; Templeton et al.,
"Scaling Monosemanticity" (2024), for clamping. Shapes: T tokens, N of them not special, S chosen latents, E = d_out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..base.console import Listener, Silent, listening
from ..base.devices import as_usual, device_named
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.words import counted, demand_at_least, demand_text, unknown_choice
from ..extract.chats import REPEATED
from ..model.choice import ModelLike, model_given, source_of
from ..model.language_model import LanguageModel
from ..model.saes import open_sae
from ..model.tokenizer import TokenTexts, affixes, special_ids, text_ids
from ..model.windows import TextWindow, stored_activations
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import SAELike, Subject
from ..splice.generation import continuation
from ..splice.hooked import Hooked, hooked, model_of
from ..splice.spliced import Splice, splices
from ..store.origin import place_given, point_words
from .labels import shown_labels
from .latents import chosen_latents
from .measured import own_codes

METHODS = ("add", "clamp", "ablate")
NEW_TOKENS = 40
SCANNED_ROWS, SCANNED_PRODUCTS = 1 << 16, 1 << 38  # of the store at most


class _Change(NamedTuple):
    hooked: Hooked
    method: str
    latents: list[int]
    scales: list[float]  # of each latent; empty if not given


def _change(
    hooked: Hooked, method: str, latents: int | Sequence[int], scale: float | Sequence[float] | None
) -> _Change:
    if method not in METHODS:
        raise unknown_choice("method", method, METHODS)
    numbers = chosen_latents(latents, hooked.sae.d_sae, hooked.name)
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
    return _Change(hooked, method, numbers, scales.tolist())


def _largest_on_store(
    home: Home, opened: tuple[Subject, SavedSAE], device: str, latents: list[int]
) -> tuple[list[float], int] | None:
    """The largest code of each latent on rows of the store that an SAE was trained on, and the number of these rows;
    None without the store."""
    largest = torch.full((len(latents),), -torch.inf)
    rows = 0
    for codes in own_codes(home, opened, device, SCANNED_ROWS, SCANNED_PRODUCTS):
        largest = largest.maximum(codes.dense()[:, latents].amax(0).float().cpu())
        rows += codes.shape[0]
    return (largest.tolist(), rows) if rows else None


def _hooked(
    opened: tuple[Subject, SavedSAE],
    method: str,
    model: str | None,
    layer: int | None,
    site: str | None,
) -> Hooked:
    """An SAE where it acts; of a crosscoder the decoder of one of its hook points."""
    if not opened[1].sae.widths:
        return hooked(opened, layer, site)
    crosscoder = hooked(opened, None, None)
    if method != "add":
        raise ConfigError(
            f"--method must be add with {crosscoder.name}: a crosscoder's codes need the activations at "
            f"all its hook points at once, got {method}"
        )
    if model is not None and Path(model).is_dir():  # as stores name it
        model = str(Path(model).resolve())
    candidates = []
    for number, point in enumerate(crosscoder.writes):
        spec = str(crosscoder.models[point.model])
        of_model = len(crosscoder.models) == 1 or model in (None, spec, spec.partition("@")[0])
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
    return Hooked(crosscoder.name, part, models, (point,), (point,), crosscoder.prepend_bos)


@contextmanager
def steering(
    model: nn.Module,
    sae: SAELike,
    latents: int | Sequence[int],
    *,
    method: str = "add",
    scale: float | Sequence[float] | None = None,
    layer: int | None = None,
    site: str | None = None,
    module: str | None = None,
    special: Sequence[int] | None = None,
    home: str | Path | Home | None = None,
) -> Iterator[None]:
    """While open, a transformers model runs with latents of an SAE changed at every token.

        with saecli.steering(model, "first", 12, scale=8):
            model.generate(**tokenizer("Once", return_tensors="pt"))

    Args:
        sae: as in `evaluate`; one in memory needs `layer` and `site`, or `module`, the hook point that it reads.
        method: add, clamp or ablate, as above; `scale` is in units of the latent's code, one for all latents or each.
        special: token ids whose activations stay; by default the model's BOS, EOS and padding.
    """
    name = getattr(model.config, "name_or_path", None)
    opened = as_usual(open_sae)(Home.at(home), sae, Silent())
    place = place_given(layer, site, module)
    change = _change(as_usual(_hooked)(opened, method, name, *place), method, latents, scale)
    if not change.scales:
        raise ConfigError(f"--scale is needed with --method {method}, in units of the code")
    with _changed(model, change, special):
        yield


@contextmanager
def _changed(model: nn.Module, change: _Change, special: Sequence[int] | None) -> Iterator[None]:
    def change_codes(z: Tensor) -> Tensor:
        scales = z.new_tensor(change.scales)
        added = change.method == "add"
        z[..., change.latents] = z[..., change.latents] + scales if added else scales
        return z

    # With the error constant, the gradient of what comes before would pass through the codes alone.
    splice = Splice(change.hooked, change_codes, error=True, constant=False)
    with splices(model, [splice], special):
        yield


def steer(
    sae: SAELike,
    latents: int | Sequence[int],
    prompts: str | Sequence[str],
    *,
    method: str = "add",
    scale: float | Sequence[float] | None = None,
    model: ModelLike | None = None,
    tokenizer: Any = None,
    layer: int | None = None,
    site: str | None = None,
    module: str | None = None,
    max_new_tokens: int = NEW_TOKENS,
    temperature: float = 0.0,
    seed: int = 0,
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Continue prompts with latents of an SAE changed, and without; arguments as in `steering` and `sae steer --help`,
    and `model` may be a loaded one, with its `tokenizer`.

    Returns:
        The arguments as used, `scale` by default each latent's largest code on the store; `activation_norm`, the median
        norm of the prompts' activations that are changed, None if none is; `latents`, each with its `label` in the
        run's `labels.json`, if any, `decoder_norm`, `prompt_max` and `store_max`, its largest codes on the prompts and
        on `store_rows` rows of the store that the SAE was trained on, None without these; and `continuations`, for each
        `prompt` the texts that follow it, `plain` and `steered`.
    """
    demand_at_least("temperature", temperature, 0)
    prompts = [prompts] if isinstance(prompts, str) else prompts
    for prompt in prompts:
        demand_text("--prompt", prompt)
    listener, home = listening(progress), Home.at(home)
    given = model_given(model, tokenizer)
    if isinstance(given, str) and "@" in given:  # a branch or a tag, where SAEs name a commit
        given = source_of(given, ())
    opened = open_sae(home, sae, listener)
    name = given if isinstance(given, str | None) else given.spec
    sae_at = _hooked(opened, method, name, *place_given(layer, site, module))
    change = _change(sae_at, method, latents, scale)
    labels = shown_labels(opened[0].folder, opened[1].sae.d_sae)
    largest, store_rows = _largest_on_store(home, opened, device, change.latents) or (None, None)
    if not change.scales:
        if largest is None:
            raise ConfigError(
                f"--scale is needed with --method {method}, in units of the code: the store that "
                f"{sae_at.name} was trained on is not here to take each latent's largest code from"
            )
        for latent, code in zip(change.latents, largest, strict=True):
            if code <= 0:
                raise ConfigError(
                    f"--scale is needed with --method {method}, in units of the code: latent {latent} "
                    f"does not fire on {counted(store_rows or 0, 'row')} of the run's store"
                )
        change = change._replace(scales=largest)
    source = model_of([sae_at], given, listener)
    loaded = LanguageModel(source, device_named(device), head=True)
    prefix = affixes(loaded.tokenizer, sae_at.prepend_bos).prefix
    inputs = [_token_ids(loaded, prefix, prompt, max_new_tokens, listener) for prompt in prompts]
    special = sorted(special_ids(loaded.tokenizer, control=False))
    read, written = _activations(loaded, inputs, special, sae_at)
    encodes = not opened[1].sae.widths  # a part of a crosscoder cannot
    texts = TokenTexts(loaded.tokenizer)
    continuations = []
    with listener.progress(f"continuing with {source.name}", len(prompts), "prompts") as show:
        for done, (prompt, token_ids) in enumerate(zip(prompts, inputs, strict=True)):
            show(done)
            arguments = (loaded, token_ids, max_new_tokens, temperature, seed)
            plain = texts.joined(continuation(*arguments))
            with _changed(loaded.model, change, special):
                steered = texts.joined(continuation(*arguments))
            continuations.append({"prompt": prompt, "plain": plain, "steered": steered})
    return {
        "run": sae_at.name,
        "model": source.name,
        **sae_at.origin.to_json(),
        "method": method,
        "activation_norm": float(written.norm(dim=1).quantile(0.5)) if len(written) else None,
        "store_rows": store_rows,
        "latents": [
            line | {"label": labels.get(line["latent"])}
            for line in _latent_lines(change, read if encodes else read[:0], largest)
        ],
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed if temperature else None,
        "continuations": continuations,
    }


def _token_ids(
    model: LanguageModel, prefix: list[int], prompt: str, most: int, listener: Listener
) -> Tensor:
    """A prompt's tokens, (1, T), after the special ones that windows begin with."""
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
    model: LanguageModel, inputs: list[Tensor], special: list[int], sae_at: Hooked
) -> tuple[Tensor, Tensor]:
    """The activations that an SAE reads and writes, (N, D) and (N, E), at the prompts' tokens that are changed."""
    windows = []
    for token_ids in inputs:
        changed = ~np.isin(token_ids[0].numpy(), special)
        changed[:1] = False
        windows.append(TextWindow(token_ids[0].numpy(), changed))
    points = list(dict.fromkeys([sae_at.read, sae_at.written]))
    batches = stored_activations(model, windows, points, 1)
    at_points = [torch.cat(parts).float() for parts in zip(*batches, strict=True)]
    return at_points[0], at_points[-1]


def _latent_lines(change: _Change, x: Tensor, on_store: list[float] | None) -> list[dict[str, Any]]:
    """Each latent, with its largest codes on the prompts' activations, (N, D), and on the store."""
    sae = change.hooked.sae
    codes = sae.copy_to(x.device).encode(x)[:, change.latents]  # (N, S)
    return [
        {
            "latent": latent,
            "scale": change.scales[number],
            "decoder_norm": float(sae.W_dec[latent].norm()),
            "prompt_max": float(codes[:, number].max()) if len(codes) else None,
            "store_max": None if on_store is None else on_store[number],
        }
        for number, latent in enumerate(change.latents)
    ]
