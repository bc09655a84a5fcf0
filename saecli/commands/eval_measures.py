"""The measures of `sae eval`, which `sae push` puts on a model card, and the runs that come out best."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..metrics import reconstruction
from ..store import Rows
from .options import Session
from .subjects import Measured

if TYPE_CHECKING:  # transformers takes seconds to import, and only --model needs it
    from ..harvest import Windows
    from ..language_model import LanguageModel

LIKE_L0 = 1.05  # an L0 of at most this many times another's counts as no larger
ERRORS = {"fvu": 1, "ce_recovered": -1, "kl": 1}  # what runs of like L0 are compared by; times its sign, less is better


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


def marked(found: Sequence[dict[str, Any]], everything: Sequence[Measured]) -> list[dict[str, Any]]:
    """The measures of each SAE with one more, `unbeaten`: what `unbeaten` says of those that share its rows.

    Args:
        found: what `evaluated` returned.
        everything: the SAEs and their rows, in the same order.

    Returns:
        The measures, in the same order; `unbeaten` is None for an SAE that shares its rows with no other.
    """
    marks: list[bool | None] = [None] * len(found)
    for members in _by_rows(everything):
        if len(members) > 1:
            for index, mark in zip(members, unbeaten([found[index] for index in members]), strict=True):
                marks[index] = mark
    return [run | {"unbeaten": mark} for run, mark in zip(found, marks, strict=True)]


def unbeaten(runs: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Which runs no other beats, of several that are measured on the same rows.

    A run is beaten by one whose L0 is at most `LIKE_L0` times its own, which is no worse in any of the `ERRORS` that
    were measured and better in at least one. To be no worse in any and better in one is a strict partial order, so runs
    never beat each other in a circle, although L0s are compared with a tolerance: at least one is unbeaten.

    Args:
        runs: the measures of each, among them `l0`.

    Returns:
        One a run. A run with an error that is no finite number beats none, and is not unbeaten either.
    """
    errors = [tuple(sign * run[name] for name, sign in ERRORS.items() if name in run) for run in runs]
    finite = [all(map(math.isfinite, error)) for error in errors]

    def beats(other: int, run: int) -> bool:
        return (finite[other] and runs[other]["l0"] <= LIKE_L0 * runs[run]["l0"] and errors[other] != errors[run]
                and all(map(operator.le, errors[other], errors[run])))

    return [finite[run] and not any(beats(other, run) for other in range(len(runs))) for run in range(len(runs))]


def meaning(run: Mapping[str, Any]) -> str:
    """What the mark of an unbeaten run says, in a sentence, where these measures of runs were taken."""
    *others, last = [name.replace("_", " ") for name in ERRORS if name in run]
    errors = f"{', '.join(others)} or {last}" if others else last
    return f"unbeaten (*): every other run on the same rows with at most {LIKE_L0:g} times its l0 is worse in {errors}"


def _by_rows(everything: Sequence[Measured]) -> list[list[int]]:
    """The places of SAEs that share their rows, a list for each choice of rows."""
    groups: dict[tuple[str, int, float], list[int]] = {}
    for index, one in enumerate(everything):
        groups.setdefault(one.chosen_rows, []).append(index)
    return list(groups.values())


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

    groups = _by_rows(everything)
    every_rows = [everything[members[0]].rows for members in groups]
    place = find_model(name)
    for rows in every_rows:
        check_rows(rows, place)
    model = LanguageModel(place, everything[0].sae.W_enc.device, head=True)
    found = []
    for rows, members in zip(every_rows, groups, strict=True):
        source = rows.store.meta.source
        cutter = Windows(model.tokenizer, source["context"])
        check_tokens(rows, model, cutter.prefix)
        if source["model"] != place.identity()["model"]:
            session.console.note(f"{rows.store.name} came from {source['model']}, and is run through {name}")
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
        with session.console.progress(f"splicing into {model.source.name}", min(tokens, rows.rows), "tokens") as show:
            measures = effects(model, windows, splice.cutter.special, source["layer"], source["site"],
                               [everything[index].sae for index in splice.members], show)
        for index, measure in zip(splice.members, measures, strict=True):
            results[index] = measure
    session.console.note("special tokens keep their own activations and are left out of the means")
    return results
