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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..base.console import Listener, Silent, listening
from ..base.devices import device_named
from ..base.errors import ConfigError, counted
from ..base.home import Home
from ..extract.language_model import LanguageModel, blocks_of
from ..extract.model_source import find_model
from ..extract.passes import Passes
from ..extract.sites import intercepted
from ..extract.special import affixes, special_ids
from ..extract.splice import Hooked, StoredWindow, hooked, model_of, stored_activations
from ..extract.tokens import TokenTexts, continuation, first_tokens
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import SAELike, Subject, open_sae
from .latents import largest_codes
from .measured import with_rows

METHODS, NEW_TOKENS = ("add", "clamp", "ablate"), 40


def _refuse(option: str, wrong: object, sentence: str) -> None:
    if wrong:
        raise ConfigError(f"--{option} {sentence}")


def _chosen(
    one: Hooked, method: str, latents: int | Sequence[int], scale: float | Sequence[float] | None
) -> tuple[list[int], list[float]]:
    _refuse("method", method not in METHODS, f"must be one of {', '.join(METHODS)}, got {method!r}")
    given, last = np.ravel(latents), one.sae.d_sae - 1
    scales = np.ravel([] if scale is None else scale).astype(float).tolist()
    _refuse(
        "latent",
        not given.size or given.dtype.kind not in "iu",
        f"must be the number of a latent, got {latents}",
    )
    for each in given:
        _refuse(
            "latent",
            not 0 <= each <= last,
            f"must be from 0 to {last}, the last of {one.name}, got {each}",
        )
    _refuse(
        "latent",
        len(np.unique(given)) < given.size,
        f"names a latent twice in {given.tolist()}; name each once",
    )
    _refuse(
        "scale",
        method == "ablate" and scales,
        "does nothing with --method ablate; leave it out, or clamp",
    )
    _refuse(
        "scale",
        len(scales) not in (0, 1, given.size),
        "must be given once, or once for each latent",
    )
    _refuse(
        "scale", not np.isfinite(scales).all(), f"must be finite, got {', '.join(map(str, scales))}"
    )
    if method == "ablate":
        scales = [0.0]
    return given.tolist(), np.broadcast_to(scales, given.shape).tolist() if scales else []


def _on_store(
    home: Home, opened: tuple[Subject, SavedSAE], device: str, latents: list[int]
) -> tuple[list[float], int, str] | None:
    """The largest codes of latents on the store that an SAE from `open_sae` was trained on, the number of rows looked
    at, and the store's name; None where there is no such store, or it does not fit."""
    subject, _ = opened
    trained_on = [name for name in (subject.data, *subject.beside, subject.target) if name]
    if not trained_on or any(
        name not in home.stores.names() and not Path(name).exists() for name in trained_on
    ):
        return None
    try:
        one = with_rows(home, opened, None, "all", device, Silent())
    except ConfigError:  # a store made anew under the name may have other rows, or no targets
        return None
    return *largest_codes(one, latents), one.rows.name


def _default_scales(
    method: str, name: str, latents: list[int], on_store: tuple[list[float], int, str] | None
) -> list[float]:
    """Each latent's largest code on the store."""
    _refuse(
        "scale",
        on_store is None,
        f"is needed with --method {method}, in units of the code: the store that {name} was trained on "
        "is not here to take each latent's largest code from",
    )
    assert on_store is not None
    largest, rows, store = on_store
    for latent, code in zip(latents, largest, strict=True):
        _refuse(
            "scale",
            code <= 0,
            f"is needed with --method {method}, in units of the code: latent {latent} does not fire on "
            f"{counted(rows, 'row')} of {store}",
        )
    return largest


