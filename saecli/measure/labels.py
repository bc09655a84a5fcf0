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
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..base.documents import parse_json, read_json
from ..base.errors import FormatError, one_line
from ..base.files import to_json, write_json

if TYPE_CHECKING:
    import pandas

LABELS = "labels.json"
LEAST_SHOWN = 0.55
SHOWN_ABOVE = {"model": ("detection", 0.6), "rule": ("tokens", LEAST_SHOWN)}
Kind = Literal["given", "model", "rule"]
OURS = {"index": "latent", "description": "label"}  # by Neuronpedia's names


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
    """The labels in a file of others, or in all files of a folder: JSON, JSON lines or CSV, also with .gz.

    Entries are as Neuronpedia exports them, `{"index": "12", "description": "..."}`, or `{"latent": 12, "label":
    "..."}`. Of several labels of a latent the first counts. FormatError if the entries are others, or of another SAE.
    """
    import pandas  # a sixth of a second, which commands that only show labels need not wait

    files = sorted(path.iterdir()) if path.is_dir() else [path]
    table = pandas.concat([_table(file) for file in files])
    sources = table.reindex(columns=["modelId", "layer"]).drop_duplicates()
    if len(sources) > 1:
        names = " and ".join(" ".join(map(str, source)) for source in sources.to_numpy()[:2])
        raise FormatError(f"{path} labels latents of several SAEs: expected one, got {names}")
    latents = table["latent"].astype(int)
    if not latents.between(0, d_sae - 1).all():
        raise FormatError(
            f"{path} labels latents {latents.min()} to {latents.max()}: expected 0 to {d_sae - 1}, the "
            "last of the SAE; name its own file with --labels"
        )
    labels: dict[int, Label] = {}
    for latent, text in zip(latents.tolist(), table["label"].str.strip(), strict=True):
        if text:
            labels.setdefault(latent, Label(text))
    return labels


def _table(path: Path) -> "pandas.DataFrame":
    """The columns of a file, as text; latents and labels by our names."""
    import pandas

    name = path.name.removesuffix(".gz")
    try:
        path.open("rb").close()  # pandas takes a missing path for JSON itself
        if name.endswith(".csv"):
            table = pandas.read_csv(path, dtype=str, keep_default_na=False)
        else:
            table = pandas.read_json(path, lines=name.endswith(".jsonl"), dtype=False)
    except (OSError, EOFError, ValueError) as error:
        raise FormatError(
            f"cannot read {path}: {one_line(error)}; expected JSON, JSON lines (.jsonl) or CSV (.csv)"
        ) from error
    table = table.rename(columns=OURS)
    if {"latent", "label"} <= set(table.columns):
        table = table.dropna(subset="label").astype({"latent": str})
        whole = table["latent"].str.fullmatch(r"\d{1,9}").all()
        if len(table) and whole and table["label"].map(type).eq(str).all():
            return table
    raise FormatError(
        f"{path} has no labels: expected entries with index (or latent), a whole number, and description "
        f"(or label), a text, got {', '.join(map(str, table.columns)):.60}"
    )
