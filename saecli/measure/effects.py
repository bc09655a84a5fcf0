"""What latents do to a model's predictions (`trials.py`), each compared with floors, and verdicts.

The effect of a change is KL(clean || changed) of the next token's distribution, in nats; means over documents are
geometric, since KL grows with the square of the norm. Over a floor it is

    ratio = exp(mean over documents of log KL(change) - log KL(floor))     logs: the mean over directions

`elsewhere`, which tests nothing, is a ratio of ratios to random directions: here, and of the same change at the tokens
of the other condition. p of a condition is the largest of

- the floors', by flipping signs of documents' differences; of the wrong sign, which KL hardly tells apart, in the
  log-probability of the tokens that the decoder promotes;
- Student's t of one more draw of random directions or other latents, its variance pooled over latents: any two
  directions differ, if documents are many.

Latents act by themselves where the false discovery rate of Benjamini and Hochberg, over latents and conditions, is at
most `fdr`.

Shapes: L latents, C changes, n documents of a latent, K directions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import false_discovery_control
from scipy.stats import t as student

from ..base.console import Listener
from ..base.documents import read_json
from ..base.errors import ConfigError, FormatError
from ..base.files import write_json
from ..base.words import counted
from .trials import CHANGES, DIRECTIONS, DOSES, DRAWN, FLOORS, OWN, SIGNS, Trials
from .two_samples import Values

EFFECTS = "effects.json"
LEAST = 2  # documents of a latent
BLOCK = 50  # latents that share passes, between writes of the file
LEAST_KL, ROUNDING = 1e-4, 1e-7  # nats: measurable, and in float32
LEVEL, RESAMPLES, FLIPS, SEED = 0.95, 2000, 20_000, 0
ACTS, ALIKE = "acts by itself", "acts like any direction of its norm"
NOTHING = "does nothing measurable"
Spread = Mapping[str, tuple[Values, int]]  # see `_spread`


@dataclass(frozen=True)
class Outcomes:
    """`effects.json`: KL and rise of promoted tokens by latent, as of `Trials.outcomes`, and what they are of."""

    settings: str
    latents: dict[int, list[list[list[list[float]]]]] = field(default_factory=dict)

    @classmethod
    def kept(cls, path: Path | None, settings: str) -> "Outcomes":
        """Those in a file; none if it has other settings. FormatError if it is damaged."""
        if path is None or not path.is_file():
            return cls(settings)
        try:
            kept = read_json(path, cls)
        except (OSError, ValueError) as error:
            raise FormatError(f"cannot read {path}: {error}; remove it to measure anew") from error
        return kept if kept.settings == settings else cls(settings)


def measured_outcomes(
    trials: Trials, latents: Sequence[int], documents: int, path: Path | None, listener: Listener
) -> dict[int, Values]:
    """Of each latent, (2, 2, C, n); those in the file at `path` are not measured again, and others are added to it."""
    outcomes = Outcomes.kept(path, f"{trials.settings}, {documents} documents")
    missing = [latent for latent in latents if latent not in outcomes.latents]
    rows = {latent: trials.rows_of(latent, documents) for latent in missing}
    few = [latent for latent, at in rows.items() if at.shape[1] < LEAST]
    if few:
        raise ConfigError(
            f"latent {few[0]} cannot be tried: expected one that fires and is silent in {LEAST} held-out documents, "
            f"got {rows[few[0]].shape[1]}; name another, or a store of more documents with --data"
        )
    total = CHANGES * sum(at.size for at in rows.values())
    listener.note(
        f"{counted(len(missing), 'latent')} to change at {counted(total, 'token')}; "
        f"{len(latents) - len(missing):,} done already"
    )
    with listener.progress("changing latents", total, "tokens") as show:
        done = 0
        for first in range(0, len(missing), BLOCK):
            block = {latent: rows[latent] for latent in missing[first : first + BLOCK]}
            found = trials.outcomes(block, partial(_show_further, show, done))
            outcomes.latents.update(
                {latent: each.round(9).tolist() for latent, each in found.items()}
            )
            done += CHANGES * sum(at.size for at in block.values())
            if path is not None:
                write_json(path, asdict(outcomes))
    return {latent: np.array(outcomes.latents[latent]) for latent in latents}


def _show_further(show: Callable[[int], object], before: int, count: int) -> None:
    show(before + count)


def effects_lines(outcomes: Mapping[int, Values], fdr: float) -> list[dict[str, Any]]:
    """Measures of each latent's conditions, and its verdict; see `claims.effects`."""
    logs = [np.log(kl + ROUNDING) for kl, _ in outcomes.values()]
    spread = {name: _spread([log[:, part] for log in logs]) for name, part in DRAWN.items()}
    lines = [
        {
            "latent": latent,
            "documents": log.shape[2],
            **{
                condition: _compared(number, log, rise[number], spread)
                for number, condition in enumerate(SIGNS)
            },
        }
        for (latent, (_, rise)), log in zip(outcomes.items(), logs, strict=True)
    ]
    tested = [line[condition] for line in lines for condition in SIGNS]
    rates = false_discovery_control([each["p"] for each in tested])
    for of_condition, rate in zip(tested, rates.tolist(), strict=True):
        of_condition["q"] = rate
    return [line | {"verdict": _verdict(line, fdr)} for line in lines]


