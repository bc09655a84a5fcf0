"""Steering: a language model run with some latents of an SAE changed at every token.

    add       x' = x + scale W_dec[i]            the code of latent i plus scale
    clamp     x' = x + (scale - z_i) W_dec[i]    the code set to scale
    ablate    x' = x - z_i W_dec[i]              the code set to 0

summed over the chosen latents i, with z the codes of x. This is the reconstruction from the changed codes plus the
error of the one from the codes as they are, `x - x_hat`, so that what the SAE does not explain stays in the model. A
transcoder's codes are of what it reads, and what it predicts is changed. Special tokens (BOS) keep their activations.

Sources: Turner et al., "Steering Language Models With Activation Engineering" (2023), for adding; Templeton et al.,
"Scaling Monosemanticity" (2024), for clamping, with the error kept.

Shapes: B sequences, T tokens, N of the tokens, D = d_in, E = d_out, S chosen latents.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..base.console import Silent
from ..base.errors import ConfigError, unknown_choice
from ..base.home import Home
from ..extract.hook_points import HookPoint, intercepted
from ..extract.language_model import blocks_of
from ..sae.dictionary import SAE
from ..sae.library import SAELike
from .placing import Placed, check_width, placed

METHODS = ("add", "clamp", "ablate")


@dataclass(frozen=True)
class Change:
    """A change of latents' codes.

    Args:
        method: one of `METHODS`.
        latents: their numbers.
        scales: what is added to the code of each, or what it is set to, in units of the code; 0 to ablate.
    """

    method: str
    latents: tuple[int, ...]
    scales: tuple[float, ...]

    @classmethod
    def of(cls, method: str, latents: int | Sequence[int], scale: float | Sequence[float] | None, name: str,
           d_sae: int) -> "Change":
        """The change that a user asks for, of an SAE of that name and number of latents.

        Args:
            method: one of `METHODS`.
            latents: at least one.
            scale: of all latents, or one of each; None to ablate.
            name: the SAE's, for messages.
            d_sae: its number of latents.

        Raises:
            ConfigError: the SAE lacks a latent, one is named twice, or a scale is missing, idle or not finite.
        """
        if method not in METHODS:
            raise unknown_choice("method", method, METHODS)
        given = np.ravel(latents)
        if not given.size or given.dtype.kind not in "iu":
            raise ConfigError(f"--latent must be the number of a latent, or several, got {latents}", option="latent")
        numbers = tuple(given.tolist())
        for number in numbers:
            if not 0 <= number < d_sae:
                raise ConfigError(f"--latent must be from 0 to {d_sae - 1}, the last of {name}, got {number}",
                                  option="latent")
            if numbers.count(number) > 1:
                raise ConfigError(f"--latent names {number} twice; name each latent once", option="latent")
        scales = () if scale is None else tuple(np.ravel(scale).tolist())
        if method == "ablate":
            if scales:
                raise ConfigError("--scale does nothing with --method ablate; leave it out, or use --method clamp",
                                  option="scale")
            return cls(method, numbers, (0.0,) * len(numbers))
        if not scales:
            raise ConfigError(f"--scale is needed with --method {method}: expected a number in units of the latent's "
                              "code, got none; give one", option="scale")
        if len(scales) not in (1, len(numbers)):
            raise ConfigError(f"--scale must be given once, or once for each of {len(numbers)} latents, got "
                              f"{len(scales)} of them", option="scale")
        if not all(map(math.isfinite, scales)):
            raise ConfigError(f"--scale must be finite, got {', '.join(map(str, scales))}", option="scale")
        return cls(method, numbers, tuple(map(float, scales * len(numbers) if len(scales) == 1 else scales)))

    def effect(self, sae: SAE, x: Tensor) -> Tensor:
        """What is added to the activations that the SAE predicts, (N, E), given those that it reads, (N, D)."""
        chosen = torch.tensor(self.latents, device=x.device)
        steps = torch.tensor(self.scales, device=x.device, dtype=x.dtype).expand(len(x), -1)  # (N, S)
        if self.method != "add":
            steps = steps - sae.encode(x)[:, chosen]
        return steps @ sae.W_dec[chosen]


@contextmanager
def steering(model: nn.Module, sae: SAELike, latents: int | Sequence[int], *, method: str = "add",
             scale: float | Sequence[float] | None = None, layer: int | None = None, site: str | None = None,
             special: Sequence[int] | None = None, home: str | Path | None = None) -> Iterator[None]:
    """While open, a transformers model runs with latents of an SAE changed at every token.

        with saecli.steering(model, "first", 12, scale=8):
            model.generate(**tokenizer("Once", return_tensors="pt"))

    Args:
        model: a causal language model of transformers, on any device and in any precision; it is itself again at the
            end.
        sae: a run's name or whatever else `load_sae` takes, or an SAE in memory, with its layer and site.
        latents: the numbers of one or several.
        method: add, for the latent's decoder vector times `scale`, as if its code were larger by that; clamp, for its
            code set to `scale`; or ablate, for its code set to 0. The SAE's reconstruction error stays.
        scale: of all latents, or one of each, in units of the latent's code.
        layer: the block that the SAE reads, from 0, if its file does not say.
        site: where in the block, if its file does not say: resid_post, resid_pre, mlp_in, mlp_out or attn_out.
        special: token ids whose activations are left as they are; None for the model's BOS, EOS and padding.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.

    Raises:
        ConfigError: an argument that cannot work, such as a crosscoder, or a model of another width.
        RunError, FormatError, HubError: the SAE is missing or cannot be read.
        ModelError: the model's blocks cannot be found.
    """
    one = placed(Home.at(home), sae, layer, site, "steering", Silent())
    change = Change.of(method, latents, scale, one.subject.name, one.sae.d_sae)
    with changed(model, one, change, _special_of(model) if special is None else special):
        yield


@contextmanager
def changed(model: nn.Module, one: Placed, change: Change, special: Sequence[int]) -> Iterator[None]:
    """While open, a model runs with a change of an SAE's latents; arguments as of `steering`.

    Raises:
        ConfigError, ModelError: the SAE does not fit the model.
    """
    config = model.config.get_text_config()
    name = getattr(config, "name_or_path", "") or type(model).__name__
    check_width(one, config.hidden_size, name)
    _, blocks = blocks_of(model, config.num_hidden_layers, name)
    for place in (one.read, one.written):
        if not 0 <= place.layer < len(blocks):
            raise ConfigError(f"--layer must be from 0 to {len(blocks) - 1}, the last of {name}, got {place.layer}",
                              option="layer")
    sae = one.sae.copy_to(model.device)
    kept = torch.tensor(sorted(special), dtype=torch.int64, device=model.device)
    state: dict[str, Tensor | None] = {"plain": None, "read": None}

    def begin(module: nn.Module, args: tuple, kwargs: dict) -> None:
        token_ids = kwargs.get("input_ids", args[0] if args else None)  # none with inputs_embeds
        state.update(plain=None if token_ids is None else ~torch.isin(token_ids.to(model.device), kept), read=None)

    def read(x: Tensor) -> Tensor:
        state["read"] = x.clone()  # a model may add to it in place
        return x

    def write(y: Tensor) -> Tensor:
        x = y if one.read == one.written else state["read"]
        if x is None:
            raise ConfigError(f"{one.subject.name} cannot steer {name}: expected to read before what it predicts, "
                              f"got {_words(one.read)} after {_words(one.written)}; name another run")
        plain = state["plain"]
        if plain is None:
            plain = torch.ones(y.shape[:-1], dtype=torch.bool)
        plain, steered = plain.to(y.device), y.clone()
        steered[plain] += change.effect(sae, x[plain.to(x.device)].to(sae.W_enc)).to(y)
        return steered

    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        if one.read != one.written:
            hooks.enter_context(intercepted(blocks[one.read.layer], one.read.site, read))
        hooks.enter_context(intercepted(blocks[one.written.layer], one.written.site, write))
        yield


def _words(place: HookPoint) -> str:
    return f"layer {place.layer}, {place.site}"


def _special_of(model: nn.Module) -> set[int]:
    """The ids of BOS, EOS and padding that a model's configuration names."""
    config, found = model.config.get_text_config(), set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name, None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return found
