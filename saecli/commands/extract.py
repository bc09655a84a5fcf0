"""`sae extract`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ..config import Config, option
from ..devices import device_named
from ..errors import ConfigError, StoreError
from ..harvest import COLUMNS, POSITIONS, Windows, harvest, resumed
from ..language_model import SITES, TINY_GEMMA2, LanguageModel, find_model
from ..report import Step
from ..store import DTYPES, ActivationStore, StoreMeta, StoreWriter, hash_request
from ..texts import LOCAL_SUFFIXES, STDLIB_DOCS, TextSource
from .options import Device, Given, Json, configured, start
from .stores import filling, finished_store, say_stored, store_folder

DEFAULT_DATASET = "Salesforce/wikitext"
DEFAULT_CONTEXT = 128
MOST = 2**31 - 1  # of anything counted, so that every count fits what PyTorch and HDF5 index with
NONFINITE_ROWS = 10_000  # so many rows that none can be stored of are no accident


@dataclass(frozen=True)
class ExtractConfig(Config):
    """What decides the rows of an extraction."""

    panel: ClassVar[str] = "Rows"

    model: str = option("google/gemma-2-2b", f"Hub id or folder of a causal language model, or {TINY_GEMMA2}, which "
                                             "is bundled and needs no network.")
    layer: int | None = option(None, "Block to read, counted from 0; default: the middle one, 12 of Gemma-2-2B's 26.",
                               minimum=0)
    site: str = option("resid_post", "Where in the block: resid_post, its output (Gemma Scope's layer, SAELens' "
                                     "blocks.L.hook_resid_post); resid_pre, its input (hidden_states[L], which the "
                                     "paper's code takes); mlp_out and attn_out, what MLP and attention add.",
                       choices=SITES)
    dataset: str | None = option(None, "Text: a hub dataset id, streamed; a .txt (blank lines part documents), "
                                       f".jsonl or .parquet file; or {STDLIB_DOCS}, the docstrings of Python's "
                                       f"standard library; default: {DEFAULT_DATASET}, with {TINY_GEMMA2} "
                                       f"{STDLIB_DOCS}.")
    dataset_config: str | None = option(None, "Configuration of a hub dataset; default: its own, of wikitext "
                                              "wikitext-103-raw-v1.")
    dataset_split: str = option("train", "Split of a hub dataset.")
    text_column: str = option("text", "Column that holds the text.")
    rows: int = option(100_000, "Rows to store; fewer where the text ends before.", minimum=1, maximum=MOST)
    context: int | None = option(None, "Tokens in a window at most, the ones before the text (BOS) counted; documents "
                                       f"are cut into windows and never mixed; default: {DEFAULT_CONTEXT}, or what the "
                                       "model allows if less.", minimum=1, maximum=MOST)
    positions: str = option("all", "all: a row for each token that is not special; last: one row a document, its first "
                                   "window's last token, as in the paper.", choices=POSITIONS)
    dtype: str = option("bfloat16", "Precision of the stored rows.", choices=tuple(DTYPES))
    batch_size: int = option(32, "Windows in a forward pass.", minimum=1, maximum=MOST)
    shard_rows: int = option(32_768, "Rows in a shard file; a kill loses at most the shard being written.", minimum=1,
                             maximum=MOST)


Name = Annotated[str | None, typer.Option("--name", help="Name of the store.",
                                          show_default="made of model, layer, site and a hash of the options")]


@configured(ExtractConfig)
def command(ctx: typer.Context, options: Given, name: Name = None, device: Device = "auto",
            json: Json = False) -> None:
    """Run a language model over text and store its activations.

    The forward pass stops at the wanted block. Special tokens (BOS, EOS) are left out and counted. The same command
    again goes on where an interrupted one stopped, and does nothing where it is finished.

    Example: sae extract --model google/gemma-2-2b --layer 12
    """
    session = start(ctx, json)
    config = options.config(ExtractConfig)
    text = _text_source(config, options)
    where = device_named(device)
    source = find_model(config.model)
    layer = source.default_layer() if config.layer is None else config.layer
    source.check_layer(layer)
    context = min(DEFAULT_CONTEXT, source.positions or DEFAULT_CONTEXT) if config.context is None else config.context
    source.check_context(context)
    request = {**config.to_json(), **source.identity(), **text.identity(), "layer": layer, "context": context}
    wanted = hash_request(request)
    stem = f"{Path(config.model).name}-l{layer}-{config.site}"
    folder = store_folder(session.home, f"{stem}-{wanted[:6]}" if name is None else name)
    if (finished := finished_store(session, folder, wanted)) is not None:
        return say_stored(session, finished, cached=True)
    model = LanguageModel(source, where)
    cutter = Windows(model.tokenizer, context, first_only=config.positions == "last")
    width = next(harvest(model, cutter.cut([(0, "a")]), cutter, layer, config.site, "all", 1)).activations.shape[1]
    meta = StoreMeta(source={**request, "prepend_bos": bool(cutter.prefix)}, request_hash=wanted, dtype=config.dtype,
                     d_in=width, shard_rows=config.shard_rows, columns=COLUMNS)
    try:
        with (StoreWriter.open(folder, meta, limit=config.rows) as writer,
              filling(session, writer, "extracting", config.rows) as show):
            while not writer.complete:
                _fill(writer, model, cutter, text, config, layer, show)
                writer.finish()
    except KeyboardInterrupt:
        session.report.note("stopped; the same command goes on after the last whole shard")
        raise
    return say_stored(session, ActivationStore.open(folder), cached=False)


def _text_source(config: ExtractConfig, options: Given) -> TextSource:
    dataset = config.dataset
    if dataset is None:
        dataset = STDLIB_DOCS if config.model == TINY_GEMMA2 else DEFAULT_DATASET
    if not dataset.strip():
        raise ConfigError(f"--dataset is empty: expected a hub dataset id, a .txt, .jsonl or .parquet file, or "
                          f"{STDLIB_DOCS}; name one, or leave it out")
    kind = STDLIB_DOCS if dataset == STDLIB_DOCS else Path(dataset).suffix.lower()
    unused = ({"dataset_config", "dataset_split"} if kind in (STDLIB_DOCS, *LOCAL_SUFFIXES) else set()) | (
        {"text_column"} if kind in (STDLIB_DOCS, ".txt") else set())
    if refused := sorted(unused & options.given):
        raise ConfigError(f"--{refused[0].replace('_', '-')} does nothing with the dataset {dataset}; leave it out")
    return TextSource(dataset, config.dataset_config, config.dataset_split, config.text_column)


def _fill(writer: StoreWriter, model: LanguageModel, cutter: Windows, text: TextSource, config: ExtractConfig,
          layer: int, show: Step) -> None:
    cursor = writer.cursor
    windows = resumed(cutter.cut(text.documents(cursor["document"] if cursor else 0)), cursor)
    began, offered = writer.rows, 0
    for block in harvest(model, windows, cutter, layer, config.site, config.positions, config.batch_size):
        writer.append(block.activations, block.columns, block.cursor, block.dropped)
        show(writer.rows - began, f"{writer.rows:,} rows stored")
        offered += len(block.activations)
        if writer.full or (not writer.rows and offered >= NONFINITE_ROWS):
            break
    if offered and not writer.rows:
        remedy = ("the model itself gives them, so check its weights" if config.dtype == "float32" else
                  f"use {' or '.join(f'--dtype {name}' for name in ('bfloat16', 'float32') if name != config.dtype)}")
        raise StoreError(f"no row can be stored: expected rows that are finite in {config.dtype}, got "
                         f"{offered:,} that are not and none that is; {remedy}")
