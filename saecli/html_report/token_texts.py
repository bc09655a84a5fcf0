"""What the tokens of a store read as, and the language model that says which of them a latent promotes."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import ConfigError, ModelError
from ..evaluation.sae_and_rows import Measured
from .details import Texts, TokenNumbers

if TYPE_CHECKING:
    from ..language_model import Unembedding


@dataclass(frozen=True)
class Words:
    """How tokens read.

    Args:
        has_tokens: whether the store keeps any.
        texts: what tokens read as.
        unembedding: of the language model; None for none.
        notes: sentences on what is missing.
    """

    has_tokens: bool
    texts: Texts = field(default_factory=TokenNumbers)
    unembedding: "Unembedding | None" = None
    notes: list[str] = field(default_factory=list)


def words_for(one: Measured, model: str | None, has_tokens: bool) -> Words:
    """The texts of a store's tokens, by the tokenizer of a model, or of the one that the store names.

    Args:
        one: the SAE and its rows.
        model: the language model to take the unembedding of as well; None for none.
        has_tokens: whether the store keeps any.

    Raises:
        ModelError: the model that was asked for cannot be loaded.
        ConfigError: its residual stream is of another width than the rows.
    """
    store = one.store
    named = store.meta.source.get("model")
    notes = [] if has_tokens else [f"{store.name} keeps no tokens, so examples are numbers of its rows, counted from 0"]
    if has_tokens and store.meta.source.get("positions") == "last":
        notes.append(f"{store.name} keeps only the last token of each document, so examples are single tokens")
    if model is not None:
        from ..language_model import LanguageModel, TokenTexts, Unembedding, find_model

        place = find_model(model)
        if place.d_model != one.sae.d_in:
            raise ConfigError(None, "{sae} cannot be read through {name}: expected a model of width {d_in}, got {got}",
                              "name the model that the rows came from", sae=one.subject.name, name=model,
                              d_in=one.sae.d_in, got=place.d_model)
        if named is not None and named != place.identity()["model"]:
            notes.append(f"{store.name} came from {named}, and is read through {model}")
        loaded = LanguageModel(place, one.sae.W_enc.device, head=True)
        return Words(has_tokens, TokenTexts(loaded.tokenizer), Unembedding(loaded), notes)
    if not has_tokens:
        return Words(has_tokens, notes=notes)
    if named is None:
        notes.append(f"{store.name} does not say which model its tokens are of, so they are shown as numbers; --model "
                     f"names it")
        return Words(has_tokens, notes=notes)
    from ..language_model import TokenTexts

    try:
        return Words(has_tokens, TokenTexts.of_model(named), notes=notes)
    except ModelError as error:
        notes.append(f"tokens are shown as their numbers, for want of a tokenizer: {error}")
        return Words(has_tokens, notes=notes)
