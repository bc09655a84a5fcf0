"""How far SAEs that differ in seed learn the same latents: what `sae eval --stability` prints.

Shapes: R runs, F = d_sae, of each run its own.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.errors import ConfigError
from ..base.home import Home
from ..sae.dictionary import SAE
from ..sae.library import SAELike, Subject, open_sae
from .evaluate import tallied
from .matching import Matching, matching
from .measured import Measured, RowsLike, all_measured

MATCH_THRESHOLD = 0.7  # that of Paulo and Belrose
OVER_PAIRS = ("pw_mcc", "matched_fraction", "shared_fraction")
OVER_LATENTS = ("matched_in_all", "shared_in_all")


def stability(saes: Sequence[SAELike], data: RowsLike = None, *, match_threshold: float = MATCH_THRESHOLD,
              split: str = "test", device: str = "auto", home: str | Path | None = None,
              progress: bool = False) -> dict[str, Any]:
    """Measure how far SAEs that differ in seed learn the same latents, as `sae eval --stability` does.

        PW-MCC = mean over pairs of SAEs of  1/M max over one-to-one p of sum_m |cos(w_m, v_p(m))|

    where w and v are the decoder vectors of a pair's SAEs, and M is the smaller d_sae: of SAEs of different width the
    matching leaves latents of the wider without a counterpart. A latent is matched in another SAE if the `|cosine|` of
    its decoder vector with its counterpart's is above the threshold, and shared if the cosine of their encoder vectors
    (its sign turned where the decoder vectors' is negative) is too.

    To Paulo and Belrose a latent is shared if a second matching, of encoder vectors, also gives it the same
    counterpart. Here the encoder is compared at the decoder's counterpart instead: this needs no second assignment,
    and it does not depend on which of two mirror images, (e, d) and (-e, -d), was matched. A relu SAE starts with half
    of its latents mirrored, and `|cosine|` cannot tell them apart.

    PW-MCC is of the whole dictionary: latents that are silent, that fire on none of the rows, are matched as all
    others are. Beside each measure stands the same of latents that fire, from the same matching. What is due to chance
    is not subtracted: random vectors have a PW-MCC of 0.14 at d_in 768 and 16,384 latents, of 0.44 at 64 and 4,096.

    Args:
        saes: two or more SAEs, runs' names or whatever else `load_sae` takes, of one d_in and one store.
        data: the rows that tell which latents fire, as of `evaluate`; None for none, and no rows are read.
        match_threshold: a `|cosine|`, in [0, 1).
        split: test, the rows held out; train, those trained on; or all; of a store.
        device: where to compute: cpu, cuda, cuda:1; auto takes cuda where there is one. Assignments are on the CPU.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        progress: show how far it has come, and what was chosen, on stderr.

    Returns:
        match_threshold: the argument.
        pw_mcc, matched_fraction, shared_fraction: means over the pairs.
        matched_in_all, shared_in_all: fraction of all SAEs' latents that are so in each other SAE.
        firing: the five of latents that fire; None without rows. `pw_mcc`, `matched_fraction` and `shared_fraction` are
            then of matched latents that both fire, and None where there are none.
        pairs: of each pair the `runs`, `latents` matched, the three measures, the same `firing`, and `counterparts`,
            a latent of the second or None for each of the first.
        runs: of each SAE `run`, `d_sae`, how many are `silent`, the two measures over its latents, the same `firing`,
            and lists of one number a latent: `cosine`, the mean `|cosine|` with its counterparts, None where it has
            none; `match_fraction`, the fraction of the other SAEs in which it is matched; `frequency`, the fraction of
            rows that it fires on, None without rows.

    Raises:
        ConfigError: fewer than two SAEs, SAEs of different d_in or data, or an argument that cannot work.
        MachineError: a matrix of cosines takes more memory than is free.
        RunError, FormatError, HubError, StoreError: something is missing or cannot be read.

    Cost: an assignment a pair, R (R - 1) / 2 of them: 2 s each at 4,096 latents, 40 to 60 s and 2.5 GB at 16,384; see
    `matching`. With rows, a pass over them for each SAE.

    Sources: Song et al., "Position: Mechanistic Interpretability Should Prioritize Feature Consistency in SAEs",
    arXiv:2505.20254 (PW-MCC); Paulo and Belrose, "Sparse Autoencoders Trained on the Same Data Learn Different
    Features", arXiv:2501.16615 (shared latents, the threshold).
    """
    check_stability(True, len(saes), match_threshold)
    listener = listening(progress)
    if data is None:
        found = [open_sae(Home.at(home), sae, listener) for sae in saes]
        subjects, models = [subject for subject, _ in found], [saved.sae for _, saved in found]
        check_comparable(subjects, models)
        models = [sae.copy_to(device_named(device)) for sae in models]
        return _document(_names(subjects), models, None, match_threshold, listener)
    everything = all_measured(Home.at(home), saes, data, split, device, listener)
    check_comparable([one.subject for one in everything], [one.sae for one in everything])
    return measured_stability(everything, match_threshold, listener)


def check_stability(wanted: bool, saes: int, match_threshold: float | None) -> None:
    """Refuse, before any work, what cannot be compared; ConfigError where stability is wanted of fewer than two SAEs,
    or the threshold, None for the default, is out of range or for nothing."""
    if match_threshold is not None and not wanted:
        raise ConfigError("--match-threshold does nothing without --stability; leave it out, or ask for --stability",
                          option="match_threshold")
    if match_threshold is not None and not 0 <= match_threshold < 1:
        raise ConfigError(f"--match-threshold must be in [0, 1), got {match_threshold}", option="match_threshold")
    if wanted and saes < 2:
        raise ConfigError("--stability compares runs that differ in seed: expected two or more, got "
                          f"{saes or 'none'}; name them; `sae train --seed 1` trains another", option="stability")


def check_comparable(subjects: Sequence[Subject], saes: Sequence[SAE]) -> None:
    """Refuse SAEs whose latents cannot be compared; ConfigError where they differ in d_in or in the store that they
    were trained on, or have weights that are not finite."""
    names = _names(subjects)
    for name, sae in zip(names, saes, strict=True):
        for width in ("d_in", "d_out"):
            expected, got = getattr(saes[0], width), getattr(sae, width)
            if got != expected:
                raise ConfigError(f"--stability compares runs of one {width}: expected {name} to have {expected} as "
                                  f"{names[0]}, got {got}; name runs trained on the same rows", option="stability")
        if not (sae.W_enc.isfinite().all() and sae.W_dec.isfinite().all()):
            raise ConfigError(f"--stability cannot match the latents of {name}: expected finite weights, got a NaN "
                              "or infinity; leave it out, or train it again", option="stability")
    known = [(name, subject) for name, subject in zip(names, subjects, strict=True) if subject.data is not None]
    for name, subject in known:
        first, expected = known[0]
        if subject.data != expected.data:
            raise ConfigError(f"--stability compares runs of the same data: expected {name} to be trained on "
                              f"{expected.data} as {first}, got {subject.data}; name runs trained on one store",
                              option="stability")
        if None not in (subject.data_hash, expected.data_hash) and subject.data_hash != expected.data_hash:
            raise ConfigError(f"--stability compares runs of the same data: expected {name} and {first} to be "
                              f"trained on one store, got two named {subject.data}; train one of them again",
                              option="stability")


def measured_stability(everything: Sequence[Measured], match_threshold: float, listener: Listener) -> dict[str, Any]:
    """What `stability` returns, of SAEs that `check_comparable` has passed and their rows."""
    frequencies = [one.frequency.numpy() for one in tallied(everything, False, listener)]
    return _document(_names([one.subject for one in everything]), [one.sae for one in everything], frequencies,
                     match_threshold, listener)


def _names(subjects: Sequence[Subject]) -> list[str]:
    """The SAEs' names, numbered where several in memory have the same."""
    names = [subject.name for subject in subjects]
    return [f"{name} {place}" if names.count(name) > 1 else name for place, name in enumerate(names, 1)]


def _document(names: Sequence[str], saes: Sequence[SAE], frequencies: Sequence[NDArray[np.float64]] | None,
              threshold: float, listener: Listener) -> dict[str, Any]:
    places = list(combinations(range(len(saes)), 2))
    found: dict[tuple[int, int], Matching] = {}
    with listener.progress("matching latents", len(places), "pairs") as show:
        for i, j in places:
            if saes[i].W_dec.equal(saes[j].W_dec):
                listener.note(f"warning: {names[i]} and {names[j]} have the same decoder, so that they say nothing on "
                              "stability; expected runs that differ in seed")
            found[i, j] = matching(saes[i], saes[j])
            show(len(found))
    fires = None if frequencies is None else [frequency > 0 for frequency in frequencies]
    pairs = [_pair([names[i], names[j]], one, saes[i].d_sae, threshold, None if fires is None else (fires[i], fires[j]))
             for (i, j), one in found.items()]
    per_latent = [_per_latent(place, sae.d_sae, found, threshold) for place, sae in enumerate(saes)]
    runs = [_run(name, one, None if frequencies is None else frequencies[place])
            for place, (name, one) in enumerate(zip(names, per_latent, strict=True))]
    summary = {name: _mean([pair[name] for pair in pairs]) for name in OVER_PAIRS} | _in_all(per_latent, None)
    firing = None
    if fires is not None:
        firing = {name: _mean([pair["firing"][name] for pair in pairs]) for name in OVER_PAIRS}
        firing |= _in_all(per_latent, fires)
    return {"match_threshold": threshold, **summary, "firing": firing, "pairs": pairs, "runs": runs}


def _pair(names: list[str], one: Matching, d_sae: int, threshold: float,
          fires: tuple[NDArray[np.bool_], NDArray[np.bool_]] | None) -> dict[str, Any]:
    """What the document says of a pair of runs, the first of which has so many latents."""
    matched = one.decoder > threshold
    shared = matched & (one.encoder > threshold)

    def measures(chosen: NDArray[np.bool_]) -> dict[str, Any]:
        return {"latents": int(chosen.sum()),
                **{name: _mean(values[chosen]) for name, values in
                   zip(OVER_PAIRS, (one.decoder, matched, shared), strict=True)}}

    counterparts = np.full(d_sae, -1)
    counterparts[one.first] = one.second
    return {"runs": names, **measures(np.ones_like(matched)),
            "firing": None if fires is None else measures(fires[0][one.first] & fires[1][one.second]),
            "counterparts": [None if place < 0 else place for place in counterparts.tolist()]}


def _per_latent(run: int, d_sae: int, found: Mapping[tuple[int, int], Matching],
                threshold: float) -> dict[str, NDArray[np.float64]]:
    """By latent of a run: the mean `|cosine|` with its counterparts, NaN for none, and the fractions of the other runs
    in which it is matched and shared, each (F,)."""
    counterparts, cosine, matched, shared = np.zeros((4, d_sae))
    others = 0
    for places, one in found.items():
        if run in places:
            others += 1
            latents = one.first if places[0] == run else one.second
            counterparts[latents] += 1
            cosine[latents] += one.decoder
            matched[latents] += one.decoder > threshold
            shared[latents] += (one.decoder > threshold) & (one.encoder > threshold)
    cosine = np.divide(cosine, counterparts, out=np.full(d_sae, np.nan), where=counterparts > 0)
    return {"cosine": cosine, "matched": matched / others, "shared": shared / others}


def _run(name: str, one: Mapping[str, NDArray[np.float64]], frequency: NDArray[np.float64] | None) -> dict[str, Any]:
    """What the document says of a run, by what `_per_latent` does of its latents."""
    fires = None if frequency is None else frequency > 0
    return {"run": name, "d_sae": len(one["cosine"]), "silent": None if fires is None else int((~fires).sum()),
            **_in_all([one], None), "firing": None if fires is None else _in_all([one], [fires]),
            "cosine": [None if np.isnan(value) else value for value in one["cosine"].tolist()],
            "match_fraction": one["matched"].tolist(), "frequency": None if frequency is None else frequency.tolist()}


def _in_all(runs: Sequence[Mapping[str, NDArray[np.float64]]],
            fires: Sequence[NDArray[np.bool_]] | None) -> dict[str, float | None]:
    """The fractions of these runs' latents, or of those that fire, that are matched and shared in every other run."""
    chosen = slice(None) if fires is None else np.concatenate(fires)
    return {name: _mean((np.concatenate([one[key] for one in runs]) == 1)[chosen])
            for name, key in zip(OVER_LATENTS, ("matched", "shared"), strict=True)}


def _mean(values: Sequence[float | None] | NDArray[Any]) -> float | None:
    """Their mean, those that are None left out; None where nothing is left."""
    there = [value for value in values if value is not None] if isinstance(values, list) else values
    return float(np.mean(there)) if len(there) else None


