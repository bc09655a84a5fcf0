"""The public functions that test claims on latents. As `functions.py`, it imports neither NumPy nor torch."""

from typing import Annotated, Any

from ..base.console import listening
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.options import Count, Shown, checked
from .arguments import Data, Device, HomeLike, Progress, SAELike


@checked
def contrast(
    sae: SAELike,
    a: Any = None,
    b: Any = None,
    *,
    data: Annotated[
        Data, Shown("A and B are two sources, or chat roles, of this store.", kind=str | None)
    ] = None,
    replicate: Annotated[
        SAELike, Shown("Test each latent's nearest in this run of another seed.", kind=str | None)
    ] = None,
    top_k: Annotated[Count, Shown("Test this number of latents.")] = 20,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """Find latents that tell two sides apart, on documents that did not choose them; CLI equivalent: `sae contrast`.

    Args:
        sae, device, home, progress: as in `evaluate`.
        a, b: stores, or rows of them; with `data` names of its sources or roles.

    Returns:
        sides: of A and B `side`, a name, `documents`, and how many are `held_out`, which all below is of.
        latents: those of the AUC furthest from 1/2 in the other half, in that order: `auc` of documents' mean codes,
            `difference`, A's mean less B's, both with the ends of 95% bootstrap intervals, `_low` and `_high` (of no
            width if all of A's are on one side of all of B's); permutation `p`; `q` by Benjamini and Hochberg; in `a`
            and `b` means of `frequency`, `mean` and `largest` code in a document. `found` counts q up to `fdr`;
            `length` is of documents' numbers of rows instead of codes.
        shuffled: `latents`, `auc`, `p`, `q` of the same procedure with labels shuffled, for each of 20 times.
        replication: by `decoder` and by `codes` the same of each latent's nearest in the other run, its `similarity`,
            and of the latents found, if any, the `fraction` whose nearest is found with the same sign, and that of
            nearest ones `shuffled`.
        notes: a sentence on few documents.

    Cost: encodes all rows, with `replicate` twice by both SAEs.
    """
    from ..model.saes import open_sae
    from .contrast import contrast_document
    from .labels import shown_labels
    from .measured import ChosenRows, Measured
    from .sides import sides_of_stores, sides_within
    from .stability import check_comparable

    if a is None or b is None:
        raise ConfigError(
            "expected RUN A B, got less; name two stores, or two sources or roles of --data"
        )
    listener, at = listening(progress), Home.at(home)
    others = [] if replicate is None else [replicate]
    opened = [open_sae(at, each, listener) for each in (sae, *others)]
    check_comparable([(subject, saved.sae) for subject, saved in opened], "--replicate")

    def runs(rows: Any) -> list[Measured]:
        chosen = ChosenRows(at, rows, "all", device, listener)
        return [chosen.with_opened(*each) for each in opened]

    if data is not None:
        sides = sides_within(runs(data), (a, b), listener)
    else:
        sides = sides_of_stores(runs(a), runs(b), listener)
    subject, saved = opened[0]
    labels = shown_labels(subject.folder, saved.sae.d_sae)
    names = {"run": subject.name, "replicate": opened[1][0].name if others else None}
    return {**names, **contrast_document(sides, top_k, labels)}
