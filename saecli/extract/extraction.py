"""Running a language model over text, its activations stored, by one process or several ranks.

Rank r reads the documents i with i mod world_size = r, and writes a store of its own within the joint one.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
import torch

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.errors import ConfigError
from ..base.home import STORE_MARKER, Home, checked_name
from ..base.options import demand_known
from ..base.processes import ALONE, Communicator, communicator
from ..base.words import counted
from ..model.choice import ModelLike
from ..model.names import ModelDtype
from ..model.windows import CPU_TOKENS, pass_tokens
from ..store.opening import finished_store, note_when_stopped, warn_of, warn_of_nonfinite
from ..store.origin import HookPoint, last_layer, module_site
from ..store.reader import ActivationStore
from ..store.schema import StoreMeta, rank_folder, read_meta, rows_per_shard
from ..store.shard_writer import Admission
from ..store.values import DTYPES
from ..store.writer import StoreWriter, no_rows, ranked_store
from .chats import REPEATED, Chats
from .filling import Forward, fill
from .options import DEFAULT_CONTEXT, SHARD_ROWS, TOKEN_COLUMNS, ExtractConfig
from .requests import StoreRequest, demand_same_tokens, points_of, store_requests
from .texts import Document, Mixture
from .windows import BLOCK_TOKENS, START, Block, Cursor, Windows, in_blocks

if TYPE_CHECKING:
    from ..model.language_model import LanguageModel
    from ..model.source import ModelSource

BLOCK_WORK = 1 << 42  # parameters times tokens of a block on a CPU: half a minute on two cores
BLOCK_BYTES = 1 << 32  # of its rows at all hook points


@overload
def extract(
    model: ModelLike | None = None,
    *,
    layer: int | None = None,
    site: str = "resid_post",
    **options: Any,
) -> ActivationStore: ...


@overload
def extract(  # type: ignore[overload-overlap]  # else a list
    model: ModelLike | list[ModelLike] | None = None,
    *,
    layer: int | Sequence[int] | Literal["all"] | None = None,
    site: str | Sequence[str] = "resid_post",
    **options: Any,
) -> list[ActivationStore]: ...


def extract(
    model: ModelLike | list[ModelLike] | None = None,
    *,
    layer: int | Sequence[int] | Literal["all"] | None = None,
    site: str | Sequence[str] = "resid_post",
    name: str | None = None,
    home: str | Path | None = None,
    device: str = "auto",
    progress: bool | Listener = False,
    **options: Any,
) -> ActivationStore | list[ActivationStore]:
    """Run a language model over text and store its activations; CLI equivalent: `sae extract`.

    A finished store of the same rows is opened at once, an interrupted one resumed. Under torchrun, each rank reads
    its own documents and stores its part of the rows.

    Args:
        model: hub id, folder or GGUF file of a causal language model, or `tiny-gemma2`, which is bundled; an id may end
            in @ and a branch, tag or commit. Or a model of transformers that is loaded, with its `tokenizer` among the
            options: it is read as it is, on its device, without dropout, and recognised by its weights, so that
            an interrupted store is resumed by the same weights alone.
        layer: block to read, from 0, or "all"; None for the middle one. A list of models with one tokenizer, of layers
            or of sites gives a list of stores, one for each combination, filled in one pass with the same tokens row
            for row.
        site: resid_post, resid_pre, resid_mid, mlp_in, mlp_out, attn_out or attn_z.
        name: the store's name, for several stores their prefix; None: from model, layer, site and a hash of the
            options.
        home: the folder of stores and runs; None for $SAE_HOME, else ./sae-data.
        **options: those of `sae extract` that determine the rows: `dataset`, `rows`, `context`, `dtype` and so on; and
            `module`, in place of layer and site one or several modules by name, as in
            `model.layers.3.self_attn.o_proj:in`: its input, or without `:in` its output. `*` is any part of the name,
            such as every layer, and gives a list of stores.
    """
    from ..model.loaded import in_eval_mode, loaded_sources
    from ..model.source import find_model  # transformers takes seconds to import

    tokenizer, module = (options.pop(name, None) for name in ("tokenizer", "module"))
    demand_known("extract", options, {field.name for field in fields(ExtractConfig)}, "extract")
    modules = list(map(module_site, [module] if isinstance(module, str) else module or ()))
    if modules and ((layer is not None and np.size(layer)) or site != "resid_post"):
        raise ConfigError(
            "cannot use both --module and --layer or --site at the same time; use one of them"
        )
    if name is not None:
        checked_name(name)
    models: list[Any] = (
        model if isinstance(model, list) and model else [model or ExtractConfig.model]
    )
    given = loaded_sources(models, tokenizer, options.keys(), device)
    options["model"] = given[0].id if given else models[0]
    listener = listening(progress)
    processes = communicator()
    with note_when_stopped(listener) as folders:
        torch_device = device_named(device)
        config, source, text = resolved(
            ExtractConfig(**options), options.keys(), torch_device, processes, *given[:1]
        )
        sources = [source, *given[1:]]
        if not given:
            sources += [find_model(each, config.model_revision) for each in models[1:]]
        demand_same_tokens(sources, config)
        sites = [site] if isinstance(site, str) else site
        points = points_of(sources, layer, sites, modules)
        requests = store_requests(config, sources, text, points, name, Home.at(home).stores)
        folders += [request.folder for request in requests]
        finished = processes.broadcast_object(
            lambda: {
                request.point
                for request in requests
                if finished_store(request.folder, request.hash)
            }
        )
        if len(finished) < len(requests):
            if config.rows < processes.world_size:
                raise ConfigError(
                    f"--rows must be at least the number of processes, {processes.world_size}, got "
                    f"{config.rows}"
                )
            text.demand_read()
            from ..model.language_model import LanguageModel  # transformers takes seconds to import

            last = last_layer(points)
            loaded = [
                LanguageModel(each, torch_device, dtype=config.model_dtype, last=last)
                for each in sources
            ]
            with in_eval_mode([each.model for each in given]):
                write_stores(Extraction(config, loaded, text, listener, processes), requests)
        stores = [ActivationStore.open(request.folder) for request in requests]
        if processes.is_main:
            if stores[0].rows < config.rows:
                listener.warn(
                    f"the text ended after {counted(stores[0].rows, 'row')} of {config.rows:,}"
                )
            for store in stores:
                warn_of(store, listener)
                warn_of_nonfinite(store.name, store.meta, listener)
    for store, request in zip(stores, requests, strict=True):
        store.cached = request.point in finished
    listed = isinstance(model, list) or not isinstance(layer, Integral | None)
    listed = listed or not isinstance(site, str)
    several = listed or "*" in (module or "") or not isinstance(module, str | None)
    return stores if several else stores[0]


def resolved(
    config: ExtractConfig,
    given: Set[str],
    device: torch.device,
    processes: Communicator,
    source: "ModelSource | None" = None,
) -> tuple[ExtractConfig, "ModelSource", Mixture]:
    """The options without `auto` and None, where the model is, and the text, pinned; `given` names the options that
    the user set, and `source` is of a loaded model."""
    from ..model.source import find_model

    text = config.text(given)
    source = source or find_model(config.model, config.model_revision)
    config = replace(
        config,
        context=config.context or min(DEFAULT_CONTEXT, source.positions or DEFAULT_CONTEXT),
        model_dtype=cast(ModelDtype, source.dtype_on(device, config.model_dtype)),
    )
    source.check_context(config.window)
    text = processes.broadcast_object(text.pinned)
    config.check_chat(text, given)
    return config, source, text


class Extraction:
    """A text run through a language model, or several; `rows` of its rows are of this rank."""

    def __init__(
        self,
        config: ExtractConfig,
        models: "Sequence[LanguageModel]",
        text: Mixture,
        listener: Listener,
        processes: Communicator = ALONE,
    ) -> None:
        from ..model.language_model import SideBySide

        self.config, self.listener, self.processes = config, listener, processes
        self.model, self.all = models[0], SideBySide(models)
        self.windows = partial(
            Windows,
            self.model.tokenizer,
            config.window,
            config.positions,
            config.packed,
            config.control_tokens if text.chat else None,
            config.begins,
        )
        self.text = replace(text, rows=self.windows().rows)
        if text.chat:
            self._read_chats()
        for model in models:
            note = model.source.note()
            if note:
                listener.warn(note)
        self.block_tokens = BLOCK_TOKENS
        if self.all.device.type != "cuda":  # where a large model's block takes minutes
            weights = (weight for model in models for weight in model.model.parameters())
            self.block_tokens = max(CPU_TOKENS, BLOCK_WORK // sum(map(torch.numel, weights)))
        rows, more = divmod(config.rows, processes.world_size)
        self.rows = rows + (processes.rank < more)

    def _read_chats(self) -> None:
        config = self.config
        chats = Chats(self.model.tokenizer, config.template(), config.model)
        template = config.chat_template or f"the chat template of {config.model}"
        sources = list(self.text.sources)
        for number, source in enumerate(sources):
            if source.chat:
                sources[number] = replace(source, read=chats.read)
                self.listener.note(
                    f"{source.dataset} holds chats in its column {source.column!r}, which go through "
                    f"{template}"
                )
        self.text = replace(self.text, sources=tuple(sources))

    def forward(self) -> Forward:
        tokens = pass_tokens(self.all.device)
        if self.config.batch_size != "auto":
            tokens = int(self.config.batch_size) * self.config.window
        return Forward(self.all, self.config.dtype, tokens, self.listener.note)

    def metas(self, requests: Sequence[StoreRequest]) -> dict[HookPoint, StoreMeta]:
        """The `store.json` of each store; its width is measured by running the model."""
        windows, config = self.windows(), self.config
        token_ids = torch.zeros(1, 2, dtype=torch.int64)
        mask = torch.ones_like(token_ids)
        points = [request.point for request in requests]
        widths = self.all.read(token_ids, mask, points, lambda rows: rows.shape[-1])
        fitting = BLOCK_BYTES // (sum(widths) * DTYPES[config.dtype].storage.itemsize)
        self.block_tokens = max(1, min(self.block_tokens, fitting))
        columns = [*TOKEN_COLUMNS]
        if self.text.chat:
            columns.append("role")
        if self.text.names:
            columns.append("source")
        metas = {}
        for request, width in zip(requests, widths, strict=True):
            model = self.all.models[request.point.model]
            origin = {
                **model.source.origin,
                "module": model.modules.named(request.point),
                "prepend_bos": bool(windows.prefix),
            }
            reads = model.reads(request.point)
            metas[request.point] = StoreMeta(
                source=request.source | origin,
                request_hash=request.hash,
                dtype=config.dtype,
                d_in=width,
                columns=tuple(columns),
                sources=dict.fromkeys(self.text.names, 0),
                control_tokens=dict.fromkeys(map(str, windows.control), 0),
                shard_rows=config.shard_rows or rows_per_shard(width, config.dtype, SHARD_ROWS),
                max_norm_multiple=config.max_norm_multiple,
                reads=() if reads is None else tuple(float(f"{read:.6g}") for read in reads),
                windows=True,
            )
        return metas

    def blocks(self, cursor: Cursor = START) -> Generator[Block, None, None]:
        """The blocks of this rank's documents."""
        warned = False
        size = self.block_tokens
        for block in in_blocks(self.documents, self.windows(), self.rows, cursor, size):
            if "repeated_bos" in block.before and not warned:
                self.listener.warn(f"a text {REPEATED}")
                warned = True
            yield block

    def documents(self, begin: Cursor = START) -> Iterator[Document]:
        """This rank's documents, from a cursor's on."""
        rank, world_size = self.processes.rank, self.processes.world_size
        documents = self.text.documents(begin.document, begin.mark, self.listener.warn)
        return (document for document in documents if document.number % world_size == rank)


