"""Stability: latents matched one to one between SAEs that differ in seed.

Shapes: R runs, F = latents of the first SAE of a pair, G = of the second, M = min(F, G).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from ..base.console import Listener, listening
from ..base.errors import ConfigError
from ..base.home import Home
from ..sae.dictionary import SAE, Dictionary
from ..sae.library import SAELike, Subject
from ..sae.metrics import firing
from ..store.reader import in_words
from ..store.split import Which
from .cosines import best_pairs
from .measured import ChosenRows, Measured, RowsLike

MATCH_THRESHOLD = 0.7  # of Paulo and Belrose
STABILITY_MEASURES = ("pw_mcc", "matched_fraction")
ALIKE = 0.2  # relative difference of scales up to which two runs share a metric


def stability(
    saes: Sequence[SAELike],
    data: RowsLike = None,
    *,
    match_threshold: float = MATCH_THRESHOLD,
    split: Which = "test",
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Measure how far SAEs that differ in seed learn the same latents; CLI equivalent: `sae eval --stability`.

        PW-MCC = mean over pairs of SAEs of  1/M max over one-to-one p of sum_m |cos(w_m, v_p(m))|

    where w and v are the decoder vectors of a pair, in the metric of training if they share it, else of raw rows.
    A latent is matched if the `|cosine|` with its counterpart, if any, is above the threshold. There is no correction
    for chance: random vectors have a PW-MCC of 0.14 at d_in 768 and 16,384 latents, of 0.44 at 64 and 4,096.

    Args:
        saes: two or more, of one d_in, one d_out and the same store or stores.
        match_threshold: a `|cosine|`, in [0, 1).
        data, split, device, home, progress: as in `evaluate`; the rows decide which latents fire.

    Returns:
        pw_mcc, matched_fraction: means over the pairs.
        firing: the same for pairs of latents that both fire, None without any.
        pairs: each with its `runs`, `metric`, "training" or "raw", number of `latents` matched, both measures, the same
            `firing`, and `counterparts`, a latent of the second or None for each of the first.
        runs: each with `run`, `d_sae`, number of `silent` latents, and per latent `cosine`, the mean over its
            counterparts, `match_fraction`, of the other SAEs, and `frequency`.

    Cost: R (R - 1) / 2 assignments, see `best_pairs`, and a pass over the rows for each SAE.

    Sources: Song et al., "Position: Mechanistic Interpretability Should Prioritize Feature Consistency in SAEs",
    arXiv:2505.20254 (PW-MCC); Paulo and Belrose, "Sparse Autoencoders Trained on the Same Data Learn Different
    Features", arXiv:2501.16615 (the threshold).
    """
    demand_several(len(saes))
    listener = listening(progress)
    measured = ChosenRows(Home.at(home), data, split, device, listener).with_all(saes)
    return stability_of(measured, listener, match_threshold)


def stability_of(
    measured: Sequence[Measured], listener: Listener, match_threshold: float = MATCH_THRESHOLD
) -> dict[str, Any]:
    if not 0 <= match_threshold < 1:
        raise ConfigError(f"match_threshold must be in [0, 1), got {match_threshold}")
    check_comparable([(each.subject, each.sae) for each in measured])
    names = [each.subject.name for each in measured]
    frequencies = [firing(each.sae, each.inputs(listener)).frequency.numpy() for each in measured]
    return _document(names, [each.sae for each in measured], frequencies, match_threshold, listener)


def demand_several(saes: int) -> None:
    if saes < 2:
        raise ConfigError(
            f"--stability compares runs that differ in seed: expected two or more, got {saes or 'none'}; "
            "name them; `sae train --seed 1` trains another"
        )


def check_comparable(saes: Sequence[tuple[Subject, SAE]]) -> None:
    """ConfigError for SAEs that differ in widths or stores, or have weights that are not finite."""
    first, first_sae = saes[0]
    for subject, sae in saes:
        if (sae.d_in, sae.d_out) != (first_sae.d_in, first_sae.d_out):
            raise ConfigError(
                f"--stability compares runs of one d_in and one d_out: expected {first_sae.d_in} and {first_sae.d_out} "
                f"as {first.name} has, got {sae.d_in} and {sae.d_out} of {subject.name}; name runs of the same rows"
            )
        if not (sae.W_enc.isfinite().all() and sae.W_dec.isfinite().all()):
            raise ConfigError(
                f"--stability cannot match the latents of {subject.name}: expected finite weights, got a NaN or "
                "infinity; leave it out, or train it again"
            )
    stores = sorted({in_words(each.inputs, each.target) for each, _ in saes if each.inputs})
    if len(stores) > 1:
        raise ConfigError(
            f"--stability compares runs of the same data, got runs trained on {' and '.join(stores)}; "
            "name runs trained on one store"
        )


