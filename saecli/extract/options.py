"""The options of an extraction. Imports neither NumPy nor torch: help pages are fast."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from ..base.errors import ConfigError
from ..base.files import expanded
from ..base.options import Config, Count, Positive, Shown, options_of
from ..base.words import counted, does_nothing, flag_of
from ..model import TINY_GEMMA2, ModelDtype
from ..store.options import MAX_NORM_HELP, StoredDtype
from .readers import DEFAULT_CONFIGS, STDLIB_DOCS, TEXT_FILES, reader_of
from .texts import Mixture, TextSource

DEFAULT_DATASET = "Salesforce/wikitext"
# In the order of `TextSource`'s fields.
OF_SOURCE = ("dataset_config", "dataset_split", "text_column", "dataset_revision")
DEFAULT_CONTEXT = 128
CHAT = ("chat_template", "control_tokens")  # options
TOKEN_COLUMNS = ("document", "position", "token_id")  # of every store, besides `source` and `role`
SHARD_ROWS = 32_768  # most rows per shard by default


@dataclass(frozen=True)
class ExtractConfig(Config):
    """The options that determine an extraction's rows."""

    panel: ClassVar[str] = "Rows"

    model: Annotated[
        str,
        Shown(f"Hub id, folder or GGUF file of a language model; {TINY_GEMMA2} is bundled."),
    ] = "google/gemma-2-2b"
    model_revision: Annotated[
        str | None,
        Shown(
            "Branch, tag or commit of a hub model, such as step1000 of Pythia; the store records the commit. "
            "Several checkpoints: --model ID@step1 --model ID@step2. Default: main."
        ),
    ] = None
    dataset: Annotated[
        tuple[str, ...] | None,
        Shown(
            f"Text: a hub dataset id, streamed; a {TEXT_FILES} (.txt and .md: documents separated by blank lines); "
            f"{STDLIB_DOCS}, Python's own docstrings; several times for a mixture. "
            f"Default: {DEFAULT_DATASET}, for {TINY_GEMMA2} {STDLIB_DOCS}."
        ),
    ] = None
    mix: Annotated[
        tuple[Positive, ...] | None,
        Shown(
            "Weight of each --dataset, in order: rows come in these proportions. Default: equal."
        ),
    ] = None
    dataset_config: Annotated[
        tuple[str, ...] | None,
        Shown(
            "Configuration of a hub dataset. It and the next three hold for all datasets that have one; or give one "
            'per --dataset, in order, "" for the default. Default: the dataset\'s own; for wikitext '
            "wikitext-103-raw-v1."
        ),
    ] = None
    dataset_split: Annotated[tuple[str, ...], Shown("Split of a hub dataset.")] = ("train",)
    dataset_revision: Annotated[
        tuple[str, ...] | None,
        Shown(
            "Commit, branch or tag of a hub dataset; the store records the commit. Default: the newest."
        ),
    ] = None
    text_column: Annotated[
        tuple[str, ...],
        Shown(
            "Column of texts or messages; content.text in a nested one; prompt+completion: several, each on lines of "
            "its own. Default: text, else messages or conversations."
        ),
    ] = ("text",)
    chat_template: Annotated[
        str | None,
        Shown("Jinja file of a chat template for messages. Default: the tokenizer's own."),
    ] = None
    control_tokens: Annotated[
        Literal["keep", "drop"],
        Shown("In chats, keep or drop tokens such as <start_of_turn>; an added BOS is dropped."),
    ] = "keep"
    rows: Annotated[Count, Shown("Rows to store; fewer if the text ends first.")] = 100_000
    context: Annotated[
        Count | None,
        Shown(
            f"Most tokens per window, including BOS. Default: {DEFAULT_CONTEXT}, or the model's limit if lower."
        ),
    ] = None
    packed: Annotated[
        bool,
        Shown(
            "Concatenate documents into full windows, separated by the special tokens around a text; "
            "tokens then attend across documents."
        ),
    ] = False
    prepend_bos: Annotated[
        Literal["on", "off"],
        Shown(
            "on: every window begins with BOS, else with EOS, also where the tokenizer adds none; off: only "
            "where it does. Without BOS position 0 is an outlier that holds nearly all variance."
        ),
    ] = "on"
    positions: Annotated[
        Literal["all", "last", "assistant"],
        Shown(
            "all: one row per token that is not special; last: one row per document, the last token of its first "
            "window, as in the paper; assistant: of chats, what the assistant says."
        ),
    ] = "all"
    max_norm_multiple: Annotated[float | None, Ge(1), Shown(MAX_NORM_HELP)] = None
    dtype: Annotated[StoredDtype, Shown("Precision of the stored rows.")] = "bfloat16"
    model_dtype: Annotated[
        ModelDtype,
        Shown(
            "Precision of weights and forward pass. auto: the checkpoint's own; on a CPU that does not "
            "multiply bfloat16 natively, float32."
        ),
    ] = "auto"
    batch_size: Annotated[
        Count | Literal["auto"],
        Shown(
            "Windows per forward pass, of at most 16,384 tokens; halved on out-of-memory. Changes rows only by "
            "rounding. auto: 16,384 tokens on a GPU, 2,048 on a CPU."
        ),
    ] = "auto"
    shard_rows: Annotated[
        Count | None,
        Shown(f"Rows per shard file. Default: 64 MiB, {SHARD_ROWS:,} rows at most."),
    ] = None

    @property
    def window(self) -> int:
        return self.context or DEFAULT_CONTEXT

    @property
    def begins(self) -> bool:
        return self.prepend_bos == "on"

    def text(self, given: Set[str]) -> Mixture:
        """Where the documents come from; ConfigError for a given option that does nothing there."""
        datasets = self.dataset or (STDLIB_DOCS if self.model == TINY_GEMMA2 else DEFAULT_DATASET,)
        if not all(dataset.strip() for dataset in datasets):
            raise ConfigError(
                f"--dataset is empty; name a hub dataset id, a {TEXT_FILES}, or {STDLIB_DOCS}, or leave it out"
            )
        for name in sorted(given & {*OF_SOURCE, *CHAT, "mix"}):
            # One dataset needs no weight.
            candidates = datasets[1:] if name == "mix" else datasets
            if not any(_takes(name, dataset) for dataset in candidates):
                raise does_nothing(name, f"with the dataset {datasets[0]}; leave it out")
        of_each = [self._of_each(name, datasets) for name in OF_SOURCE]
        sources = tuple(
            TextSource(dataset, config, split, column, revision, chat=_may_be_chat(dataset))
            for dataset, config, split, column, revision in zip(datasets, *of_each, strict=True)
        )
        names = tuple(source.name for source in sources)
        if len({*names}) < len(names):
            raise ConfigError(
                "--dataset must name different texts, got one twice; use --mix to weight them"
            )
        if self.packed and self.positions == "last":
            raise does_nothing(
                "packed", "with --positions last, one row of each document; leave it out"
            )
        weights = [weight or 1.0 for weight in self._of_each("mix", datasets)]
        shares = tuple(weight / sum(weights) for weight in weights)
        return Mixture(sources, names if len(names) > 1 else (), shares)

    def _of_each(self, name: str, datasets: Sequence[str]) -> list[Any]:
        """An option's value for each dataset, or the default."""
        values = getattr(self, name) or ("",)
        default, *_ = options_of(type(self))[name].default or (None,)
        if len(values) != len(datasets) and (len(values) > 1 or (name == "mix" and self.mix)):
            times = "once per --dataset" if name == "mix" else "once per --dataset, or once"
            raise ConfigError(
                f"{flag_of(name)} must be given {times}, got {len(values)} for {counted(len(datasets), 'dataset')}"
            )
        each = values * (len(datasets) // len(values))
        return [
            value if value and _takes(name, dataset) else default
            for value, dataset in zip(each, datasets, strict=True)
        ]

    def check_chat(self, text: Mixture, given: Set[str]) -> None:
        """ConfigError for options of chats, if a text is none."""
        texts = [source.dataset for source in text.sources if not source.chat]
        idle = set() if text.chat else {*CHAT}
        if self.positions == "assistant" and texts:
            idle.add("positions")
        refused = sorted(given & idle)
        if refused:
            name = refused[0]
            raise ConfigError(
                f"{flag_of(name)} {getattr(self, name)} needs chats; expected messages in "
                f"{texts[0]}, got text; leave it out, or name their column with --text-column"
            )

    def template(self) -> str | None:
        if self.chat_template is None:
            return None
        try:
            return expanded(self.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--chat-template {self.chat_template} cannot be read: {error}; name a jinja file"
            ) from error


def _may_be_chat(dataset: str) -> bool:
    return _takes("chat_template", dataset) and dataset not in DEFAULT_CONFIGS


def _takes(option: str, dataset: str) -> bool:
    return option == "mix" or option in reader_of(dataset).options
