"""The helper that makes tables, and the tables of stores, training and geometry; others: `measures.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..base.errors import counted, number, printable, size_words
from ..base.home import Home

LONG = 24  # characters of a word that is folded rather than leave other columns no room
WHOLE = 16  # characters of a cell that is not folded, such as a size or a time


def table(
    title: str | None, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> RenderableType:
    """A table under its title, if any, with one cell per column in each row; numbers are formatted by `number`.

    The first column and those with phrases stand left, others right. What does not fit the console folds between words;
    where words do not fit either, the columns stand in two tables, each with the first.
    """
    cells = [
        [
            cell
            if isinstance(cell, Text)
            else Text(printable(cell) if isinstance(cell, str) else number(cell))
            for cell in row
        ]
        for row in rows
    ]
    shown = _Columns(
        [[Text(head), *(row[place] for row in cells)] for place, head in enumerate(columns)]
    )
    return Group(Text(title, style="bold"), shown) if title else shown


@dataclass(frozen=True)
class _Columns:
    columns: Sequence[Sequence[Text]]  # each its header and its cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        words = [
            max(
                cell_len(word)
                for cell in column
                for word in _unfolded(cell.plain, cell is column[0])
            )
            for column in self.columns
        ]
        least = [min(words[0], options.max_width - LONG), *(min(word, LONG) for word in words[1:])]
        left = options.max_width - 1 - sum(3 + size for size in least)
        if left < 0 and len(least) > 2:
            half = (len(least) + 2) // 2
            yield _Columns(self.columns[:half])
            yield _Columns([self.columns[0], *self.columns[half:]])
            return
        shown = Table(header_style="bold")
        for place, (size, (head, *cells)) in enumerate(zip(least, self.columns, strict=True)):
            more = max(0, min(left, max(cell_len(cell.plain) for cell in (head, *cells)) - size))
            left -= more
            phrases = place == 0 or any(" " in cell.plain for cell in cells)
            shown.add_column(
                head,
                justify="left" if phrases else "right",
                overflow="fold",
                width=size + more if left >= 0 else None,
            )
        for row in zip(*(column[1:] for column in self.columns), strict=True):
            shown.add_row(*row)
        yield shown


def _unfolded(cell: str, head: bool) -> list[str]:
    return [cell] if len(cell) <= WHOLE and not head else [*cell.split(), ""]


TEXT_REASONS = ("empty_texts", "short_texts")  # reasons in `dropped` that count texts, not rows
# Most wanted first: on a narrow terminal the last ones stand in a table below.
STORE_COLUMNS = ("rows", "d_in", "dtype", "bytes", "state", "created", "norms", "dropped", "shards")
RUN_COLUMNS = ("test_fvu", "test_l0", "solver", "act", "d_sae", "state", "created", "data", "bytes")
HEADS = {"bytes": "size", "created": "begun", "norms": "median norm"}


def stored_tables(document: dict[str, Any]) -> list[RenderableType]:
    """`store.opening.stored`'s document: a table for each store."""
    stores = document.get("stores", [document])
    return [
        table(
            "stored already, by the same request" if store["cached"] else "stored",
            ["", store["name"]],
            _stored(store, [other["name"] for other in stores if other is not store]),
        )
        for store in stores
    ]