def _opened(
    opened: tuple[Subject, SavedSAE],
    method: str,
    model: str | None,
    layer: int | None,
    site: str | None,
) -> tuple[Hooked, bool]:
    """An SAE where it acts, and whether it can encode; of a crosscoder the decoder of one of its hook points."""
    if not opened[1].sae.widths:
        return hooked(opened, layer, site), True
    one = hooked(opened, None, None)
    _refuse(
        "method",
        method != "add",
        f"must be add with {one.name}: a crosscoder's codes need the activations at all "
        f"its hook points at once, got {method}",
    )
    if len(one.models) == 1 or model is None:
        model = None
    elif Path(model).is_dir():  # as stores name it
        model = str(Path(model).resolve())
    found = [
        (place, point)
        for place, point in zip(one.sae.places, one.writes, strict=True)
        if model in (None, one.models[point.model], str(one.models[point.model]).partition("@")[0])
        and layer in (None, point.layer)
        and site in (None, point.site)
    ]
    if len(found) != 1:
        named = ", ".join(
            f"layer {at.layer} {at.site} of {one.models[at.model]}" for at in one.writes
        )
        raise ConfigError(
            f"--model, --layer and --site must choose one hook point of {one.name}, {named}, got "
            f"{len(found)}"
        )
    ((place, point),), sae = found, one.sae
    part = SAE(
        sae.W_enc[place],
        sae.b_enc,
        sae.W_dec[:, place],
        sae.b_dec[place],
        sae.activation,
        sae.activation_parameters,
    )
    return Hooked(one.name, part, one.models[point.model :][:1], (point,), (point,)), False


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
    special: Sequence[int] | None = None,
    home: str | Path | Home | None = None,
) -> Iterator[None]:
    """While open, a transformers model runs with latents of an SAE changed at every token.

        with saecli.steering(model, "first", 12, scale=8):
            model.generate(**tokenizer("Once", return_tensors="pt"))

    Args:
        sae: as in `evaluate`; one in memory needs `layer` and `site`, the hook point that it reads.
        method: add, clamp or ablate, as above; `scale` is in units of the latent's code, one for all latents or each.
        special: token ids whose activations stay; by default the model's BOS, EOS and padding.
    """
    name = getattr(model.config, "name_or_path", None)
    opened = open_sae(Home.at(home), sae, Silent())
    one, _ = _opened(opened, method, name, layer, site)
    chosen, scales = _chosen(one, method, latents, scale)
    _refuse("scale", not scales, f"is needed with --method {method}, in units of the code")
    with _changed(model, one, method, chosen, scales, special):
        yield


