"""Which latents act on a model's predictions by themselves, and not as any direction of their norm does.

The effect of a change (`trials.py`) is KL(clean || changed) of the next token's distribution in nats; its mean over
documents is geometric, since KL grows with the square of the norm. Over a floor it is

    ratio = exp(mean over documents of log KL(change) - log KL(floor))     logs: the mean over directions

and elsewhere a ratio of ratios to random directions: here, and of the same change at the tokens of the other condition.
p of latent and condition is the largest over floors of p

- by flipping signs of documents' differences;
- of random directions and other latents, by Student's t as one more draw of a direction, its variance pooled over
  latents: any two directions differ, if documents are many.

The wrong sign is no floor of KL, which is even in a change d but for its third order, with F the Fisher information:

    KL(d) = d' F d / 2 + O(||d||^3)     KL(d) - KL(-d) = O(||d||^3)

The log-probability of promoted tokens is odd in d but for its second order: `promoted_p`, of its rise where a latent is
added and its fall where it is removed, has the wrong sign among its floors.

Shapes: L latents, n documents of each, C changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap, false_discovery_control
from scipy.stats import t as student

from ..base.console import Listener
from ..base.errors import ConfigError
from ..base.files import write_json
from ..base.words import counted
from ..model.tokenizer import TokenTexts
from .trials import CHANGES, DIRECTIONS, DOSES, DRAWN, FLOORS, OWN, SIGNS, Trials
from .two_samples import Values
from .verdicts import Outcome, Outcomes, read_outcomes

BLOCK = 50  # latents that share passes, between writes of the file
LEAST_KL, ROUNDING = 1e-4, 1e-7  # nats: measurable, and in float32
RESAMPLES, RESAMPLING_SEED = 2000, 0
FLIPS, FLIPPING_SEED = 20_000, 0
KL_FLOORS = (*DRAWN, "error")
ACTS, ALIKE = "acts by itself", "acts like any direction of its norm"
NOTHING = "does nothing measurable"


def measured_outcomes(
    trials: Trials,
    latents: Sequence[int],
    documents: int,
    settings: str,
    path: Path | None,
    listener: Listener,
) -> dict[int, Outcome]:
    """Of each latent; those in the file at `path`, if it has the same settings, are not measured again."""
    outcomes = None if path is None else read_outcomes(path)
    if outcomes is None or outcomes.settings != settings:
        outcomes = Outcomes(settings)
    missing = [latent for latent in latents if latent not in outcomes.latents]
    rows = [trials.rows_of(latent, documents) for latent in missing]
    fewest = min((at.shape[1] for at in rows), default=documents)
    if not latents or fewest < documents:
        raise ConfigError(
            f"expected latents that fire and are silent in {documents} held-out documents, got one of {fewest}; lower "
            "--documents, name others, or a store of more documents with --data"
        )
    sampled = 2 * len(trials.sampled) * len(missing)
    tokens, done = CHANGES * sum(at.size for at in rows) + sampled, 0
    listener.note(
        f"{counted(len(missing), 'latent')} to change at {counted(tokens, 'token')}; "
        f"{len(latents) - len(missing):,} measured already"
    )
    with listener.progress("changing latents", tokens, "tokens") as show:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            show(done)

        for first in range(0, len(missing), BLOCK):
            block = missing[first : first + BLOCK]
            promoted = trials.promoted(block, advance)
            at_rows = np.array(rows[first : first + BLOCK])
            found = trials.outcomes(block, at_rows, promoted, advance).tolist()
            for latent, kl, rise, ids in zip(block, *found, promoted.tolist(), strict=True):
                outcomes.latents[latent] = Outcome(kl, rise, ids)
            if path is not None:
                write_json(path, asdict(outcomes))
    return {latent: outcomes.latents[latent] for latent in latents}


def effects_lines(
    trials: Trials, outcomes: Mapping[int, Outcome], labels: Mapping[int, str], fdr: float
) -> list[dict[str, Any]]:
    """A line for each latent, see `claims.effects`."""
    logs = np.log(np.array([each.kl for each in outcomes.values()]) + ROUNDING)  # (L, 2, C, n)
    rises = np.array([each.rise for each in outcomes.values()])
    promotion = rises * np.array([*SIGNS.values()])[:, None, None]
    tests = _rated("", p_values(logs, KL_FLOORS)) | _rated("promoted_", p_values(promotion, FLOORS))
    texts = TokenTexts(trials.passes.model.tokenizer)
    lines = []
    for number, (latent, outcome) in enumerate(outcomes.items()):
        measures = {
            condition: {
                **_measures(logs[number, place], logs[number, 1 - place], rises[number, place]),
                **{name: float(values[number, place]) for name, values in tests.items()},
            }
            for place, condition in enumerate(SIGNS)
        }
        line = {
            "latent": latent,
            "label": labels.get(latent),
            "frequency": float(trials.frequency[latent]),
            "code": trials.code(latent),
            "tokens": [texts[token] for token in outcome.promoted],
            "verdict": _verdict(measures, fdr),
        }
        lines.append(line | measures)
    return lines


def _verdict(measures: Mapping[str, Mapping[str, Any]], fdr: float) -> str:
    if all(each["kl_high"] < LEAST_KL for each in measures.values()):
        return NOTHING
    acting = [condition for condition, each in measures.items() if each["q"] <= fdr]
    if not acting:
        return ALIKE
    return ACTS if len(acting) == len(measures) else f"{ACTS} when {acting[0]}"


def _rated(name: str, p: Values) -> dict[str, Values]:
    """p and false discovery rates, (L, 2)."""
    return {f"{name}p": p, f"{name}q": false_discovery_control(p, axis=None).reshape(p.shape)}


def p_values(outcomes: Values, floors: Iterable[str]) -> Values:
    """That outcomes of the latent's own change, of (L, 2, C, n), are above those of floors, (L, 2)."""
    own = outcomes[:, :, OWN]
    flips = np.random.default_rng(FLIPPING_SEED).choice([-1.0, 1.0], (FLIPS, outcomes.shape[-1]))
    tests = []
    for name in floors:
        over = own - outcomes[:, :, FLOORS[name]].mean(2)
        reached = over @ flips.T >= over.sum(-1, keepdims=True) - ROUNDING
        tests.append((1 + reached.sum(-1)) / (1 + FLIPS))
    for drawn in (outcomes[:, :, place].mean(3) for place in DRAWN.values()):  # (L, 2, DIRECTIONS)
        variance = drawn.var(axis=2, ddof=1).mean(0) * (1 + 1 / DIRECTIONS)
        further = (own.mean(2) - drawn.mean(2)) / np.sqrt(variance + ROUNDING)
        tests.append(student.sf(further, len(outcomes) * (DIRECTIONS - 1)))
    return np.max(tests, axis=0)


