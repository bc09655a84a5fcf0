"""The documents of two sides, and what latents do in each: of two stores; two sources, roles or values in a column of
one; or text pairs.

Shapes: B rows of a batch, N documents, F = d_sae.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csc_array

from ..base.console import Listener
from ..base.errors import ConfigError, FormatError, StoreError, one_line
from ..base.files import parse_json, to_json
from ..extract.readers import Row, json_entries
from ..extract.texts import ROLES, TextSource
from ..sae.codes import Codes
from ..sae.dictionary import SAE
from ..store.reader import ActivationStore
from .measured import Measured
from .read import Reader
from .two_samples import Labels, TwoSamples, Values

VALUES_NAMED = 8  # of a column, in an error
STATISTICS = ("frequency", "mean", "largest")  # of a latent's codes in a document
TEXT = ("dataset", "sha256", "revision", "config", "split", "column", "mixture")  # of a store

Runs = Sequence[Measured]  # SAEs on the same rows
Integers = NDArray[np.int64]


class SideRows(NamedTuple):
    codes: list[Codes]  # of each SAE, (B, F)
    documents: Integers  # numbers, (B,), alike for the two of a pair
    is_a: Labels  # (B,)


class Sides(NamedTuple):
    names: tuple[str, str]
    paired: bool
    saes: list[SAE]
    rows: Callable[[], Iterator[SideRows]]  # a pass over them


def sides_of_stores(of_a: Runs, of_b: Runs, listener: Listener) -> Sides:
    """Two stores, in pairs if they are of the same text."""
    store, other = of_a[0].store, of_b[0].store
    text, other_text = ([each.meta.source.get(name) for name in TEXT] for each in (store, other))

    def rows() -> Iterator[SideRows]:
        yield from _stored(of_a, np.ones_like, listener)
        yield from _stored(of_b, np.zeros_like, listener)

    paired = text == other_text and text[0] is not None
    return Sides((store.name, other.name), paired, [run.sae for run in of_a], rows)


def sides_within(runs: Runs, names: tuple[str, str], listener: Listener) -> Sides:
    """Two sources of a mixture, or two roles of the same chats; ConfigError for other names."""
    store = runs[0].store
    known = {"source": [*store.meta.sources], "role": [*ROLES]}
    known = {column: known[column] for column in known if column in store.meta.columns}
    column = next((column for column in known if {*names} <= {*known[column]}), None)
    if column is None:
        expected = ", ".join(name for each in known.values() for name in each) or "none"
        raise ConfigError(
            f"cannot contrast {' and '.join(names)} in {store.name}: expected two of its sources or roles "
            f"({expected}); name these, or two stores without --data"
        )
    a, b = map(known[column].index, names)

    def side(numbers: Integers) -> Integers:
        values = store.row_values(column, numbers)
        return np.select([values == a, values == b], [1, 0], -1)

    saes = [run.sae for run in runs]
    return Sides(names, column == "role", saes, lambda: _stored(runs, side, listener))


def sides_by_column(runs: Runs, names: tuple[str, str], column: str, listener: Listener) -> Sides:
    """Documents that have two values in a column of the dataset that a store was extracted from."""
    store = runs[0].store
    values = _values_of_documents(store, column)
    of_documents = np.select([values == str(name) for name in names], [1, 0], -1)
    if not {0, 1} <= {*of_documents}:
        known = ", ".join(islice(dict.fromkeys(values.tolist()), VALUES_NAMED))
        raise ConfigError(
            f"cannot contrast {' and '.join(names)} by {column}: expected two of its values in {store.name} ({known}); "
            "name these"
        )

    def side(numbers: Integers) -> Integers:
        return of_documents[store.row_values("document", numbers)]

    return Sides(names, False, [run.sae for run in runs], lambda: _stored(runs, side, listener))


def _values_of_documents(store: ActivationStore, column: str) -> NDArray[np.str_]:
    """Of all documents of a store, read from its dataset anew."""
    kept = store.meta.source
    advice = "name sources of a mixture without --by, or two stores"
    if "dataset" not in kept or "document" not in store.meta.columns:
        raise ConfigError(
            f"--by needs a store of one dataset's documents; {store.name} is of others: {advice}"
        )
    source = TextSource(
        kept["dataset"],
        config=kept.get("config"),
        split=kept.get("split", "train"),
        column=kept.get("column", "text"),
        revision=kept.get("dataset_revision"),
    )
    if any(kept.get(name) != value for name, value in source.identity().items()):
        raise StoreError(
            f"{source.name} has changed since {store.name} was extracted: expected the same documents; extract them "
            "anew"
        )
    count = int(store.row_values("document", np.array([store.rows - 1]))[0]) + 1
    rows = islice(source.reader.rows(source.column, None), count)
    return np.array([_value(row, column) for row in rows])


def _value(row: Row, column: str) -> str:
    if isinstance(row.value, Exception):
        return ""  # left out of the store, too
    columns = row.value if isinstance(row.value, dict) else {}
    if column not in columns:
        known = ", ".join(columns) or "none"
        raise ConfigError(
            f"{row.where} has no --by {column!r}: expected one of its columns, {known}"
        )
    return str(columns[column])


def _stored(
    runs: Runs, side: Callable[[Integers], Integers], listener: Listener
) -> Iterator[SideRows]:
    """Rows by their numbers' side: 1 for A, 0 for B, else left out."""
    store = runs[0].store
    numbers_of_batches = runs[0].of_store.numbers(runs[0].batch_rows)
    for x, numbers in zip(runs[0].inputs(listener), numbers_of_batches, strict=True):
        sides = side(numbers)
        kept = np.flatnonzero(sides >= 0)
        x = x[torch.from_numpy(kept).to(x.device)]
        codes = [run.sae.codes(x) for run in runs]
        yield SideRows(codes, store.row_ids(numbers[kept]), sides[kept] == 1)


