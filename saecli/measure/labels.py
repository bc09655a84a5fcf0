"""Labels of an SAE's latents: `labels.json` in its folder, and files of others' labels.

    {"12": "numbers in dates",
     "13": {"rule": {"label": "after `return`", "scores": {"texts": 0.93, "tokens": 0.97}},
            "model": {"label": "what a function returns", "scores": {"detection": 0.9}}}}

A latent has a text, its label by hand, or labels by kind; the first of these is shown: given, by hand or by others; by
a language model; a rule's; the latter two if a balanced accuracy is high enough (`SHOWN_ABOVE`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from ..base.errors import FormatError, one_line
from ..base.files import parse_json, read_json, to_json, write_json
from ..extract.readers import json_entries

OfLatent = TypeVar("OfLatent")
LABELS = "labels.json"
LEAST_SHOWN = 0.55
SHOWN_ABOVE = {"model": ("detection", 0.6), "rule": ("tokens", LEAST_SHOWN)}
LabelKind = Literal["given", "model", "rule"]


@dataclass(frozen=True)
class Label:
    label: str
    scores: dict[str, float | None] = field(default_factory=dict)  # balanced accuracies


Labels = dict[int, dict[LabelKind, Label]]


def read_labels(path: Path, d_sae: int) -> Labels:
    """The labels in a `labels.json`, none without the file; FormatError if it is not as above, or of another SAE."""
    if not path.is_file():
        return {}
    try:
        entries = read_json(path, dict[str, Any])
        by_kind = {
            _latent(number, d_sae): {"given": {"label": entry}} if isinstance(entry, str) else entry
            for number, entry in entries.items()
        }
        return parse_json(to_json(by_kind), Labels)
    except (OSError, ValueError) as error:
        raise FormatError(
            f"cannot read {path}: {error}; correct it, or remove it to go on without labels"
        ) from error


def _latent(number: int | str, d_sae: int) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", str(number)) or int(number) >= d_sae:
        raise ValueError(f"expected latents 0 to {d_sae - 1}, the last of the SAE, got {number!r}")
    return int(number)


def _shown(labels: Mapping[LabelKind, Label]) -> tuple[str, float | None] | None:
    """The label that is shown, if any, and its score, None by hand."""
    for kind in get_args(LabelKind):
        label = labels.get(kind)
        if label is None:
            continue
        if kind not in SHOWN_ABOVE:
            return label.label, None
        measure, least = SHOWN_ABOVE[kind]
        score = label.scores.get(measure, 1.0)
        if score is not None and score > least:
            return label.label, label.scores.get(measure)
    return None


def shown(labels: Mapping[LabelKind, Label]) -> str | None:
    found = _shown(labels)
    return None if found is None else found[0]


def _shown_in(folder: Path | None, d_sae: int) -> dict[int, tuple[str, float | None]]:
    labels = {} if folder is None else read_labels(folder / LABELS, d_sae)
    each = ((latent, _shown(by_kind)) for latent, by_kind in labels.items())
    return {latent: found for latent, found in each if found is not None}


def shown_labels(folder: Path | None, d_sae: int) -> dict[int, str]:
    """The label shown of each latent that has one, by the file in an SAE's folder."""
    return {latent: label for latent, (label, _) in _shown_in(folder, d_sae).items()}


def shown_scores(folder: Path | None, d_sae: int) -> dict[int, float]:
    """The balanced accuracy of each label that is shown and has one: `SHOWN_ABOVE` says which; chance is 0.5."""
    found = _shown_in(folder, d_sae).items()
    return {latent: score for latent, (_, score) in found if score is not None}


def add_labels(path: Path, kind: LabelKind, labels: Mapping[int, Label], d_sae: int) -> Labels:
    """Add labels to those in a file, in place of earlier ones of their kind; returns all."""
    merged = read_labels(path, d_sae)
    for latent, label in labels.items():
        merged.setdefault(latent, {})[kind] = label
    _write_labels(path, merged)
    return merged


def remove_labels(
    path: Path, kind: LabelKind, latents: Iterable[int], d_sae: int
) -> dict[int, Label]:
    """Remove some latents' labels of a kind from a file; returns those that were there."""
    kept = read_labels(path, d_sae)
    removed = {latent: kept[latent].pop(kind) for latent in latents if kind in kept.get(latent, {})}
    if removed:
        _write_labels(path, kept)
    return removed


def _write_labels(path: Path, labels: Labels) -> None:
    document = {
        str(latent): {name: asdict(label) for name, label in labels[latent].items()}
        for latent in sorted(labels)
        if labels[latent]
    }
    write_json(path, document)


@dataclass(frozen=True)
class Explanation:
    """An entry of a file of Neuronpedia's."""

    index: int | str
    description: str | None = None


def others_labels(path: Path, d_sae: int) -> dict[int, Label]:
    """The labels in a file of Neuronpedia's, or a folder's files: JSON or JSON lines, also compressed, of entries
    `{"index": "12", "description": "..."}`, the first of each latent; FormatError for others, or of another SAE."""
    labels: dict[int, Label] = {}
    try:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            for _, row in json_entries(file, "description"):
                if isinstance(row, Exception):
                    raise row
                entry = parse_json(to_json(row), Explanation)
                latent = _latent(entry.index, d_sae)
                if text := (entry.description or "").strip():
                    labels.setdefault(latent, Label(text))
        if not labels:
            raise ValueError("it holds no label")
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(
            f"cannot read {path}: {one_line(error)}; expected Neuronpedia's entries with index and description, as "
            "JSON or JSON lines (.jsonl), of this SAE; name its own file with --labels"
        ) from error
    return labels


def balanced_accuracy(said: np.ndarray, true: np.ndarray) -> float | None:
    """The mean of the fractions of true and of false ones said to be so; None without one of them."""
    if true.all() or not true.any():
        return None
    return float(said[true].mean() + (~said[~true]).mean()) / 2


def derange(values: Mapping[int, OfLatent], seed: int = 0) -> dict[int, OfLatent]:
    """Each latent with another one's value, for the floor of scores; empty for fewer than two."""
    latents = np.random.default_rng(seed).permutation(list(values)).tolist()
    others = np.roll(latents, 1).tolist()
    pairs = zip(latents, others, strict=True)
    return {latent: values[other] for latent, other in pairs if latent != other}
