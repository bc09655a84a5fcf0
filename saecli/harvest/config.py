"""What decides the rows of an extraction."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..config import Config, option
from ..errors import ConfigError
from ..language_model import MODEL_DTYPES, TINY_GEMMA2
from ..store import DTYPES, MAX_NORM_HELP
from ..texts import LOCAL_SUFFIXES, STDLIB_DOCS, TextSource
from .token_windows import POSITIONS

DEFAULT_DATASET = "Salesforce/wikitext"
DEFAULT_CONTEXT = 128
MOST = 2**31 - 1  # of anything counted, so that every count fits what PyTorch and HDF5 index with


@dataclass(frozen=True)
class ExtractConfig(Config):
    """What decides the rows of an extraction."""

    panel: ClassVar[str] = "Rows"

    model: str = option("google/gemma-2-2b", f"Hub id or folder of a causal language model, or {TINY_GEMMA2}, which "
                                             "is bundled and needs no network.")
    dataset: str | None = option(None, "Text: a hub dataset id, streamed; a .txt (blank lines part documents), "
                                       f".jsonl or .parquet file; or {STDLIB_DOCS}, the docstrings of Python's "
                                       f"standard library; default: {DEFAULT_DATASET}, with {TINY_GEMMA2} "
                                       f"{STDLIB_DOCS}.")
    dataset_config: str | None = option(None, "Configuration of a hub dataset; default: its own, of wikitext "
                                              "wikitext-103-raw-v1.")
    dataset_split: str = option("train", "Split of a hub dataset.")
    dataset_revision: str | None = option(None, "Commit, branch or tag of a hub dataset; default: its newest state; "
                                                "the store notes the commit.")
    text_column: str = option("text", "Column that holds the text.")
    rows: int = option(100_000, "Rows to store; fewer where the text ends before.", minimum=1, maximum=MOST)
    min_tokens: int = option(1, "Texts of fewer tokens are left out and counted.", minimum=1, maximum=MOST)
    context: int | None = option(None, "Tokens in a window at most, the ones before the text (BOS) counted; default: "
                                       f"{DEFAULT_CONTEXT}, or what the model allows if less.", minimum=1, maximum=MOST)
    packed: bool = option(False, "Let documents follow each other through full windows, parted by BOS (by EOS where "
                                 "the tokenizer sets no BOS); a token then attends to all before it in its window, "
                                 "other documents' too. Without it, documents are cut into windows and never mixed.")
    positions: str = option("all", "all: a row for each token that is not special; last: one row a document, its first "
                                   "window's last token, as in the paper.", choices=POSITIONS)
    max_norm_multiple: float | None = option(None, MAX_NORM_HELP, minimum=1)
    dtype: str = option("bfloat16", "Precision of the stored rows.", choices=tuple(DTYPES))
    model_dtype: str = option("auto", "Precision of weights and forward pass; auto: float32 on a CPU, elsewhere the "
                                      "checkpoint's own.", choices=("auto", *MODEL_DTYPES))
    batch_size: int | str = option("auto", "Windows of --context tokens in a forward pass, of shorter ones as many as "
                                           "have the same tokens; halved where they do not fit in memory; auto: as "
                                           "many as fit on a CUDA device, elsewhere a fixed number. Rows do not depend "
                                           "on it but for their last bits.", choices=("auto",), minimum=1, maximum=MOST)
    shard_rows: int = option(32_768, "Rows in a shard file.", minimum=1, maximum=MOST)

    def text(self, given: Set[str]) -> TextSource:
        """Where the documents come from.

        Args:
            given: the options that the user set, as opposed to left at their defaults.

        Raises:
            ConfigError: the dataset is named by nothing, or options are given that do nothing with the others.
        """
        dataset = self.dataset
        if dataset is None:
            dataset = STDLIB_DOCS if self.model == TINY_GEMMA2 else DEFAULT_DATASET
        if not dataset.strip():
            raise ConfigError("dataset", "is empty: expected a hub dataset id, a .txt, .jsonl or .parquet file, or "
                                         "{docs}", "name one, or leave it out", docs=STDLIB_DOCS)
        kind = STDLIB_DOCS if dataset == STDLIB_DOCS else Path(dataset).suffix.lower()
        unused = {"text_column"} if kind in (STDLIB_DOCS, ".txt") else set()
        if kind in (STDLIB_DOCS, *LOCAL_SUFFIXES):
            unused |= {"dataset_config", "dataset_split", "dataset_revision"}
        if refused := sorted(unused & given):
            raise ConfigError(refused[0], "does nothing with the dataset {got}", "leave it out", got=dataset)
        if self.packed and self.positions == "last":
            raise ConfigError("packed", "does nothing with {positions} last, which takes a row of each document's own "
                                        "window", "leave it out")
        return TextSource(dataset, self.dataset_config, self.dataset_split, self.text_column, self.dataset_revision)