def _stored(store: Mapping[str, Any], others: Sequence[str]) -> list[list[Any]]:
    source, norms = store["source"], store["norms"]
    names = ("model", "site", "dataset", "file", "key")
    lines = [[name, source[name]] for name in names if source.get(name) is not None]
    if "layer" in source:
        counted_from = f" of {source['layers']}, from 0" if "layers" in source else ""
        lines.insert(1, ["layer", f"{source['layer']}{counted_from}"])
    if "context" in source:
        lines.append(
            [
                "context",
                counted(source["context"], "token") + ", packed" * bool(source.get("packed")),
            ]
        )
    if others:
        lines.append(["same tokens as", ", ".join(others)])
    lines += [[key, store[key]] for key in ("path", "rows", "d_in", "dtype", "shards")]
    lines += [
        [f"rows: {name}", f"{rows:,} ({rows / store['rows']:.1%})"]
        for name, rows in [
            *store.get("sources", {}).items(),
            *[
                ("control tokens", sum(found.values()))
                for found in [store.get("control_tokens")]
                if found
            ],
        ]
    ]
    if norms:
        sizes = [f"{name} {number(norms[name])}" for name in ("median", "mean", "max")]
        lines.append(["norm", ", ".join(sizes)])
    for reason, count in store["dropped"].items():
        words = counted(count, "text")
        if reason not in TEXT_REASONS:
            percentage = 100 * count / (store["rows"] + _rows_dropped(store))
            words = f"{count:,} ({percentage:.2g}%)"
        lines.append([f"dropped: {reason}", words])
    return lines


def _rows_dropped(store: Mapping[str, Any]) -> int:
    return sum(count for reason, count in store["dropped"].items() if reason not in TEXT_REASONS)


def listing_tables(document: dict[str, Any]) -> list[RenderableType]:
    """`list_home`'s document for people: a table of stores, one of runs, and a line for each problem."""
    home, stores, runs = Home(Path(document["home"])), document["stores"], document["runs"]
    if not stores and not runs:
        return [f"{home.path} holds nothing yet; {home.stores.remedy}"]
    shown = [
        table(
            f"{kind} in {folder}",
            ["name", *(HEADS.get(column, column) for column in columns)],
            [[entry["name"], *(_cell(entry, column) for column in columns)] for entry in entries],
        )
        for kind, folder, columns, entries in (
            ("stores", home.stores.path, STORE_COLUMNS, stores),
            ("runs", home.runs.path, RUN_COLUMNS, runs),
        )
        if entries
    ]
    broken = [
        f"{entry['name']}: {entry['problem']}" for entry in (*stores, *runs) if "problem" in entry
    ]
    unreadable = sum(
        "problem" in store for store in stores
    )  # come first in problems, and are in broken
    return shown + broken + document.get("problems", [])[unreadable:]


def _cell(entry: dict[str, Any], column: str) -> Any:
    value: Any = entry.get(column)
    if column == "bytes":
        return size_words(value)
    if column == "created":
        return _local_time(value)
    if column == "norms" and value is not None:
        return value["median"]
    if column == "dropped" and value is not None:  # the percentage of rows
        dropped = _rows_dropped(entry)
        return f"{100 * dropped / (entry['rows'] + dropped):.2g}%" if dropped else None
    return value


def _local_time(created: str) -> str | None:
    """To the minute, from a marker's time with its zone; as it is where it has none."""
    try:
        when = datetime.fromisoformat(created)
    except ValueError:
        return created or None
    return f"{when.astimezone():%Y-%m-%d %H:%M}" if when.tzinfo else created


COMPARED = ("loss", "fvu", "l0", "kl", "ce_recovered")  # before and after, where measured
RESULTS = {
    "data": "data",
    "d_sae": "d_sae",
    "test_fvu": "FVU",
    "test_l0": "L0",
    "dead": "dead latents",
}
NO_VARIANCE = 1e9  # of a ridge over the mean diagonal: larger where codes do not vary
FIGURES = {  # of a run, below its results, what a user can act on first; a solver's own go by their names
    "train_fvu": ("FVU on training rows", "if far below the held-out one, more rows would help"),
    "revived": ("latents re-aimed", "dead ones that were given new directions"),
    "lr": ("peak learning rate", "--lr changes it"),
    "test_mse": ("held-out MSE", "mean over rows and dimensions"),
    "relative_alpha": (
        "ridge of the decoder step",
        "over the Gram matrix's mean diagonal; --alpha changes it",
    ),
    "condition": (
        "condition of the decoder step",
        "the solve loses its log10 of float64's 15 digits",
    ),
    "dof": ("effective degrees of freedom", "decoder vectors that the rows determine, of d_sae"),
    "released": ("decoder released", "trained by gradient in the second half; --release"),
    "residual": ("residual of the decoder step", "of its iterative solve, relative"),
}