def write_stores(extraction: Extraction, requests: Sequence[StoreRequest]) -> None:
    """Fill those of the stores that are not finished; each of several ranks its part of them."""
    metas, processes = extraction.metas(requests), extraction.processes
    several = processes.world_size > 1
    if several and extraction.config.max_norm_multiple is not None:
        medians = processes.broadcast_object(partial(_medians, extraction, metas))
        metas = {point: replace(meta, median_norm=medians[point]) for point, meta in metas.items()}
    rows_begun = processes.broadcast_object(partial(_rows_begun, requests))
    with ExitStack() as opened:
        if several and processes.is_main:
            for request in requests:
                meta = replace(metas[request.point], ranks=processes.world_size)
                opened.enter_context(ranked_store(request.folder, meta))
        processes.barrier()
        writers = {
            request.point: opened.enter_context(
                StoreWriter.open(
                    rank_folder(request.folder, processes.rank) if several else request.folder,
                    metas[request.point],
                    limit=extraction.rows,
                    is_part=several,
                )
            )
            for request in requests
        }
        with _progress(extraction, rows_begun) as show:
            fill(writers, extraction.blocks, extraction.forward(), extraction.rows, show)
        processes.barrier()
        for request in requests:
            meta = processes.broadcast_object(partial(read_meta, request.folder))
            if not meta.rows:
                raise no_rows(request.folder, meta.dropped)