def _document(
    names: Sequence[str],
    saes: Sequence[SAE],
    frequencies: Sequence[NDArray[np.float64]],
    threshold: float,
    listener: Listener,
) -> dict[str, Any]:
    index_pairs = list(combinations(range(len(saes)), 2))
    cosines = [np.full((len(saes), sae.d_sae), np.nan) for sae in saes]  # with counterparts
    pairs: list[dict[str, Any]] = []
    with listener.progress("matching latents", len(index_pairs), "pairs") as show:
        for i, j in index_pairs:
            match = matching(saes[i], saes[j])
            cosines[i][j, match.first] = cosines[j][i, match.second] = match.cosine
            fire = (frequencies[i][match.first] > 0) & (frequencies[j][match.second] > 0)
            counterparts = dict(zip(match.first.tolist(), match.second.tolist(), strict=True))
            pairs.append(
                {
                    "runs": [names[i], names[j]],
                    "metric": match.metric,
                    **_measures(match.cosine, threshold),
                    "firing": _measures(match.cosine[fire], threshold),
                    "counterparts": [counterparts.get(latent) for latent in range(saes[i].d_sae)],
                }
            )
            show(len(pairs))
    runs = [
        {"run": name, **_run_document(cosine, threshold, frequency)}
        for name, cosine, frequency in zip(names, cosines, frequencies, strict=True)
    ]
    return {
        "match_threshold": threshold,
        **_means(pairs),
        "firing": _means([pair["firing"] for pair in pairs]),
        "pairs": pairs,
        "runs": runs,
    }


def _run_document(
    cosines: NDArray[np.float64], threshold: float, frequency: NDArray[np.float64]
) -> dict[str, Any]:
    """A run's entry, given the |cosine| of each latent with its counterpart in each run, (R, F), NaN without."""
    sums, counts = np.nansum(cosines, axis=0), np.isfinite(cosines).sum(0)
    of_latents = zip(sums.tolist(), counts.tolist(), strict=True)
    return {
        "d_sae": cosines.shape[1],
        "silent": int((frequency == 0).sum()),
        "cosine": [total / count if count else None for total, count in of_latents],
        "match_fraction": ((cosines > threshold).sum(0) / (len(cosines) - 1)).tolist(),
        "frequency": frequency.tolist(),
    }


def _measures(cosine: NDArray[np.float64], threshold: float) -> dict[str, Any]:
    return {
        "latents": len(cosine),
        "pw_mcc": float(cosine.mean()) if len(cosine) else None,
        "matched_fraction": float((cosine > threshold).mean()) if len(cosine) else None,
    }


def _means(pairs: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    means: dict[str, float | None] = {}
    for name in STABILITY_MEASURES:
        values = [pair[name] for pair in pairs if pair[name] is not None]
        means[name] = float(np.mean(values)) if values else None
    return means


@dataclass(frozen=True)
class Matching:
    first: NDArray[np.int64]  # latents of the first SAE, ascending, (M,)
    second: NDArray[np.int64]  # their counterparts, latents of the second SAE, (M,)
    cosine: NDArray[np.float64]  # `|cosine|` of the pair's decoder vectors, (M,), in [0, 1]
    metric: str  # that they are in


@torch.no_grad()
def matching(first: Dictionary, second: Dictionary) -> Matching:
    """Match the latents of two SAEs of one d_in, on one device, by `best_pairs` of decoder vectors."""
    metric = first.normalisation.to(torch.float64)
    other = second.normalisation.target_scale.double()
    if not torch.allclose(metric.target_scale, other, rtol=ALIKE):
        metric = replace(metric, scale=torch.ones_like(metric.scale))
    decoders = [sae.decoder() / metric.target_scale for sae in (first, second)]
    latents = best_pairs(*decoders)
    w, v = (
        normalize(W_dec[torch.from_numpy(chosen).to(W_dec.device)].double())
        for W_dec, chosen in zip(decoders, latents, strict=True)
    )
    cosine = (w * v).sum(1).abs().clamp(max=1).cpu().numpy()
    return Matching(*latents, cosine, metric.metric)
