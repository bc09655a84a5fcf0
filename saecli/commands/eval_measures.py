"""The measures of `sae eval`, which `sae push` puts on a model card."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..metrics import reconstruction
from ..store import Rows
from .options import Session
from .subjects import Measured

if TYPE_CHECKING:  # transformers takes seconds to import, and only --model needs it
    from ..harvest import Windows
    from ..language_model import LanguageModel


def evaluated(session: Session, everything: Sequence[Measured], model: str | None,
              tokens: int) -> list[dict[str, Any]]:
    """What `sae eval` prints of each SAE, as JSON.

    Args:
        session: the command's session.
        everything: the SAEs and their rows.
        model: hub id or folder of the language model to splice them into; None to do without.
        tokens: how many of the rows' tokens the model is run over.

    Raises:
        ConfigError, StoreError, ModelError: the model is missing, or is not that of the rows.
    """
    splices = [] if model is None else _splices(session, everything, model)
    found = [one.heading | reconstruction(one.sae, one.batches(session)) | {"dead_fraction": one.subject.dead_fraction}
             for one in everything]
    if model is None:
        return found
    effects = _effects(session, everything, splices, tokens)
    return [run | effect for run, effect in zip(found, effects, strict=True)]


@dataclass(frozen=True)
class _Splice:
    """One pass through the model: the places of the SAEs that share their rows, and what they are spliced into."""

    members: list[int]
    model: "LanguageModel"
    rows: Rows
    cutter: "Windows"


def _splices(session: Session, everything: Sequence[Measured], name: str) -> list[_Splice]:
    """The passes to make through the model; what cannot work is refused here, before the rows are measured."""
    from ..harvest import Windows
    from ..language_model import LanguageModel, find_model
    from ..splice import check_rows, check_tokens

    groups: dict[tuple, list[int]] = {}
    for index, one in enumerate(everything):
        groups.setdefault(one.chosen_rows, []).append(index)
    every_rows = [everything[members[0]].rows for members in groups.values()]
    place = find_model(name)
    for rows in every_rows:
        check_rows(rows, place)
    model = LanguageModel(place, everything[0].sae.W_enc.device, head=True)
    found = []
    for rows, members in zip(every_rows, groups.values(), strict=True):
        source = rows.store.meta.source
        cutter = Windows(model.tokenizer, source["context"])
        check_tokens(rows, model, cutter.prefix)
        if source["model"] != place.identity()["model"]:
            session.report.note(f"{rows.store.name} came from {source['model']}, and is run through {name}")
        found.append(_Splice(members, model, rows, cutter))
    return found


def _effects(session: Session, everything: Sequence[Measured], splices: list[_Splice],
             tokens: int) -> list[dict[str, Any]]:
    """What each SAE does to the model."""
    from ..splice import effects, stored_windows

    results: list[dict[str, Any]] = [{} for _ in everything]
    for splice in splices:
        model, rows, source = splice.model, splice.rows, splice.rows.store.meta.source
        windows = stored_windows(rows, splice.cutter.prefix, tokens)
        with session.report.progress(f"splicing into {model.source.name}", min(tokens, rows.rows), "tokens") as show:
            measures = effects(model, windows, splice.cutter.special, source["layer"], source["site"],
                               [everything[index].sae for index in splice.members], show)
        for index, measure in zip(splice.members, measures, strict=True):
            results[index] = measure
    session.report.note("special tokens keep their own activations and are left out of the means")
    return results
