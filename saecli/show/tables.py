"""The helper that makes tables, and the tables of stores, training and geometry; others: `measures.py`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..base.home import Home
from ..base.words import counted, number, numbers_in_words, printable, size_words

JsonObject = Mapping[str, Any]  # what measure, geometry and others return, or a part of it
LONG_WORD = 24  # characters of a word that is folded rather than leave other columns no room
METRIC_WORDS = {"raw": "raw rows", "training": "metric of training"}
WHOLE_CELL = 16  # characters of a cell that is not folded, such as a size or a time


def table(
    title: str | None, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> RenderableType:
    """A table under its title, if any; numbers are formatted by `number`.

    The first column and those with phrases stand left, others right. What does not fit folds between words, and then
    into two tables, each with the first column.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    shown = _Columns(
        [[Text(head), *(row[place] for row in cells)] for place, head in enumerate(columns)]
    )
    return Group(Text(title, style="bold"), shown) if title else shown


def spelt(names: Iterable[str]) -> list[str]:
    return [name.replace("_", " ") for name in names]


def records_table(
    title: str | None, records: Iterable[JsonObject], columns: Sequence[str] | Mapping[str, str]
) -> RenderableType:
    """A line per record, with some of its entries as columns, under their names or those that a mapping gives."""
    heads = [*columns.values()] if isinstance(columns, Mapping) else spelt(columns)
    return table(title, heads, [[record[name] for name in columns] for record in records])


def _cell(value: Any) -> Text:
    if isinstance(value, Text):
        return value
    return Text(printable(value) if isinstance(value, str) else number(value))


@dataclass(frozen=True)
class _Columns:
    columns: Sequence[Sequence[Text]]  # each its header and its cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        words = [_longest_word(column) for column in self.columns]
        least = [
            min(words[0], options.max_width - LONG_WORD),
            *(min(word, LONG_WORD) for word in words[1:]),
        ]
        left = options.max_width - 1 - sum(3 + width for width in least)
        if left < 0 and len(least) > 2:
            half = (len(least) + 2) // 2
            yield _Columns(self.columns[:half])
            yield _Columns([self.columns[0], *self.columns[half:]])
            return
        shown = Table(header_style="bold")
        for column, width in zip(self.columns, least, strict=True):
            more = max(0, min(left, max(cell_len(cell.plain) for cell in column) - width))
            left -= more
            phrases = column is self.columns[0] or any(" " in cell.plain for cell in column[1:])
            shown.add_column(
                column[0],
                justify="left" if phrases else "right",
                overflow="fold",
                width=width + more if left >= 0 else None,
            )
        for row in zip(*(column[1:] for column in self.columns), strict=True):
            shown.add_row(*row)
        yield shown


def _longest_word(column: Sequence[Text]) -> int:
    """The width of a column's longest word; short cells, such as sizes and times, are words."""
    head, *cells = (cell.plain for cell in column)
    words = head.split()
    for cell in cells:
        words += [cell] if len(cell) <= WHOLE_CELL else cell.split()
    return max(map(cell_len, words), default=0)


# Most wanted first: on a narrow terminal the last ones stand in a table below.
STORE_COLUMNS = ("rows", "d_in", "dtype", "bytes", "state", "created")
RUN_COLUMNS = ("test_fvu", "test_l0", "solver", "act", "d_sae", "state", "created", "data", "bytes")
LISTING_HEADS = {"bytes": "size", "created": "begun, UTC"}


def stored_tables(document: JsonObject) -> list[RenderableType]:
    """A store's facts, or a line for each of several; of `store.opening.stores_document`."""
    stores = document.get("stores", [document])
    cached = all(store["cached"] for store in stores)
    title = "stored already, by the same request" if cached else "stored"
    if len(stores) == 1:
        return [table(title, ["", stores[0]["name"]], [*_store_facts(stores[0]).items()])]
    lines = [
        {
            **{name: store["source"].get(name) for name in ("model", "layer", "site")},
            **{name: store[name] for name in ("name", "rows", "d_in", "path")},
            "median norm": store["norms"] and store["norms"]["median"],
        }
        for store in stores
    ]
    title = f"{title}: {len(stores)} stores of the same tokens"
    columns = ("name", "model", "layer", "site", "rows", "d_in", "median norm", "path")
    return [records_table(title, lines, columns)]


