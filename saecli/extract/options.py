"""The options of an extraction. Imports neither NumPy nor torch, so that help pages are fast."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..base.errors import ConfigError, flag_of
from ..base.options import Config, option
from ..store.options import DTYPES, MAX_NORM_HELP
from .places import MODEL_DTYPES, TINY_GEMMA2
from .texts import LOCAL_SUFFIXES, STDLIB_DOCS, TextSource

DEFAULT_DATASET = "Salesforce/wikitext"
DEFAULT_CONTEXT = 128
POSITIONS = ("all", "last")
SHARD_ROWS = 32_768  # most rows in a shard by default
MOST = 2**31 - 1  # of any count, so that PyTorch and HDF5 can index with it


@dataclass(frozen=True)
class ExtractConfig(Config):
    """The options that determine an extraction's rows."""

    panel: ClassVar[str] = "Rows"

    model: str = option("google/gemma-2-2b", f"Hub id or folder of a causal language model, or {TINY_GEMMA2}, which "
                                             "is bundled and needs no network.")
    dataset: str | None = option(None, "Text: a hub dataset id, streamed; a .txt file (blank lines separate "
                                       f"documents), .jsonl or .parquet file; or {STDLIB_DOCS}, the docstrings of "
                                       f"Python's standard library; default: {DEFAULT_DATASET}, or with {TINY_GEMMA2} "
                                       f"{STDLIB_DOCS}.")
    dataset_config: str | None = option(None, "Configuration of a hub dataset; default: its own, for wikitext "
                                              "wikitext-103-raw-v1.")
    dataset_split: str = option("train", "Split of a hub dataset.")
    dataset_revision: str | None = option(None, "Commit, branch or tag of a hub dataset; default: its newest state; "
                                                "the store records the commit.")
    text_column: str = option("text", "Column that holds the text.")
    rows: int = option(100_000, "Rows to store; fewer if the text ends first.", minimum=1, maximum=MOST)
    min_tokens: int = option(1, "Texts of fewer tokens are skipped and counted.", minimum=1, maximum=MOST)
    context: int | None = option(None, "Most tokens in a window, including those before the text (BOS); default: "
                                       f"{DEFAULT_CONTEXT}, or the model's limit if lower.", minimum=1, maximum=MOST)
    packed: bool = option(False, "Concatenate documents into full windows, separated by BOS (by EOS where the "
                                 "tokenizer sets no BOS); a token then attends to all before it in its window, other "
                                 "documents' too. Without it, documents are cut into windows and never mixed.")
    positions: str = option("all", "all: one row per token that is not special; last: one row per document, its first "
                                   "window's last token, as in the paper.", choices=POSITIONS)
    max_norm_multiple: float | None = option(None, MAX_NORM_HELP, minimum=1)
    dtype: str = option("bfloat16", "Precision of the stored rows.", choices=DTYPES)
    model_dtype: str = option("auto", "Precision of weights and forward pass; auto: float32 on a CPU, elsewhere the "
                                      "checkpoint's own.", choices=("auto", *MODEL_DTYPES))
    batch_size: int | str = option("auto", "Windows of --context tokens per forward pass, or more windows that are "
                                           "shorter; halved if they do not fit in memory; auto: what fits on a CUDA "
                                           "device, elsewhere a fixed number. Rows depend on it only in their last "
                                           "bits.", choices=("auto",), minimum=1, maximum=MOST)
    shard_rows: int | None = option(None, f"Rows in a shard file. Default: 64 MiB, {SHARD_ROWS:,} rows at most.",
                                    minimum=1, maximum=MOST)

    def text(self, given: Set[str]) -> TextSource:
        """Where the documents come from.

        Args:
            given: the options that the user set, as opposed to left at their defaults.

        Raises:
            ConfigError: the dataset's name is empty, or an option does nothing with the others.
        """
        dataset = self.dataset
        if dataset is None:
            dataset = STDLIB_DOCS if self.model == TINY_GEMMA2 else DEFAULT_DATASET
        if not dataset.strip():
            raise ConfigError("--dataset is empty: expected a hub dataset id, a .txt, .jsonl or .parquet file, or "
                              f"{STDLIB_DOCS}; name one, or leave it out", option="dataset")
        kind = STDLIB_DOCS if dataset == STDLIB_DOCS else Path(dataset).suffix.lower()
        unused = {"text_column"} if kind in (STDLIB_DOCS, ".txt") else set()
        if kind in (STDLIB_DOCS, *LOCAL_SUFFIXES):
            unused |= {"dataset_config", "dataset_split", "dataset_revision"}
        if refused := sorted(unused & given):
            raise ConfigError(f"{flag_of(refused[0])} does nothing with the dataset {dataset}; leave it out",
                              option=refused[0])
        if self.packed and self.positions == "last":
            raise ConfigError("--packed does nothing with --positions last, which takes one row from each document's "
                              "own window; leave it out", option="packed")
        return TextSource(dataset, self.dataset_config, self.dataset_split, self.text_column, self.dataset_revision)
