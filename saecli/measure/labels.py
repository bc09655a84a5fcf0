"""Labels of an SAE's latents: `labels.json` in its folder, and files of others' labels.

    {"12": "numbers in dates",
     "13": {"rule": {"label": "after `return`", "scores": {"texts": 0.93, "tokens": 0.97}},
            "model": {"label": "what a function returns", "scores": {"detection": 0.9}}}}

A latent has a label by hand, a text, or labels by kind, in the order in which one is shown: given, by hand or by
others; by a language model; or a rule's, if its balanced accuracy on tokens is above `LEAST_SHOWN`.
"""

import csv
import gzip
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ..base.documents import read_json
from ..base.errors import FormatError, one_line
from ..base.files import regular, write_json

LABELS = "labels.json"
LEAST_SHOWN = 0.6
Kind = Literal["given", "model", "rule"]
INDEX, TEXT = ("index", "latent"), ("description", "label")  # Neuronpedia's names, and ours


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
        entries = read_json(path, dict[int, str | dict[Kind, Label]])
    except (OSError, ValueError) as error:
        raise FormatError(
            f"cannot read {path}: {error}; correct it, or remove it to go on without labels"
        ) from error
    return {
        latent: {"given": Label(entry)} if isinstance(entry, str) else entry
        for latent, entry in entries.items()
    }


def shown(labels: Mapping[Kind, Label]) -> str | None:
    """The label that is shown of a latent."""
    for kind in get_args(Kind):
        label = labels.get(kind)
        if label is not None and not (kind == "rule" and _is_chance(label)):
            return label.label
    return None


def _is_chance(rule: Label) -> bool:
    return (rule.scores.get("tokens") or 0) <= LEAST_SHOWN


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
    """The labels in a file of others, or in all files of a folder: JSON, JSON lines or CSV, also with .gz.

    Entries are as Neuronpedia exports them, `{"index": "12", "description": "..."}`, or `{"latent": 12, "label":
    "..."}`; in JSON also `{"12": "..."}`. Of several labels of a latent the first counts. FormatError if an entry is
    unlike these, or of another SAE.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    labels: dict[int, Label] = {}
    sources: set[Any] = set()
    for file in files:
        for number, entry in enumerate(_entries(file), 1):
            latent, text = _entry(entry, f"entry {number} of {file}")
            sources.add((entry.get("modelId"), entry.get("layer")))
            if not 0 <= latent < d_sae:
                raise FormatError(
                    f"entry {number} of {file} labels latent {latent}: expected 0 to {d_sae - 1}, the "
                    "last of the SAE; name its own file with --labels"
                )
            if text:
                labels.setdefault(latent, Label(text))
    if len(sources) > 1:
        names = " and ".join(" ".join(map(str, source)) for source in sorted(sources, key=str))
        raise FormatError(
            f"{path} has labels of several SAEs: expected one, got {names}; divide it"
        )
    if not labels:
        raise FormatError(f"{path} has no labels: expected one or more; name another with --labels")
    return labels


def _entry(entry: Any, where: str) -> tuple[int, str]:
    """The latent and the label of an entry."""
    if isinstance(entry, dict):
        latent, text = (
            next((entry[name] for name in names if name in entry), None) for names in (INDEX, TEXT)
        )
        if str(latent).isdecimal() and isinstance(text, str):
            return int(str(latent)), text.strip()
    raise FormatError(
        f"{where} has no label: expected index (or latent) and description (or label), got {entry!r:.80}"
    )


def _entries(path: Path) -> Iterable[Any]:
    name = path.name.removesuffix(".gz")
    try:
        content = regular(path).read_bytes()
        if path.name != name:
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig")
        if name.endswith(".csv"):
            return list(csv.DictReader(io.StringIO(text)))
        if name.endswith(".jsonl"):
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        document = json.loads(text)
    except (OSError, EOFError, ValueError) as error:
        raise FormatError(
            f"cannot read {path}: {one_line(error)}; expected JSON, JSON lines (.jsonl) or CSV (.csv)"
        ) from error
    if isinstance(document, dict):  # ours, by hand
        return [{"index": latent, "label": label} for latent, label in document.items()]
    return document if isinstance(document, list) else [document]