def modules_table(document: JsonObject) -> RenderableType:
    rows = [
        [module["module"], numbers_in_words(module["layers"]), module["in"], module["out"]]
        for module in document["modules"]
    ]
    title = f"modules of {document['model']}, and the sites that their inputs and outputs are"
    return table(title, ["--module", "layers", ":in", ":out"], rows)


def _store_facts(store: JsonObject) -> dict[str, Any]:
    source, norms = store["source"], store["norms"]
    names = ("model", "layer", "site", "module", "dataset", "file", "key")
    facts = {name: source[name] for name in names if source.get(name) is not None}
    if source.get("module") == source.get("site"):  # a module outside of blocks
        facts.pop("module", None)
    if "layer" in facts and "layers" in source:
        facts["layer"] = f"{source['layer']} of {source['layers']}, from 0"
    if "context" in source:
        packed = ", packed" if source.get("packed") else ""
        facts["context"] = counted(source["context"], "token") + packed
    facts |= {key: store[key] for key in ("path", "rows", "d_in", "dtype", "shards")}
    parts = dict(store.get("sources", {}))
    if control := store.get("control_tokens"):
        parts["control tokens"] = sum(control.values())
    for name, rows in parts.items():
        facts[f"rows: {name}"] = f"{rows:,} ({rows / store['rows']:.1%})"
    if norms:
        sizes = [f"{name} {number(norms[name])}" for name in ("median", "mean", "max")]
        facts["norm"] = ", ".join(sizes)
    return facts | {f"dropped: {reason}": count for reason, count in store["dropped"].items()}


def listing_tables(document: JsonObject) -> list[RenderableType]:
    """A table of stores, one of runs, and a line for each problem; of `list_home`'s document."""
    home, stores, runs = Home(Path(document["home"])), document["stores"], document["runs"]
    if not stores and not runs:
        return [f"{home.path} holds nothing yet; {home.stores.remedy}"]
    shown: list[RenderableType] = []
    if stores:
        shown.append(_listing(f"stores in {home.stores.path}", STORE_COLUMNS, stores))
    if runs:
        shown.append(_listing(f"runs in {home.runs.path}", RUN_COLUMNS, runs))
    for entry in (*stores, *runs):
        if "problem" in entry:
            shown.append(f"{entry['name']}: {entry['problem']}")
    # Those of stores come first in `problems`, and are shown.
    unreadable = sum("problem" in store for store in stores)
    return shown + document.get("problems", [])[unreadable:]


def _listing(title: str, columns: Sequence[str], entries: Sequence[JsonObject]) -> RenderableType:
    heads = [LISTING_HEADS.get(column, column) for column in columns]
    rows = [[entry["name"], *(_listed(entry, column) for column in columns)] for entry in entries]
    return table(title, ["name", *heads], rows)


def _listed(entry: JsonObject, column: str) -> Any:
    value: Any = entry.get(column)
    if column == "bytes":
        return size_words(value)
    if column == "created" and value:
        return value[:16].replace("T", " ")
    return value


COMPARED = ("loss", "fvu", "l0", "kl", "ce_recovered")  # before and after, where measured
RESULTS = {
    "data": "data",
    "d_sae": "d_sae",
    "test_fvu": "FVU",
    "test_l0": "L0",
    "dead": "dead latents",
}

RUN_FIGURES = {
    "run": "run",
    "epochs": "epochs",
    "steps": "steps",
    "seconds": "seconds",
    "train_fvu": "FVU on training rows",
    "lr": "learning rate",
}


def results_table(documents: Sequence[JsonObject], varied: Sequence[str] = ()) -> RenderableType:
    counts = {(document["rows_test"], document["rows_counted"]) for document in documents}
    title = "FVU and L0 on held-out rows, dead latents on training rows"
    if len(counts) == 1:
        ((held_out, trained),) = counts
        title = f"FVU and L0 on {counted(held_out, 'held-out row')}, dead latents on {counted(trained, 'training row')}"
    options = [name for name in varied if name not in RESULTS]
    rows = []
    for document in documents:
        dead = round(document["final"]["dead_fraction"] * document["d_sae"])
        values = document["final"] | document | {"dead": dead}
        settings = [document["varied"][name] for name in options]
        rows.append([document["run"], *settings, *(values[name] for name in RESULTS)])
    heads = ["run", *spelt(options), *RESULTS.values()]
    return table(title, heads, rows)


