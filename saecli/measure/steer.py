"""`sae steer`, and the same from Python: what a language model writes with latents of an SAE changed, beside what it
writes by itself.

Shapes: B = 1 prompt, T tokens, N tokens that are not special, S chosen latents.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.errors import ConfigError
from ..base.home import Home
from ..extract.language_model import LanguageModel
from ..extract.tokens import TokenTexts, continuation
from ..sae.library import SAELike
from .placing import Placed, model_of, placed
from .steering import Change, changed

NEW_TOKENS = 40  # of a continuation


def steer(sae: SAELike, latents: int | Sequence[int], prompts: str | Sequence[str], *, method: str = "add",
          scale: float | Sequence[float] | None = None, model: str | None = None, layer: int | None = None,
          site: str | None = None, max_new_tokens: int = NEW_TOKENS, temperature: float = 0.0, seed: int | None = None,
          device: str = "auto", home: str | Path | None = None, progress: bool = False) -> dict[str, Any]:
    """Continue prompts with a language model in which latents of an SAE are changed, and without, as `sae steer` does.

    Args:
        sae, latents, method, scale, layer, site: as of `steering`; a `sae` of None is the newest run.
        prompts: a text, or several.
        model: hub id or folder of the language model; None for the one whose activations the SAE was trained on.
        max_new_tokens: tokens of a continuation, at least 1; it also ends where the model ends a text.
        temperature: of sampling; 0 for the likeliest token each time.
        seed: of sampling, the same for each continuation; None for 0.
        device: where to compute: cpu, cuda, cuda:1; auto takes cuda where there is one.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        progress: show progress, and the choices made, on stderr.

    Returns:
        run, model, layer, site: names and numbers; of a transcoder also `target_layer` and `target_site`.
        method: as given.
        activation_norm: mean norm of the activations that are changed, at the prompts' tokens.
        latents: of each `latent`, its number; `scale`; `decoder_norm`; and `prompt_max`, its largest code on the
            prompts' tokens.
        max_new_tokens, temperature, seed: as given; a seed of None without sampling.
        continuations: of each prompt `prompt`; `plain` and `steered`, the texts that follow it.

    Raises:
        ConfigError: an argument that cannot work; see `steering`.
        RunError, FormatError, HubError, ModelError: something is missing or cannot be read.
    """
    prompts = [prompts] if isinstance(prompts, str) else prompts
    return steered(Home.at(home), sae, latents, prompts, method, scale, model, layer, site, max_new_tokens, temperature,
                   seed, device, listening(progress))


def steered(home: Home, sae: SAELike, latents: int | Sequence[int], prompts: Sequence[str], method: str,
            scale: float | Sequence[float] | None, model: str | None, layer: int | None, site: str | None,
            max_new_tokens: int, temperature: float, seed: int | None, device: str,
            listener: Listener) -> dict[str, Any]:
    """The document that `sae steer --json` prints; arguments as of `steer`."""
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {max_new_tokens}", option="max_new_tokens")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"--temperature must be at least 0, and finite, got {temperature}", option="temperature")
    if seed is not None and not temperature:
        raise ConfigError("--seed does nothing without --temperature; leave it out, or sample with --temperature 1",
                          option="seed")
    if not prompts:
        raise ConfigError("--prompt is needed: expected a text to continue, got none; give one with --prompt",
                          option="prompt")
    one = placed(home, sae, layer, site, "steering", listener)
    change = Change.of(method, latents, scale, one.subject.name, one.sae.d_sae)
    source = model_of([one], model, listener)
    loaded = LanguageModel(source, device_named(device), head=True)
    inputs = [_token_ids(loaded, prompt, max_new_tokens) for prompt in prompts]
    special = loaded.tokenizer.all_special_ids
    measures = _on_prompts(loaded, one, change, inputs, torch.tensor(sorted(special)))
    texts, found = TokenTexts(loaded.tokenizer), []
    with listener.progress(f"continuing with {source.name}", 2 * len(prompts), "texts") as show:
        for prompt, token_ids in zip(prompts, inputs, strict=True):
            settings = loaded, token_ids, max_new_tokens, temperature, seed or 0
            plain = continuation(*settings)
            show(2 * len(found) + 1)
            with changed(loaded.model, one, change, special):
                other = continuation(*settings)
            found.append({"prompt": prompt, "plain": texts.joined(plain), "steered": texts.joined(other)})
            show(2 * len(found))
    target = {} if one.read == one.written else {f"target_{name}": value for name, value in
                                                 one.written._asdict().items()}
    return {"run": one.subject.name, "model": source.name, **one.read._asdict(), **target, "method": method, **measures,
            "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": (seed or 0) if temperature else None,
            "continuations": found}


def _token_ids(model: LanguageModel, prompt: str, most: int) -> Tensor:
    """The token ids of a prompt, as the model's tokenizer begins a text, (1, T); ConfigError if it is empty or no
    text, or leaves no room for `most` tokens."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--prompt must be text in UTF-8, got {prompt!a}", option="prompt") from None
    token_ids = torch.tensor(model.tokenizer(prompt, verbose=False)["input_ids"], dtype=torch.int64)[None]
    if not prompt or not token_ids.numel():
        raise ConfigError("--prompt must be a text to continue, got an empty one", option="prompt")
    model.check_tokens(token_ids)
    positions, length = model.source.positions, token_ids.shape[1]
    if positions is not None and length + most > positions:
        raise ConfigError("--max-new-tokens must leave room for the prompt: expected at most "
                          f"{max(0, positions - length)}, the {positions} positions of {model.source.name} less the "
                          f"{length} of --prompt, got {most}; lower it, or shorten the text", option="max_new_tokens")
    return token_ids


@torch.no_grad()
def _on_prompts(model: LanguageModel, one: Placed, change: Change, inputs: Sequence[Tensor],
                special: Tensor) -> dict[str, Any]:
    """The entries `activation_norm` and `latents` of the document."""
    places, read, written = list(dict.fromkeys([one.read, one.written])), [], []
    sae = one.sae.copy_to(model.device)
    for token_ids in inputs:
        plain = ~torch.isin(token_ids, special).to(model.device)
        found = model.read(token_ids, torch.ones_like(token_ids), places, lambda x, plain=plain: x[plain].to(sae.W_enc))
        read.append(found[0])
        written.append(found[-1])
    codes = sae.encode(torch.cat(read))[:, list(change.latents)]  # (N, S)
    norms = sae.W_dec[list(change.latents)].norm(dim=1).tolist()
    largest = codes.amax(0).tolist() if len(codes) else [None] * len(norms)
    lines = [{"latent": latent, "scale": scale, "decoder_norm": norm, "prompt_max": most} for latent, scale, norm, most
             in zip(change.latents, change.scales, norms, largest, strict=True)]
    return {"activation_norm": float(torch.cat(written).norm(dim=1).mean()), "latents": lines}