def _measures(logs: Values, elsewhere: Values, rise: Values) -> dict[str, Any]:
    """Of a condition, (C, n), and of the other one."""
    own, random = logs[OWN], logs[FLOORS["random"]].mean(0)
    there = elsewhere[FLOORS["wrong sign"]][0] - elsewhere[FLOORS["random"]].mean(0)
    floors = {name: logs[place].mean(0) for name, place in FLOORS.items()}
    doses = zip(DOSES, logs, strict=False)
    return {
        **_geometric("kl", own),
        **_interval("promoted", rise[OWN]),
        "doses": [{"dose": dose, **_geometric("kl", each)} for dose, each in doses],
        "floors": {
            name: _geometric("kl", each) | _geometric("ratio", own - each)
            for name, each in floors.items()
        },
        "elsewhere": _geometric("ratio", own - random - there),
    }


def _interval(name: str, values: Values) -> dict[str, float]:
    """The mean over documents, (n,), and the ends of its 95% interval."""
    options: Any = {"n_resamples": RESAMPLES, "rng": RESAMPLING_SEED, "method": "percentile"}
    low, high = bootstrap((values,), np.mean, **options).confidence_interval
    return {name: float(values.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}


def _geometric(name: str, logs: Values) -> dict[str, float]:
    return {key: float(np.exp(value)) for key, value in _interval(name, logs).items()}