def results_table(
    documents: Sequence[Mapping[str, Any]], varied: Sequence[str] = ()
) -> RenderableType:
    """The results of runs, documents of `sae train --json`, with the options that differ."""
    held_out, trained = (
        [counted(count, f"{kind} row") for count in {document[key] for document in documents}]
        for key, kind in (("rows_test", "held-out"), ("rows_counted", "training"))
    )
    title = (
        "FVU and L0 on "
        + (
            f"{held_out[0]}, dead latents on {trained[0]}"
            if len(held_out) == len(trained) == 1
            else "held-out rows, dead latents on training rows"
        )
        if documents
        else None
    )
    options = [name for name in varied if name not in RESULTS]
    rows = []
    for document in documents:
        dead = round(document["final"]["dead_fraction"] * document["d_sae"])
        found = document["final"] | document | {"dead": dead}
        rows.append(
            [
                found["run"],
                *(found["varied"][name] for name in options),
                *(found[name] for name in RESULTS),
            ]
        )
    return table(
        title, ["run", *(name.replace("_", " ") for name in options), *RESULTS.values()], rows
    )


def compared_tables(documents: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """A table for each run that trained an SAE on: held-out measures before and after, and which SAE it kept."""
    return [
        table(
            f"{one['run']} on held-out rows; the SAE {one['kept']} training is kept",
            ["measure", "before", "after"],
            [
                [name.replace("_", " "), one["before"][name], one["after"][name]]
                for name in COMPARED
                if name in one["before"]
            ],
        )
        for one in documents
        if "kept" in one
    ]


def figures_table(documents: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Runs' other measures and their solvers' figures, a column each; for a single run with their meanings."""
    names = {name for document in documents for name in document["final"]} - {
        *RESULTS,
        "run",
        "dead_fraction",
        "alpha",
    }
    shown = [
        (name, *FIGURES.get(name, (name.replace("_", " "), "")))
        for name in sorted(names, key=lambda name: ([*FIGURES, name].index(name), name))
    ]
    if len(documents) > 1:
        return table(
            None,
            ["figure", *(each["run"] for each in documents)],
            [
                ["steps", *(each["steps"] for each in documents)],
                ["seconds", *(round(each["seconds"]) for each in documents)],
                *(
                    [label, *(_figure(name, each) for each in documents)]
                    for name, label, _ in shown
                ),
            ],
        )
    (one,) = documents
    return table(
        f"{one['solver']}: {counted(one['epochs'], 'epoch')}, {counted(one['steps'], 'step')} in "
        f"{one['seconds']:.0f} s",
        ["figure", "value", "meaning"],
        [[label, _figure(name, one), meaning] for name, label, meaning in shown],
    )


def _figure(name: str, document: Mapping[str, Any]) -> Any:
    value = document["final"].get(name)
    if name == "released" and value is not None:
        return "yes" if value else "no"
    return None if name == "relative_alpha" and value is not None and value > NO_VARIANCE else value


def disagreement(diagram: Mapping[str, Any] | None) -> str | None:
    """The rows on which the power diagram disagrees with the SAE's cells: "on 3 of 100 rows"; None for none."""
    decided = diagram["rows"] - diagram["ties"] if diagram else 0
    if diagram is None or not decided or diagram["agreement"] == 1:
        return None
    return f"on {decided - round(diagram['agreement'] * decided):,} of {counted(decided, 'row')}"


def _diagram(diagram: Mapping[str, Any] | None) -> list[list[Any]]:
    if diagram is None:
        return []
    if where := disagreement(diagram):
        return [
            ["power diagram", Text("disagrees", style="bold red"), Text(where, style="bold red")]
        ]
    decided, ties = diagram["rows"] - diagram["ties"], counted(diagram["ties"], "tie")
    if not decided:
        return [["power diagram", None, f"no row but {ties}"]]
    return [
        [
            "power diagram",
            "agrees",
            f"on {counted(decided, 'row')}" + f"; {ties} left out" * bool(diagram["ties"]),
        ]
    ]


def _median(label: str, measures: Mapping[str, Any]) -> list[Any]:
    return [
        label,
        measures["median"],
        f"5% to 95%: {number(measures['p5'])} to {number(measures['p95'])}",
    ]


def geometry_table(document: Mapping[str, Any]) -> RenderableType:
    """The table of `sae geometry` for one SAE."""
    occupancy, rank, bad = document["occupancy"], document["rank"], document["degenerate"]
    margin, near, other, compared = (
        document[name] for name in ("margin", "complexity", "other_split", "references")
    )
    lines = [
        ["rows", document["rows"], f"{number(document['l0'])} latents kept in a row"],
        [
            "cells visited",
            document["cells_visited"],
            f"of 10^{document['cells_possible_log10']:.1f} possible",
        ],
        [
            "cells with one row",
            occupancy["singletons"],
            f"fullest cell {counted(occupancy['max'], 'row')}",
        ],
        [
            "effective number of cells",
            occupancy["effective"],
            f"entropy {number(occupancy['entropy'])} nats",
        ],
        [
            "rank of a cell's map, median",
            rank["median"],
            f"full in {100 * rank['full']:.3g}% of {counted(rank['cells'], 'cell')}",
        ],
    ]
    if bad["zero_encoder"] or bad["zero_decoder"]:
        lines.append(
            [
                "latents without encoder weights",
                bad["zero_encoder"],
                f"{bad['zero_decoder']:,} with a decoder of zeros",
            ]
        )
    if bad["equal_encoder"] or bad["equal_decoder"]:
        lines.append(
            [
                "latents equal to another",
                bad["equal_encoder"],
                f"{bad['equal_decoder']:,} with another's decoder",
            ]
        )
    lines += [
        *_diagram(document["power_diagram"]),
        _median("margin, median", margin),
        _median("margin over row norm, median", margin["relative"]),
        [
            "local complexity, median",
            near["median"],
            f"{near['boundary']} within {number(near['radius'])}, {counted(near['rows'], 'row')}",
        ],
    ]
    if other is not None:
        lines += [
            _median(f"{name}, {other['split']} rows, median", other[name])
            for name in ("margin", "complexity")
        ]
    lines += [
        [
            "FVU of k-means",
            compared["kmeans_fvu"],
            f"{counted(compared['kmeans_cells'], 'cell')}, {counted(compared['rows_fitted'], 'train row')}",
        ],
        [
            "FVU of the SAE",
            compared["sae_fvu"],
            f"{counted(compared['rows_measured'], 'row')}, as the others"
            + ("" if compared["held_out"] else "; rows fitted on are among them"),
        ],
        [
            "FVU of local PCA",
            compared["local_pca_fvu"],
            f"{counted(compared['local_pca_cells'], 'cell')} of rank {compared['local_pca_rank']:,}",
        ],
    ]
    return table(
        f"{document['run']} on {document['data']}, {document['split']} rows",
        ["measure", "value", "detail"],
        lines,
    )


def geometries_table(documents: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The table of `sae geometry` for several SAEs, a line each."""
    rows = [
        [
            *(document[name] for name in ("run", "rows", "l0", "cells_visited")),
            document["margin"]["median"],
            document["complexity"]["median"],
            *(document["references"][f"{name}_fvu"] for name in ("kmeans", "sae", "local_pca")),
        ]
        for document in documents
    ]
    heads = ["run", "rows", "l0", "cells visited", "margin, median", "complexity, median"]
    return table(None, [*heads, "k-means FVU", "SAE FVU", "local PCA FVU"], rows)
