"""Tables of finished runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from ..tables import table

SHOWN = ("test_fvu", "test_l0", "train_fvu", "dead_fraction", "lr", "alpha")  # of several runs


def run_table(document: Mapping[str, Any]) -> RenderableType:
    """One run's final measures."""
    epochs = f"{document['epochs']} epoch{'s' * (document['epochs'] != 1)}"
    title = f"{document['run']}: {epochs}, {document['steps']:,} steps in {document['seconds']:.0f} s"
    return table(title, ["measure", "value", "rows"],
                 [[key, value, _rows_of(key, document)] for key, value in document["final"].items()])


def runs_table(documents: Sequence[Mapping[str, Any]], varied: Sequence[str]) -> RenderableType:
    """Several runs' varied options and final measures."""
    names = [name for name in SHOWN if name not in varied]
    rows = [[document["run"], *document["varied"].values(), *(document["final"].get(name) for name in names)]
            for document in documents]
    title = (f"test: {_rows_of('test', documents[0])} rows; train and dead: {_rows_of('train', documents[0])} rows"
             if documents else None)
    return table(title, ["run", *(name.replace("_", " ") for name in [*varied, *names])], rows)


def _rows_of(measure: str, document: Mapping[str, Any]) -> str:
    """The rows on which a final measure is taken, in words; empty for a setting."""
    if measure.startswith("test"):
        return f"{document['rows_test']:,} held-out"
    return f"{document['rows_train']:,} training" if measure.startswith(("train", "dead")) else ""