@contextmanager
def _changed(
    model: nn.Module,
    one: Hooked,
    method: str,
    latents: list[int],
    scales: list[float],
    special: Sequence[int] | None,
) -> Iterator[None]:
    config = cast(Any, model.config).get_text_config()
    name = getattr(config, "name_or_path", "") or type(model).__name__
    one.check(config.hidden_size, config.num_hidden_layers, name)
    if special is None:
        ids = [getattr(config, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad")]
        special = [each for found in ids if found is not None for each in np.ravel(found).tolist()]
    (_, blocks), device = (
        blocks_of(model, config.num_hidden_layers, name),
        next(model.parameters()).device,
    )
    sae, kept = (
        one.sae.copy_to(device),
        torch.tensor(sorted(special), dtype=torch.int64, device=device),
    )
    W = sae.W_dec[latents]  # (S, E)
    batch: dict[str, Tensor | None] = {
        "plain": None,
        "read": None,
    }  # which tokens are changed; what is encoded

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token_ids = kwargs.get("input_ids", args[0] if args else None)  # none with inputs_embeds
        if token_ids is None:
            shape = kwargs["inputs_embeds"].shape[:2]
            plain = torch.ones(shape, dtype=torch.bool, device=device)
        else:
            plain = ~torch.isin(token_ids.to(device), kept)
        plain[first_tokens(plain, kwargs)] = False
        batch.update(plain=plain, read=None)

    def read(x: Tensor) -> Tensor:
        batch["read"] = x.clone()  # a model may add to it in place
        return x

    def write(y: Tensor) -> Tensor:
        x, plain = y if one.read == one.written else batch["read"], batch["plain"]
        assert plain is not None
        if x is None:
            raise ConfigError(
                f"{one.name} cannot steer {name}: it reads layer {one.read.layer}, {one.read.site} after "
                f"layer {one.written.layer}, {one.written.site}, which it predicts; name another run"
            )
        steps, steered = torch.tensor(scales).to(W), y.clone()
        if method != "add":
            steps = steps - sae.encode(x[plain.to(x.device)].to(W))[:, latents]  # (N, S)
        steered[plain.to(y.device)] += (steps @ W).to(y)
        return steered

    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        if one.read != one.written:
            hooks.enter_context(intercepted(blocks[one.read.layer], one.read.site, read, blocks))
        hooks.enter_context(intercepted(blocks[one.written.layer], one.written.site, write, blocks))
        yield


def steer(
    sae: SAELike,
    latents: int | Sequence[int],
    prompts: str | Sequence[str],
    *,
    method: str = "add",
    scale: float | Sequence[float] | None = None,
    model: str | None = None,
    model_revision: str | None = None,
    layer: int | None = None,
    site: str | None = None,
    max_new_tokens: int = NEW_TOKENS,
    temperature: float = 0.0,
    seed: int | None = None,
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Continue prompts with latents of an SAE changed, and without; arguments as in `steering` and `sae steer --help`.

    Returns:
        The arguments as used, `scale` by default each latent's largest code on the store; `activation_norm`, the median
        norm of the prompts' activations that are changed, None if none is; `latents`, each with `decoder_norm`,
        `prompt_max` and `store_max`, its largest codes on the prompts and on `store_rows` rows of the store that the
        SAE was trained on, None without these; and `continuations`, for each `prompt` the texts that follow it, `plain`
        and `steered`.
    """
    prompts, listener = [prompts] if isinstance(prompts, str) else prompts, listening(progress)
    _refuse(
        "temperature",
        not 0 <= temperature < np.inf,
        f"must be at least 0, and finite, got {temperature}",
    )
    _refuse(
        "seed",
        seed is not None and not temperature,
        "does nothing without --temperature, such as 1; leave it out",
    )
    if model is not None and model_revision is not None:
        model, model_revision = find_model(model, model_revision).spec, None
    opened = open_sae(Home.at(home), sae, listener)
    one, encodes = _opened(opened, method, model, layer, site)
    chosen, scales = _chosen(one, method, latents, scale)
    on_store = _on_store(Home.at(home), opened, device, chosen)
    scales = scales or _default_scales(method, one.name, chosen, on_store)
    source = model_of([one], model, model_revision, listener)
    loaded = LanguageModel(source, device_named(device), head=True)
    Passes(loaded)  # refuses a model that is not causal
    prepend_bos = opened[1].origin.get("prepend_bos") is not False
    prefix = affixes(loaded.tokenizer, prepend_bos).prefix
    inputs = [_token_ids(loaded, prefix, prompt, max_new_tokens) for prompt in prompts]
    special = sorted(special_ids(loaded.tokenizer, control=False))
    texts = TokenTexts(loaded.tokenizer)
    found: list[dict[str, str]] = []
    windows = [_changed_tokens(token_ids[0].numpy(), special) for token_ids in inputs]
    places = list(dict.fromkeys([one.read, one.written]))
    rows = [*zip(*stored_activations(loaded, windows, places, 1), strict=True)]
    read, written = torch.cat(rows[0]), torch.cat(rows[-1])  # (N, D), (N, E)
    codes = one.sae.copy_to(loaded.device).encode(read)  # (N, F)
    norm = float(written.float().norm(dim=1).quantile(0.5)) if len(written) else None
    largest: Sequence[float | None]
    largest, rows_seen = on_store[:2] if on_store else ([None] * len(chosen), None)
    with listener.progress(f"continuing with {source.name}", 2 * len(prompts), "texts") as show:
        for prompt, token_ids in zip(prompts, inputs, strict=True):
            settings = loaded, token_ids, max_new_tokens, temperature, seed or 0
            plain = texts.joined(continuation(*settings))
            show(2 * len(found) + 1)
            with _changed(loaded.model, one, method, chosen, scales, special):
                found.append(
                    {
                        "prompt": prompt,
                        "plain": plain,
                        "steered": texts.joined(continuation(*settings)),
                    }
                )
            show(2 * len(found))
    target = {
        f"target_{key}": value
        for key, value in one.written.place.items()
        if one.read != one.written
    }
    return {
        "run": one.name,
        "model": source.name,
        **one.read.place,
        **target,
        "method": method,
        "activation_norm": norm,
        "store_rows": rows_seen,
        "latents": [
            {
                "latent": latent,
                "scale": scale,
                "decoder_norm": float(one.sae.W_dec[latent].norm()),
                "prompt_max": float(codes[:, latent].max()) if len(codes) and encodes else None,
                "store_max": code,
            }
            for latent, scale, code in zip(chosen, scales, largest, strict=True)
        ],
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": (seed or 0) if temperature else None,
        "continuations": found,
    }


def _changed_tokens(token_ids: np.ndarray, special: Sequence[int]) -> StoredWindow:
    changed = ~np.isin(token_ids, special)
    changed[:1] = False
    return StoredWindow(token_ids, changed)


def _token_ids(model: LanguageModel, prefix: list[int], prompt: str, most: int) -> Tensor:
    """A prompt's tokens, (1, T), after the special ones that windows begin with."""
    text = prompt.encode(errors="ignore").decode()
    _refuse(
        "prompt",
        not prompt or text != prompt,
        f"must be a text to continue, in UTF-8, got {prompt!a}",
    )
    own = model.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    if own[: len(prefix)] != prefix:
        own = [*prefix, *own]
    token_ids = torch.tensor(own, dtype=torch.int64)[None]
    model.check_tokens(token_ids)
    room = (model.source.positions or torch.inf) - token_ids.shape[1]
    _refuse(
        "max-new-tokens",
        most > room,
        f"must be at most {max(0, room)}, the positions of {model.source.name} that "
        f"--prompt leaves, got {most}; lower it, or shorten the text",
    )
    return token_ids
