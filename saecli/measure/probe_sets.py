"""The labelled texts of the package sae-probes: 113 sets, each of two classes in equal number.

They are read from the package's files: to import it would import TransformerLens and SAELens, which its data do not
need. Source: Kantamneni et al., "Are Sparse Autoencoders Useful? A Case Study in Sparse Probing" (2025).
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import numpy as np

from ..base.errors import ConfigError, ModelError, did_you_mean, one_line
from ..base.files import NotAFile, regular

PACKAGE, CATALOGUE, BINARY = "sae_probes", "probing_datasets_MASTER.csv.zst", "Binary Classification"
LONGEST = 1 << 24  # characters of a text
REMEDY = "install sae-probes again"
SEED = 0  # of the choice of texts


@dataclass(frozen=True)
class LabelledSet:
    """Labelled texts.

    Args:
        name: the set's, such as 87_glue_cola.
        texts: N of them.
        labels: (N,), bool, as many of each.
    """

    name: str
    texts: list[str]
    labels: np.ndarray


class Sets:
    """The sets of the installed package.

    Attributes:
        names: of all, in the package's order.

    Raises:
        ModelError: the package is not installed, or its files are damaged.
    """

    def __init__(self) -> None:
        spec = find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations or find_spec("zstandard") is None:
            raise ModelError("the labelled sets are missing: expected the packages sae-probes and zstandard, got "
                             f"{'only the first' if spec else 'none'}; run `pip install 'saecli[probes]'`, or for the "
                             "data alone `pip install zstandard && pip install --no-deps sae-probes`")
        self._folder = Path(spec.submodule_search_locations[0]) / "data"
        saved = [line["Dataset save name"] for line in
                 _lines(self._folder / CATALOGUE, ("Data type", "Dataset save name")) if line["Data type"] == BINARY]
        self._files = {Path(name).name.removesuffix(".csv"): self._folder / f"{name}.zst" for name in saved}
        self.names = list(self._files)

    def chosen(self, words: str | Sequence[str] | None) -> list[str]:
        """The names of sets that words match, in the package's order.

        Args:
            words: names (87_glue_cola), their numbers or names alone (87, glue_cola), or patterns (*emotion*); as one
                text, separated by commas; None for all.

        Raises:
            ConfigError: a word matches none.
        """
        if words is None:
            return self.names
        listed = [word.strip() for word in words.split(",")] if isinstance(words, str) else list(words)
        found = set()
        for word in listed:
            matching = {name for name in self.names
                        if word == name.partition("_")[0] or fnmatchcase(name, word) or fnmatchcase(_alone(name), word)}
            if not matching:
                advice = did_you_mean(word, [*self.names, *map(_alone, self.names)]) or (
                    f"there are {', '.join(self.names[:3])} and more; '*glue*' chooses all with glue in their names")
                raise ConfigError(f"--sets must name sets of sae-probes, got {word!r}; {advice}", option="sets")
            found |= matching
        return [name for name in self.names if name in found]

    def read(self, name: str, rows: int) -> LabelledSet:
        """A set's texts: `rows`, half of each class, always the same ones; fewer if it has fewer. ModelError if its
        file is damaged."""
        path = self._files[name]
        lines = list(_lines(path, ("prompt", "target")))
        classes = sorted({line["target"] for line in lines})
        if len(classes) != 2:
            raise ModelError(f"{path} is damaged: expected targets of two classes, got {len(classes)}; {REMEDY}")
        labels = np.array([line["target"] == classes[1] for line in lines])
        each = min(rows // 2, labels.sum(), (~labels).sum())
        draw = np.random.default_rng(SEED)
        taken = np.sort(np.concatenate([draw.permutation(np.flatnonzero(of_class))[:each]
                                        for of_class in (~labels, labels)]))
        return LabelledSet(name, [lines[index]["prompt"] for index in taken], labels[taken])


def _alone(name: str) -> str:
    """A set's name without its number."""
    return name.partition("_")[2]


def _lines(path: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """The lines of a compressed table; ModelError if it cannot be read, or lacks a column."""
    import zstandard  # only this reads such files

    before = csv.field_size_limit(LONGEST)
    try:
        stream = zstandard.ZstdDecompressor().decompressobj()
        text = stream.decompress(regular(path).read_bytes()).decode()
        if not stream.eof:
            raise ModelError(f"{path} is cut off: expected {len(text):,} bytes and more of text; {REMEDY}")
        yield from ({name: line[name] for name in columns} for line in csv.DictReader(StringIO(text, newline="")))
    except (FileNotFoundError, NotAFile, UnicodeDecodeError, csv.Error, KeyError, zstandard.ZstdError) as error:
        raise ModelError(f"cannot read {path}: expected a table of {' and '.join(columns)}, got {one_line(error)}; "
                         f"{REMEDY}") from error
    finally:
        csv.field_size_limit(before)
