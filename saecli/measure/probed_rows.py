"""What probes are fitted to: activations at the last token of texts, and their codes.

Shapes: N texts, B of a batch, T tokens, D = d_in, F = d_sae.
"""

from collections.abc import Sequence

import numpy as np
import torch
from scipy.sparse import csr_matrix, vstack
from torch import Tensor

from ..base.errors import ConfigError, ModelError
from ..extract.forward import batch_tokens
from ..extract.hook_points import HookPoint
from ..extract.language_model import LanguageModel
from ..extract.windows import Windows
from ..sae.dictionary import SAE
from .measured import BATCH_CODES
from .splice import in_batches, padded

CONTEXT = 1024  # of sae-probes


class LastTokens:
    """Reads activations at the last token of texts.

    Args:
        model: the language model.
        places: where to read, each once.
        context: most tokens of a text, with the special ones before it; of a longer text its end is taken, as
            sae-probes does.

    Raises:
        ConfigError: the context leaves no room for a token.
    """

    def __init__(self, model: LanguageModel, places: Sequence[HookPoint], context: int) -> None:
        self._model, self._places = model, list(places)
        self._prefix = Windows(model.tokenizer, context).prefix
        self._room = context - len(self._prefix)
        self._tokens = batch_tokens(model, "auto", context, self._places)

    def __call__(self, texts: Sequence[str]) -> dict[HookPoint, Tensor]:
        """The activations at each place, (N, D), float32, on the CPU.

        Raises:
            ModelError: a text has no tokens.
            ConfigError: an activation is not finite.
        """
        windows = [self._window(text) for text in texts]
        order = sorted(range(len(texts)), key=lambda index: -len(windows[index]))
        found: dict[HookPoint, list[Tensor]] = {place: [] for place in self._places}
        for batch in in_batches((windows[index] for index in order), self._tokens):
            last = torch.tensor([len(window) - 1 for window in batch])

            def take(activations: Tensor, last: Tensor = last) -> Tensor:
                return activations[range(len(last)), last.to(activations.device)].to("cpu", torch.float32)

            for parts, part in zip(found.values(), self._model.read(*padded(batch), self._places, take), strict=True):
                parts.append(part)
        back = torch.from_numpy(np.argsort(order))
        result = {place: torch.cat(parts)[back] for place, parts in found.items()}
        for place, x in result.items():
            if not x.isfinite().all():
                raise ConfigError(f"{self._model.source.name} has activations at layer {place.layer}, {place.site}, "
                                  "that are not finite; name another --layer, or run it on a --device with another "
                                  "precision")
        return result

    def _window(self, text: str) -> list[int]:
        token_ids = self._model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not token_ids:
            raise ModelError(f"{self._model.source.name} reads no token in the text {text[:40]!r}: expected at least "
                             "one; use another model, or leave its set out of --sets")
        return [*self._prefix, *token_ids[-self._room:]]


def codes_of(sae: SAE, x: Tensor) -> csr_matrix:
    """The codes of rows, (N, D), as a sparse matrix, (N, F)."""
    parts = x.split(max(1, BATCH_CODES // sae.d_sae))
    return vstack([csr_matrix(sae.encode(part.to(sae.W_enc)).cpu().numpy()) for part in parts], format="csr")
