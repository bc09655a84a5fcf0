"""Labels of an SAE's latents: `labels.json` in its folder, and files of others' labels.

    {"12": "numbers in dates",
     "13": {"rule": {"label": "after `return`", "scores": {"texts": 0.93, "tokens": 0.97}},
            "model": {"label": "what a function returns", "scores": {"detection": 0.9}}}}

A latent has a label by hand, a text, or labels by kind, in the order in which one is shown: given, by hand or by
others; by a language model; or a rule's; the latter two if a balanced accuracy is high enough (`SHOWN_ABOVE`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ..base.documents import parse_json, read_json
from ..base.errors import FormatError, one_line
from ..base.files import to_json, write_json

LABELS = "labels.json"
LEAST_SHOWN = 0.55
SHOWN_ABOVE = {"model": ("detection", 0.6), "rule": ("tokens", LEAST_SHOWN)}
Kind = Literal["given", "model", "rule"]


@dataclass(frozen=True)
class Label:
    label: str
    scores: dict[str, float | None] = field(default_factory=dict)  # balanced accuracies


Labels = dict[int, dict[Kind, Label]]


def read_labels(path: Path) -> Labels:
    """The labels in a file of ours, none without the file; FormatError if it is not as above."""
    if not path.is_file():
        return {}
    try:
        entries = read_json(path, dict[int, Any])
        by_kind = {
            latent: {"given": {"label": entry}} if isinstance(entry, str) else entry
            for latent, entry in entries.items()
        }
        return parse_json(to_json(by_kind), Labels)
    except (OSError, ValueError) as error:
        raise FormatError(
            f"cannot read {path}: {error}; correct it, or remove it to go on without labels"
        ) from error


def shown(labels: Mapping[Kind, Label]) -> str | None:
    """The label that is shown of a latent."""
    for kind in get_args(Kind):
        label = labels.get(kind)
        if label is None:
            continue
        measure, least = SHOWN_ABOVE.get(kind, ("", 0.0))
        score = label.scores.get(measure, 1.0)
        if score is not None and score > least:
            return label.label
    return None


def shown_labels(folder: Path | None) -> dict[int, str]:
    """The label of each latent that has one, by the file in an SAE's folder."""
    if folder is None:
        return {}
    each = ((latent, shown(labels)) for latent, labels in read_labels(folder / LABELS).items())
    return {latent: label for latent, label in each if label is not None}


def add_labels(path: Path, kind: Kind, labels: Mapping[int, Label]) -> Labels:
    """Add labels of a kind to those in a file, in place of earlier ones of that kind; returns all."""
    merged = read_labels(path)
    for latent, label in labels.items():
        merged.setdefault(latent, {})[kind] = label
    document = {
        str(latent): {name: asdict(label) for name, label in merged[latent].items()}
        for latent in sorted(merged)
    }
    write_json(path, document)
    return merged


def others_labels(path: Path, d_sae: int) -> dict[int, Label]:
    """The labels in a file of Neuronpedia's, or in all files of a folder: JSON or JSON lines, also with .gz.

    Entries are `{"index": "12", "description": "..."}`. Of several labels of a latent the first counts. FormatError if
    the entries are others, or of another SAE.
    """
    import pandas  # a sixth of a second, which commands that only show labels need not wait

    files = sorted(path.iterdir()) if path.is_dir() else [path]
    try:
        table = pandas.concat(
            pandas.read_json(file, lines=".jsonl" in file.suffixes, dtype=False) for file in files
        ).dropna(subset="description")
        latents = table["index"].astype(int)
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise FormatError(
            f"cannot read {path}: {one_line(error)}; expected Neuronpedia's entries with index and "
            "description, as JSON or JSON lines (.jsonl)"
        ) from error
    if not latents.between(0, d_sae - 1).all():
        raise FormatError(
            f"{path} labels latents {latents.min()} to {latents.max()}: expected 0 to {d_sae - 1}, the "
            "last of the SAE; name its own file with --labels"
        )
    labels: dict[int, Label] = {}
    for latent, description in zip(latents.tolist(), table["description"], strict=True):
        if text := str(description).strip():
            labels.setdefault(latent, Label(text))
    return labels