def compared_tables(documents: Sequence[JsonObject]) -> list[RenderableType]:
    """Runs that trained an SAE on: measures before and after, and which SAE each kept."""
    compared = [document for document in documents if "kept" in document]
    if not compared:
        return []
    names = [name for name in COMPARED if name in compared[0]["before"]]
    lines = [
        document | document["before"] | {f"{name}_after": document["after"][name] for name in names}
        for document in compared
    ]
    columns = ["run", "kept", *(f"{name}{when}" for name in names for when in ("", "_after"))]
    title = "before training and after, on rows kept out of training if there are any"
    return [records_table(title, lines, columns)]


def figures_table(documents: Sequence[JsonObject]) -> RenderableType:
    lines = [
        document | document["final"] | {"seconds": round(document["seconds"])}
        for document in documents
    ]
    return records_table(None, lines, RUN_FIGURES)


def _median_line(label: str, measures: JsonObject) -> list[Any]:
    low, high = number(measures["p5"]), number(measures["p95"])
    return [f"{label}, median", measures["median"], f"5% to 95%: {low} to {high}"]


def geometry_table(document: JsonObject) -> RenderableType:
    rank, margin, complexity = (document[name] for name in ("rank", "margin", "complexity"))
    possible = f"of 10^{document['cells_possible_log10']:.1f} possible"
    full = f"full in {100 * rank['full']:.3g}% of {counted(rank['cells'], 'cell')}"
    boundaries = f"{complexity['boundary']} within {number(complexity['radius'])}"
    occupancy = document["occupancy"]
    fullest = f"fullest cell {counted(occupancy['max'], 'row')}"
    entropy = f"entropy {number(occupancy['entropy'])} nats"
    lines: list[list[Any]] = [
        ["rows", document["rows"], f"{number(document['l0'])} latents kept in a row"],
        ["cells visited", document["cells_visited"], possible],
        ["cells with one row", occupancy["singletons"], fullest],
        ["effective number of cells", occupancy["effective"], entropy],
        ["rank of a cell's map, median", rank["median"], full],
    ]
    if (diagram := document["power_diagram"]) is not None:
        decided = diagram["rows"] - diagram["ties"]
        agreed = round((diagram["agreement"] or 0) * decided)
        words = f"of {counted(decided, 'row')} compared, {counted(diagram['ties'], 'tie')} left out"
        lines.append(["rows where the power diagram agrees", agreed, words])
    rows = counted(complexity["rows"], "row")
    lines += [
        _median_line("margin", margin),
        _median_line("margin over row norm", margin["relative"]),
        ["local complexity, median", complexity["median"], f"{boundaries}, {rows}"],
    ]
    if (other := document["other_split"]) is not None:
        for name in ("margin", "complexity"):
            lines.append(_median_line(f"{name}, {other['split']} rows", other[name]))
    title = f"{document['run']} on {document['data']}, {document['split']} rows; margins and complexity on raw rows"
    lines += _reference_lines(document["references"])
    return table(title, ["measure", "value", "detail"], lines)


def _reference_lines(references: JsonObject) -> list[list[Any]]:
    kmeans = counted(references["kmeans_cells"], "cell")
    pca = (
        f"{counted(references['local_pca_cells'], 'cell')} of rank {references['local_pca_rank']:,}"
    )
    fitted = counted(references["rows_fitted"], "train row")
    measured = f"{counted(references['rows_measured'], 'row')}, as the others"
    if not references["held_out"]:
        measured += "; rows fitted on are among them"
    metric = METRIC_WORDS[references["metric"]]
    return [
        [f"FVU of k-means, {metric}", references["kmeans_fvu"], f"{kmeans}, {fitted}"],
        [f"FVU of the SAE, {metric}", references["sae_fvu"], measured],
        [f"FVU of local PCA, {metric}", references["local_pca_fvu"], pca],
    ]


def geometries_table(documents: Sequence[JsonObject]) -> RenderableType:
    rows = [
        [
            *(document[name] for name in ("run", "rows", "l0", "cells_visited")),
            document["margin"]["median"],
            document["complexity"]["median"],
            *(document["references"][f"{name}_fvu"] for name in ("kmeans", "sae", "local_pca")),
            document["references"]["metric"],
        ]
        for document in documents
    ]
    heads = ["run", "rows", "l0", "cells visited", "margin, median", "complexity, median"]
    return table(None, [*heads, "k-means FVU", "SAE FVU", "local PCA FVU", "metric of FVU"], rows)