def _medians(
    extraction: Extraction, metas: Mapping[HookPoint, StoreMeta]
) -> dict[HookPoint, float | None]:
    """The median norms by which every rank drops rows, as one process has them: of all documents."""
    admissions = {point: Admission(meta) for point, meta in metas.items()}
    forward, windows, rows = extraction.forward(), extraction.windows(), extraction.config.rows
    documents, size = extraction.text.documents, extraction.block_tokens
    for block in in_blocks(lambda _: documents(), windows, rows, size=size):
        for point, own in forward(block, [*metas], lambda *_: None).items():
            admissions[point].verdicts(own)
        if None not in [admission.median for admission in admissions.values()]:
            break
    return {point: admission.median for point, admission in admissions.items()}


def _rows_begun(requests: Sequence[StoreRequest]) -> dict[Path, int]:
    """The rows of each store that is not finished."""
    rows = {}
    for folder in (request.folder for request in requests):
        if not (folder / STORE_MARKER).exists():
            rows[folder] = 0
        elif not (meta := read_meta(folder)).complete:
            rows[folder] = meta.rows
    return rows


@contextmanager
def _progress(
    extraction: Extraction, rows_begun: Mapping[Path, int]
) -> Iterator[Callable[[int, int], None]]:
    """Shows the progress of all ranks, assumed to be as far as this one; called after each batch."""
    rows, ranks = extraction.config.rows, extraction.processes.world_size
    for folder, begun in rows_begun.items():
        if begun:
            extraction.listener.note(f"{folder.name}: going on after {begun:,} rows")
    left = max(0, rows - min(rows_begun.values(), default=0))
    with extraction.listener.progress("extracting", left, "rows") as show:
        started = time.monotonic()
        done_tokens = done_rows = 0

        def step(tokens: int, rows: int) -> None:
            nonlocal done_tokens, done_rows
            done_tokens += tokens * ranks
            done_rows += rows * ranks
            rate = done_tokens / max(time.monotonic() - started, 1e-9)
            show(done_rows, f"{rate:,.0f} tokens/s")

        yield step