@dataclass(frozen=True)
class TextPair:
    a: str
    b: str


def read_pairs(path: Path) -> list[TextPair]:
    pairs = []
    try:
        for _, entry in json_entries(path, "a"):
            if isinstance(entry, Exception):  # of a line that is not JSON
                raise entry
            pairs.append(parse_json(to_json(entry), TextPair))
        if not pairs:
            raise ValueError("it holds no pair")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise FormatError(
            f"cannot read --pairs {path}: {reason}; expected lines such as "
            '{"a": "The cat sat", "b": "The dog sat"}'
        ) from error
    return pairs


def sides_of_pairs(
    pairs: Sequence[TextPair], readers: Sequence[Reader], listener: Listener
) -> Sides:
    def rows() -> Iterator[SideRows]:
        with listener.progress("reading pairs", len(pairs), "pairs") as show:
            for number, pair in enumerate(pairs):
                for text, is_a in ((pair.a, True), (pair.b, False)):
                    words = f"pair {number + 1}"
                    readings = [reader.read(text, words, listener) for reader in readers]
                    is_row = ~readings[0].tokens["special"]
                    codes = [reading.by_token[is_row].toarray() for reading in readings]
                    documents = np.full(len(codes[0]), number)
                    of_saes = [Codes(torch.from_numpy(z)) for z in codes]
                    yield SideRows(of_saes, documents, np.full_like(documents, is_a, bool))
                show(number + 1)

    return Sides(("a", "b"), True, [reader.sae for reader in readers], rows)


class Documents(NamedTuple):
    """N documents with rows, by number; of pairs A's first."""

    numbers: Integers
    samples: TwoSamples
    lengths: Values  # rows of each
    codes: list[dict[str, csc_array]]  # of each SAE its `STATISTICS`, (N, F)

    def chosen(self, which: Labels) -> "Documents":
        samples = replace(self.samples, is_a=self.samples.is_a[which])
        codes = [{name: each[which] for name, each in of_sae.items()} for of_sae in self.codes]
        return Documents(self.numbers[which], samples, self.lengths[which], codes)


@torch.no_grad()
def read_documents(sides: Sides) -> Documents:
    """Memory: in proportion to the latents that fire in each document, whatever the number of rows."""
    of_units: list[_Tally] = []
    of_saes: list[list[_Tally]] = [[] for _ in sides.saes]
    for rows in sides.rows():
        units = 2 * rows.documents + ~rows.is_a  # a document's rows of one side
        of_units.append(_tally(units, np.zeros(len(units))))
        for tallies, codes in zip(of_saes, rows.codes, strict=True):
            z = codes.dense().cpu().numpy()
            at, latents = z.nonzero()
            codes_there = z[at, latents].astype(np.float64)
            tallies.append(_tally(units[at] * z.shape[1] + latents, codes_there))
    units, lengths, *_ = _joined(of_units)
    statistics = []
    for tallies, sae in zip(of_saes, sides.saes, strict=True):
        keys, counts, sums, largest = _joined(tallies)
        documents, latents = np.searchsorted(units, keys // sae.d_sae), keys % sae.d_sae
        values = counts / lengths[documents], sums / lengths[documents], largest
        shape = len(units), sae.d_sae
        matrices = [csc_array((each, (documents, latents)), shape=shape) for each in values]
        statistics.append(dict(zip(STATISTICS, matrices, strict=True)))
    samples = TwoSamples(units % 2 == 0, sides.paired)
    found = Documents(units // 2, samples, lengths, statistics)
    _, pairs, sizes = np.unique(found.numbers, return_inverse=True, return_counts=True)
    return found.chosen(sizes[pairs] == 2) if sides.paired else found


_Tally = tuple[NDArray[Any], ...]  # distinct keys, ascending; count, sum and largest size of values


def _tally(keys: Integers, values: Values) -> _Tally:
    return _joined([(keys, np.ones(len(keys)), values, np.abs(values))])


def _joined(tallies: Sequence[_Tally]) -> _Tally:
    keys, counts, sums, sizes = map(np.concatenate, zip(*tallies, strict=True))
    order = np.argsort(keys, kind="stable")
    first = np.flatnonzero(np.diff(keys[order], prepend=-1))
    added = [np.add.reduceat(each[order], first) for each in (counts, sums)]
    return keys[order][first], *added, np.maximum.reduceat(sizes[order], first)
