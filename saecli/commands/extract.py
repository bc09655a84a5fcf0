"""`sae extract`."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from torch import Tensor

from ..config import Config, option
from ..console import Step
from ..devices import device_named
from ..distributed import communicator
from ..errors import ConfigError
from ..harvest import (
    COLUMNS,
    POSITIONS,
    Block,
    Cursor,
    Forward,
    SharedTarget,
    Spot,
    Target,
    Windows,
    batch_tokens,
    fill,
    fill_together,
    in_blocks,
    look_ahead,
    mend_together,
)
from ..home import checked_name
from ..inventory.description import stored
from ..inventory.filling import DERIVED, MAX_NORM_HELP, filling, told_when_stopped
from ..inventory.opening import finished_store
from ..language_model import MODEL_DTYPES, SITES, TINY_GEMMA2, LanguageModel, ModelSource, Place, find_model
from ..options import Device, Given, Json, Session, configured, start
from ..store import DTYPES, ActivationStore, SharedWriter, StoreMeta, StoreWriter, hash_request, made_by_several
from ..texts import LOCAL_SUFFIXES, STDLIB_DOCS, Document, TextSource
from ..wording import size_words

DEFAULT_DATASET = "Salesforce/wikitext"
DEFAULT_CONTEXT = 128
# Options that decide the rows, beside model, text, layer and site; --batch-size and --device do not.
DECIDING = ("rows", "min_tokens", "context", "packed", "positions", "dtype", "model_dtype", "shard_rows")
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


Layers = Annotated[list[int] | None, typer.Option(
    "--layer", help="Block to read, counted from 0; several, each into a store of its own, where it is given again.",
    show_default="the middle one, 12 of Gemma-2-2B's 26", rich_help_panel=ExtractConfig.panel)]
Site = Enum("Site", [(site, site) for site in SITES], type=str)  # Typer takes no Literal several times
Sites = Annotated[list[Site] | None, typer.Option(
    "--site", help="Where in the block: resid_post, its output (Gemma Scope's layer, SAELens' "
                   "blocks.L.hook_resid_post); resid_pre, its input (hidden_states[L], which the paper's code takes); "
                   "mlp_out and attn_out, what MLP and attention add; several where it is given again, of every layer.",
    show_default="resid_post", rich_help_panel=ExtractConfig.panel)]
Name = Annotated[str | None, typer.Option("--name", help="Name of the store; of several, what their names begin with.",
                                          show_default="made of model, layer, site and a hash of the options")]


@dataclass(frozen=True)
class Wanted:
    """A store that is asked for.

    Args:
        place: what it holds.
        folder: where it is, or will be.
        request: what decides its rows.
    """

    place: Place
    folder: Path
    request: dict[str, Any]

    def is_finished(self, session: Session) -> bool:
        """Whether the store is complete and whole."""
        return finished_store(self.folder, hash_request(self.request), session.console) is not None


class Progress:
    """Shows how far an extraction has come; told of each batch.

    Args:
        show: moves the display.
        targets: the stores that are filled.
    """

    def __init__(self, show: Step, targets: Sequence[Target]) -> None:
        self._show, self._targets = show, targets
        self._tokens = self._rows = 0
        self._started = time.monotonic()

    def __call__(self, tokens: int, rows: int) -> None:
        self._tokens += tokens
        self._rows += rows
        rate = self._tokens / max(time.monotonic() - self._started, 1e-9)
        written = sum(target.rows for target in self._targets)
        size = size_words(sum(target.bytes for target in self._targets))
        self._show(self._rows, f"{rate:,.0f} tokens/s, {written:,} rows written, {size}")


@configured(ExtractConfig)
def command(ctx: typer.Context, options: Given, layer: Layers = None, site: Sites = None, name: Name = None,
            device: Device = "auto", json: Json = False) -> None:
    """Run a language model over text and store its activations.

    The forward pass stops at the last block wanted. Special tokens (BOS, EOS) are left out and counted. The same
    command again goes on where an interrupted one stopped, and does nothing where it is finished.

    Example: sae extract --model google/gemma-2-2b --layer 12
    """
    session = start(ctx, json)
    if name is not None:
        checked_name(name)
    with told_when_stopped(session.console) as folders:
        config = options.config(ExtractConfig)
        text = _text_source(config, options)
        where = device_named(device)
        source = find_model(config.model)
        allowed = min(DEFAULT_CONTEXT, source.positions or DEFAULT_CONTEXT)
        context = allowed if config.context is None else config.context
        config = replace(config, context=context, model_dtype=source.dtype_on(where, config.model_dtype))
        source.check_context(context)
        text = communicator().broadcast_object(lambda: text.pinned(session.console.note))
        stores = _wanted(session, config, source, text, layer, site, name)
        folders += [store.folder for store in stores]
        before = communicator().broadcast_object(lambda: {store.place for store in stores if store.is_finished(session)})
        if missing := [store for store in stores if store.place not in before]:
            before |= _extract(session, config, LanguageModel(source, where, dtype=config.model_dtype), text, missing)
    if communicator().is_main:
        document, tables = stored([(ActivationStore.open(store.folder), store.place in before) for store in stores])
        session.console.result(document, *tables)


def _text_source(config: ExtractConfig, options: Given) -> TextSource:
    dataset = config.dataset
    if dataset is None:
        dataset = STDLIB_DOCS if config.model == TINY_GEMMA2 else DEFAULT_DATASET
    if not dataset.strip():
        raise ConfigError(f"--dataset is empty: expected a hub dataset id, a .txt, .jsonl or .parquet file, or "
                          f"{STDLIB_DOCS}; name one, or leave it out")
    kind = STDLIB_DOCS if dataset == STDLIB_DOCS else Path(dataset).suffix.lower()
    local = {"dataset_config", "dataset_split", "dataset_revision"} if kind in (STDLIB_DOCS, *LOCAL_SUFFIXES) else set()
    unused = local | ({"text_column"} if kind in (STDLIB_DOCS, ".txt") else set())
    if refused := sorted(unused & options.given):
        raise ConfigError(f"--{refused[0].replace('_', '-')} does nothing with the dataset {dataset}; leave it out")
    if config.packed and config.positions == "last":
        raise ConfigError("--packed does nothing with --positions last, which takes a row of each document's own "
                          "window; leave it out")
    return TextSource(dataset, config.dataset_config, config.dataset_split, config.text_column,
                      config.dataset_revision)


def _wanted(session: Session, config: ExtractConfig, source: ModelSource, text: TextSource, layers: list[int] | None,
            sites: list[Site] | None, name: str | None) -> list[Wanted]:
    """The stores asked for: every site of every layer, each as if it were asked for alone."""
    layers = layers or [source.default_layer()]
    for layer in layers:
        source.check_layer(layer)
    names = [site.value for site in sites or [Site.resid_post]]
    places = [Place(*pair) for pair in product(dict.fromkeys(layers), dict.fromkeys(names))]
    shared = {field: getattr(config, field) for field in DECIDING} | source.identity() | text.identity()
    if config.max_norm_multiple is not None:  # otherwise the request is what it was before there was this option
        shared["max_norm_multiple"] = config.max_norm_multiple
    found = []
    for place in places:
        request = {**shared, **place._asdict()}
        suffix = f"l{place.layer}-{place.site}"
        if name is None:
            model = Path(os.path.abspath(config.model)).name
            named = checked_name(f"{model}-{suffix}-{hash_request(request)[:6]}", DERIVED)
        else:
            named = checked_name(name if len(places) == 1 else f"{name}-{suffix}")
        found.append(Wanted(place, session.home.stores.path / named, request))
    return found


def _some_tokens(model: LanguageModel, windows: Windows) -> tuple[Tensor, Tensor]:
    """Token ids and mask, (1, T), of a short text."""
    token_ids = torch.tensor([[*windows.prefix, *model.tokenizer("a", add_special_tokens=False)["input_ids"]]])
    return token_ids, torch.ones_like(token_ids)


def _extract(session: Session, config: ExtractConfig, model: LanguageModel, text: TextSource,
             stores: list[Wanted]) -> set[Place]:
    """Write the stores that are not finished, in one pass over the text.

    Returns:
        The places of those that another process has finished meanwhile.
    """
    new_windows = partial(Windows, model.tokenizer, config.context, config.positions, config.packed, config.min_tokens)
    windows = new_windows()
    places = [store.place for store in stores]
    widths = model.read(*_some_tokens(model, windows), places, lambda activations: activations.shape[-1])
    ahead = look_ahead(model.size)
    tokens = batch_tokens(model, config.batch_size, config.context, places, ahead)
    forward = Forward(model, config.dtype, tokens, session.console.note)

    def documents_from(spot: Spot) -> Iterator[Document]:
        return text.documents(spot.document, spot.mark, session.console.note)

    def blocks_from(cursor: Cursor) -> Iterator[Block]:
        return in_blocks(documents_from, new_windows(), config.rows, cursor, ahead)

    together = communicator().world_size > 1 or any(made_by_several(store.folder) for store in stores)
    open_writer = partial(SharedWriter.open, rank=communicator().rank, exchange=communicator().all_gather_object) if together else StoreWriter.open
    with ExitStack() as open_writers:
        writers = []
        for store, width in zip(stores, widths, strict=True):
            meta = StoreMeta(source={**store.request, "layers": model.source.layers,
                                     "prepend_bos": bool(windows.prefix)},
                             request_hash=hash_request(store.request), dtype=config.dtype, d_in=width,
                             shard_rows=config.shard_rows, columns=COLUMNS,
                             max_norm_multiple=config.max_norm_multiple)
            writers.append(open_writers.enter_context(open_writer(store.folder, meta, limit=config.rows)))
        if together:
            _fill_together(session, config, writers, places, forward, blocks_from)
            return set()
        if not (missing := _targets(writers, places)):
            return set(places)
        start = _first_cursor(missing)
        with filling(writers, "extracting", max(0, config.rows - start.offered), session.console) as show:
            # Shards that are damaged take passes of their own.
            while targets := _targets(writers, places):
                fill(targets, blocks_from(_first_cursor(targets)), forward, config.rows, Progress(show, targets))
                for target in targets:
                    target.finish()
        return set(places) - {target.place for target in missing}


def _fill_together(session: Session, config: ExtractConfig, writers: list[SharedWriter], places: list[Place],
                   forward: Forward, blocks_from: Callable[[Cursor], Iterator[Block]]) -> None:
    """Write this process' part of the stores; or all of it where it is alone now, and was not before."""
    targets = [SharedTarget(place, writer) for place, writer in zip(places, writers, strict=True)]
    unfinished = [target for target in targets if not target.writer.complete]
    start = _first_cursor(unfinished) if unfinished else Cursor(offered=config.rows)
    with filling(writers, "extracting", max(0, config.rows - start.offered), session.console) as show:
        for target in targets:
            mend_together(target, blocks_from, forward)
        if unfinished:
            fill_together(unfinished, blocks_from(start), forward, config.rows, Progress(show, unfinished), communicator().rank,
                          communicator().world_size)
        for target in unfinished:
            target.finish()


def _targets(writers: list[StoreWriter], places: list[Place]) -> list[Target]:
    return [Target(place, writer) for place, writer in zip(places, writers, strict=True) if not writer.complete]


def _first_cursor(targets: Sequence[Target | SharedTarget]) -> Cursor:
    return min((target.cursor for target in targets), key=lambda cursor: cursor.place)