def _verdict(line: Mapping[str, Any], fdr: float) -> str:
    if all(line[condition]["kl_high"] < LEAST_KL for condition in SIGNS):
        return NOTHING
    acting = [condition for condition in SIGNS if line[condition]["q"] <= fdr]
    if not acting:
        return ALIKE
    return ACTS if len(acting) == len(SIGNS) else f"{ACTS} when {acting[0]}"


def _compared(condition: int, log: Values, rise: Values, spread: Spread) -> dict[str, Any]:
    """A condition's measures, without q, of log KL, (2, C, n), and the rise there, (C, n)."""
    here, there = log[condition], log[1 - condition]
    floors = {}
    for name, part in FLOORS.items():
        over = here[OWN] - here[part].mean(0)
        floors[name] = _geometric("kl", here[part].mean(0)) | _geometric("ratio", over)
        floors[name]["p"] = _p_of_signs(over)
        if name in spread:
            deviations, freedom = spread[name]
            of_draw = student.sf(over.mean() / max(deviations[condition], ROUNDING), freedom)
            floors[name]["p"] = max(floors[name]["p"], float(of_draw))
    wrong, random = FLOORS["wrong sign"], FLOORS["random"]
    if rise.any():  # else no tokens are followed
        further = [*SIGNS.values()][condition] * (rise[OWN] - rise[wrong][0])
        floors["wrong sign"]["p"] = _p_of_signs(further)
    elsewhere = here[OWN] - here[random].mean(0) - there[wrong][0] + there[random].mean(0)
    doses = zip(DOSES, here, strict=False)
    return {
        **_geometric("kl", here[OWN]),
        **_interval("promoted", rise[OWN]),
        "doses": [{"dose": dose, **_geometric("kl", of_dose)} for dose, of_dose in doses],
        "floors": floors,
        "elsewhere": _geometric("ratio", elsewhere),
        "p": max(each["p"] for each in floors.values()),
    }


def _spread(floors: Sequence[Values]) -> tuple[Values, int]:
    """By condition, (2,), the deviation of a direction's mean log KL over documents from that of K others, (2, K, n),
    pooled over latents; and its degrees of freedom."""
    means = np.array([log.mean(2) for log in floors])
    variances = means.var(2, ddof=1) * (1 + 1 / DIRECTIONS)
    return np.sqrt(variances.mean(0)), len(floors) * (DIRECTIONS - 1)


def _p_of_signs(differences: Values) -> float:
    """Of a mean above 0, by flipping documents' signs."""
    flipped, total = _signs(len(differences)) @ differences, differences.sum()
    return float((1 + (flipped >= total - ROUNDING * abs(total)).sum()) / (1 + FLIPS))


@cache
def _signs(count: int) -> Values:
    return np.random.default_rng(SEED).choice([-1.0, 1.0], (FLIPS, count))


@cache
def _resamples(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(SEED).integers(count, size=(RESAMPLES, count))


def _interval(name: str, values: Values) -> dict[str, float]:
    """The mean over documents, and the ends of its interval by bootstrap."""
    means = values[_resamples(len(values))].mean(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {name: float(values.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}


def _geometric(name: str, logs: Values) -> dict[str, float]:
    return {key: float(np.exp(value)) for key, value in _interval(name, logs).items()}
