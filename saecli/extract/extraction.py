"""Running a language model over text and storing its activations, by one process or by several ranks.

Rank r stores the documents i with i mod world_size = r.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.errors import ConfigError, StoreError, counted, size_words, unknown_choice
from ..base.home import Home, checked_name
from ..base.options import demand_known
from ..base.processes import Communicator, communicator
from ..store.opening import finished_store, note_outliers, told_when_stopped
from ..store.reader import ActivationStore
from ..store.schema import StoreMeta, rows_per_shard
from ..store.shard_writer import Admission
from ..store.writer import RankedStore, StoreWriter, joining_began, other_number, rank_folder
from .chats import Chats
from .forward import COLUMNS, Forward, batch_tokens, fill
from .options import DEFAULT_CONTEXT, SHARD_ROWS, SITES, ExtractConfig, HookPoint, at_revisions
from .requests import StoreRequest, demand_same_tokens, store_requests
from .special import known_text
from .texts import Document, Mixture
from .windows import LOOK_AHEAD, START, Block, Cursor, Windows, in_blocks

if TYPE_CHECKING:
    from .language_model import LanguageModel
    from .model_source import ModelSource

COUNTED = 4096  # documents between two all_gathers of their row counts
LEAST_AHEAD = 1 << 12  # tokens per block
WORK_AHEAD = (
    1 << 42
)  # for larger models, parameters times tokens per block: about a minute on two cores


@overload
def extract(
    model: str | None = None, *, layer: int | None = None, site: str = "resid_post", **options: Any
) -> ActivationStore: ...


@overload
def extract(  # type: ignore[overload-overlap]  # else a list
    model: str | list[str] | None = None,
    *,
    layer: int | Sequence[int] | Literal["all"] | None = None,
    site: str | Sequence[str] = "resid_post",
    **options: Any,
) -> list[ActivationStore]: ...


def extract(
    model: str | list[str] | None = None,
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

    A finished store of the same rows is opened at once, an interrupted one resumed. Under torchrun, each rank reads its
    own documents.

    Args:
        model: hub id, folder or GGUF file of a causal language model, or `tiny-gemma2`, which is bundled; an id may end
            in @ and a branch, tag or commit.
        layer: block to read, from 0, or "all"; None for the middle one. A list of models with one tokenizer, of layers
            or of sites gives a list of stores, one for each combination, filled in one pass with the same tokens row
            for row.
        site: resid_post, resid_pre, mlp_in, mlp_out or attn_out.
        name: the store's name, for several stores their prefix; None: from model, layer, site and a hash of the
            options.
        home: the folder of stores and runs; None for $SAE_HOME, else ./sae-data.
        **options: those of `sae extract` that determine the rows: `dataset`, `rows`, `context`, `dtype` and so on.
    """
    from .model_source import find_model  # transformers takes seconds to import

    demand_known("extract", options, {field.name for field in fields(ExtractConfig)}, "extract")
    sites = [site] if isinstance(site, str) else site
    for one in sites:
        if one not in SITES:
            raise unknown_choice("site", one, SITES)
    if isinstance(layer, str) and layer != "all":
        raise ConfigError(f"--layer must be a number, a list of numbers, or all, got {layer!r}")
    if name is not None:
        checked_name(name)
    names = [model] if isinstance(model, str) else model or [ExtractConfig.model]
    options["model"] = names[0]
    listener = listening(progress) if isinstance(progress, bool) else progress
    processes = communicator()
    with told_when_stopped(listener) as folders:
        where = device_named(device)
        config, source, text = settled(ExtractConfig(**options), options.keys(), where, processes)
        specs = at_revisions(names, config.model_revision) or []
        sources = [source, *map(find_model, specs[1:])]
        demand_same_tokens(sources, config, listener.note)
        layers = (
            [layer]
            if isinstance(layer, int)
            else (
                range(source.layers)
                if isinstance(layer, str)
                else layer or [source.default_layer()]
            )
        )
        requests = store_requests(config, sources, text, layers, sites, name, Home.at(home).stores)
        folders += [request.folder for request in requests]
        there = processes.broadcast_object(
            lambda: {
                request.point
                for request in requests
                if finished_store(request.folder, request.hash)
            }
        )
        if len(there) < len(requests):
            text.demand_read()
            from .language_model import LanguageModel  # transformers takes seconds to import

            last = max(request.point.layer for request in requests)
            loaded = [
                LanguageModel(one, where, dtype=config.model_dtype, last=last) for one in sources
            ]
            extraction = Extraction(config, loaded, text, listener)
            there |= write_stores(extraction, requests, processes)
        stores = [ActivationStore.open(request.folder) for request in requests]
        _check_same_rows(stores)
        if processes.is_main:
            if stores[0].rows < config.rows:
                listener.note(
                    f"the text ended after {counted(stores[0].rows, 'row')} of {config.rows:,}"
                )
            for store in stores:
                note_outliers(store, listener)
    for store, request in zip(stores, requests, strict=True):
        store.cached = request.point in there
    several = isinstance(model, list) or isinstance(layer, Sequence) or not isinstance(site, str)
    return stores if several else stores[0]


def settled(
    config: ExtractConfig, given: Set[str], where: torch.device, processes: Communicator
) -> tuple[ExtractConfig, "ModelSource", Mixture]:
    """The options without `auto` and None, where the model is, and the text, pinned."""
    from .model_source import find_model

    text = config.text(given)
    revision = config.model_revision[0] if config.model_revision else None
    source = find_model(config.model, revision)
    config = replace(
        config,
        context=config.context or min(DEFAULT_CONTEXT, source.positions or DEFAULT_CONTEXT),
        model_dtype=source.dtype_on(where, config.model_dtype),
    )
    source.check_context(config.window)
    text = processes.broadcast_object(text.pinned)
    config.check_chat(text, given)
    return config, source, text


class Quota(NamedTuple):
    """What one rank stores: the first `rows` rows of its documents."""

    rank: int
    world_size: int
    rows: int


def rows_by_rank(
    documents: Iterable[Document],
    windows: Windows,
    rows: int,
    processes: Communicator,
    show: Callable[[float], None],
    counted: int = COUNTED,
) -> list[int]:
    """Rows per rank, so that together they store the rows that one process would, without communicating meanwhile. Each
    rank tokenizes its own documents; counts are all-gathered every `counted` documents."""
    world_size, waiting = processes.world_size, iter(documents)
    found, left = [0] * world_size, rows
    while some := list(islice(waiting, counted)):
        own = [
            (document.number, windows.rows(document))
            for document in some
            if document.number % world_size == processes.rank
        ]
        for number, count in sorted(
            one for every in processes.all_gather_object(own) for one in every
        ):
            taken = min(count, left)
            found[number % world_size] += taken
            left -= taken
        show(rows - left)
        if not left:
            break
    return found


class Extraction:
    """A text run through a language model, or several, in blocks of at most about `block_rows` rows."""

    def __init__(
        self,
        config: ExtractConfig,
        models: "Sequence[LanguageModel]",
        text: Mixture,
        listener: Listener,
    ) -> None:
        from .language_model import SideBySide

        self.config, self.model, self.all = config, models[0], SideBySide(models)
        self.windows = partial(
            Windows,
            self.model.tokenizer,
            config.window,
            config.positions,
            config.packed,
            config.min_tokens,
            config.control_tokens if text.chat else None,
            config.begins,
        )
        self.text, self.listener = replace(text, rows=self.windows().rows), listener
        if text.chat:
            read = Chats(self.model.tokenizer, config.template(), config.model).read
            self.text = replace(
                self.text,
                sources=tuple(replace(one, read=read) if one.chat else one for one in text.sources),
            )
        for one in (source for source in text.sources if source.chat):
            listener.note(
                f"{one.dataset} holds chats in its column {one.column!r}, which go through "
                f"{config.chat_template or 'the chat template of ' + config.model}"
            )
        for note in (note for model in models for note in model.notes):
            listener.note(note)
        size = sum(one.size for one in models)
        fitting = min(
            max(WORK_AHEAD // size, LEAST_AHEAD), LOOK_AHEAD
        )  # a kill loses the current block
        self.block_rows = 1 << (fitting.bit_length() - 1)

    def forward(self, points: Sequence[HookPoint]) -> Forward:
        tokens = batch_tokens(self.all, self.config.batch_size, self.config.window, points)
        return Forward(self.all, self.config.dtype, tokens, self.listener.note)

    def metas(self, requests: Sequence[StoreRequest]) -> dict[HookPoint, StoreMeta]:
        """The `store.json` of each store; its width is measured by running the model."""
        tokenizer, windows = self.model.tokenizer, self.windows()
        known = tokenizer(known_text(tokenizer), add_special_tokens=False)["input_ids"]
        token_ids = torch.tensor([[*windows.prefix, *known, *windows.suffix]])
        widths = self.all.read(
            token_ids,
            torch.ones_like(token_ids),
            [request.point for request in requests],
            lambda rows: rows.shape[-1],
        )
        return {
            request.point: StoreMeta(
                source={
                    **request.source,
                    **self.all.models[request.point.model].source.origin,
                    "prepend_bos": bool(windows.prefix),
                },
                request_hash=request.hash,
                dtype=self.config.dtype,
                d_in=width,
                columns=(*COLUMNS, *["role"] * self.text.chat, *["source"] * bool(self.text.names)),
                sources=dict.fromkeys(self.text.names, 0),
                control_tokens=dict.fromkeys(map(str, windows.control), 0),
                shard_rows=self.config.shard_rows
                or rows_per_shard(width, self.config.dtype, SHARD_ROWS),
                max_norm_multiple=self.config.max_norm_multiple,
                windows=True,
            )
            for request, width in zip(requests, widths, strict=True)
        }

    def blocks(self, quota: Quota, cursor: Cursor = START) -> Generator[Block, None, None]:
        ended: list[str] = []  # the reader is ahead: told when the block is stored

        def documents_from(begin: Cursor) -> Iterator[Document]:
            documents = self.text.documents(
                begin.document, begin.mark, self.listener.note, ended.append
            )
            for document in documents:
                if document.number % quota.world_size == quota.rank:
                    self.all.check_text(document.text, document.number)
                    yield document

        for block in in_blocks(documents_from, self.windows(), quota.rows, cursor, self.block_rows):
            block.notes, ended[:] = tuple(ended), []
            yield block


def write_stores(
    extraction: Extraction, requests: Sequence[StoreRequest], processes: Communicator
) -> set[HookPoint]:
    """Write the unfinished stores, a part by each rank, which rank 0 joins; returns the finished ones' hook points."""
    metas, world_size = extraction.metas(requests), processes.world_size
    finished = processes.broadcast_object(
        lambda: {
            request.point: store.meta
            for request in requests
            if (store := finished_store(request.folder, request.hash))
        }
    )
    missing = [request for request in requests if request.point not in finished]
    if not missing:
        return set(finished)
    for request in requests:  # the number of processes decides on the order of the rows
        if (
            request.point in finished
            and (begun := len(finished[request.point].ranks) or 1) != world_size
        ):
            raise other_number(request.folder, begun, world_size)
    with ExitStack() as held:
        quota, folders = (
            Quota(0, 1, extraction.config.rows),
            {request.point: request.folder for request in missing},
        )
        joint = [
            held.enter_context(
                RankedStore.open(request.folder, metas[request.point], world_size=world_size)
            )
            for request in missing
            if world_size > 1 and processes.is_main
        ]
        if world_size > 1:
            quota, folders = _own_parts(extraction, missing, metas, joint, processes)
        writers = {
            point: held.enter_context(StoreWriter.open(folder, metas[point], limit=quota.rows))
            for point, folder in folders.items()
        }
        waiting = {point: writer for point, writer in writers.items() if not writer.complete}
        others = {
            request.point: Admission(
                request.folder, finished.get(request.point, metas[request.point])
            )
            for request in requests
            if request.point not in writers
        }
        others |= {point: writer.admission for point, writer in writers.items() if writer.complete}
        with _progress(extraction, missing, writers, processes) as show:
            fill(
                waiting,
                partial(extraction.blocks, quota),
                extraction.forward(list(metas)),
                quota.rows,
                show,
                others,
            )
        processes.barrier()
        for store in joint:
            if not store.meta.complete:
                store.join()
        processes.barrier()
    return set(finished)


def _own_parts(
    extraction: Extraction,
    missing: Sequence[StoreRequest],
    metas: dict[HookPoint, StoreMeta],
    joint: Sequence[RankedStore],
    processes: Communicator,
) -> tuple[Quota, dict[HookPoint, Path]]:
    """This rank's quota and folders; `metas` become those that rank 0 began."""
    if processes.broadcast_object(
        lambda: any(not (store.meta.ranks or store.meta.complete) for store in joint)
    ):
        with extraction.listener.progress("counting", extraction.config.rows, "rows") as show:
            rows = rows_by_rank(
                extraction.text.documents(),
                extraction.windows(),
                extraction.config.rows,
                processes,
                show,
            )
        medians = _median_norms(extraction, missing, metas) if processes.is_main else {}
        for request, store in zip(missing, joint, strict=False):
            if not (store.meta.ranks or store.meta.complete):
                store.begin(rows, medians[request.point])
    there = processes.broadcast_object(lambda: [store.meta for store in joint])
    for request, meta in zip(missing, there, strict=True):
        if meta.request() != metas[request.point].request():
            raise StoreError(
                f"cannot write to {request.folder} by several processes: they differ in model, text or "
                f"options; give all of them the same files"
            )
        quota, metas[request.point] = (
            Quota(processes.rank, processes.world_size, meta.ranks[processes.rank].rows),
            replace(meta, ranks=()),
        )
    return quota, {
        request.point: rank_folder(request.folder, processes.rank)
        for request, meta in zip(missing, there, strict=True)
        if quota.rows and not meta.complete and not joining_began(request.folder)
    }


def _median_norms(
    extraction: Extraction, requests: Sequence[StoreRequest], metas: Mapping[HookPoint, StoreMeta]
) -> dict[HookPoint, float | None]:
    """The median norm per hook point that one process would record: over the first block with a finite row."""
    admissions = {
        request.point: Admission(request.folder, metas[request.point]) for request in requests
    }
    blocks, forward = (
        extraction.blocks(Quota(0, 1, extraction.config.rows)),
        extraction.forward(list(admissions)),
    )
    while waiting := [point for point, admission in admissions.items() if admission.waits]:
        if (block := next(blocks, None)) is None:
            break
        if len(block.lengths):
            for point, found in zip(
                waiting, forward(block, waiting, lambda tokens, rows: None), strict=True
            ):
                admissions[point].judge(found.rows)
    return {point: admission.median for point, admission in admissions.items()}


@contextmanager
def _progress(
    extraction: Extraction,
    requests: Sequence[StoreRequest],
    writers: Mapping[HookPoint, StoreWriter],
    processes: Communicator,
) -> Iterator[Callable[[int, int], None]]:
    """Shows the progress of all ranks, assumed to be as far as this one; called after each batch."""
    of_ranks = processes.all_gather_object(
        {point: writer.rows for point, writer in writers.items()}
    )
    stored = [sum(rows.get(request.point, 0) for rows in of_ranks) for request in requests]
    for request, rows in zip(requests, stored, strict=True):
        if rows:
            extraction.listener.note(f"{request.folder.name}: going on after {rows:,} rows")
    done = {"tokens": 0, "rows": 0}
    with extraction.listener.progress(
        "extracting", max(0, extraction.config.rows - min(stored)), "rows"
    ) as show:
        started = time.monotonic()

        def step(tokens: int, rows: int) -> None:
            done["tokens"] += tokens * processes.world_size
            done["rows"] += rows * processes.world_size
            rate = done["tokens"] / max(time.monotonic() - started, 1e-9)
            written = processes.world_size * sum(writer.rows for writer in writers.values())
            size = processes.world_size * sum(
                writer.rows * writer.meta.row_bytes for writer in writers.values()
            )
            show(
                done["rows"], f"{rate:,.0f} tokens/s, {written:,} rows written, {size_words(size)}"
            )

        yield step


def _check_same_rows(stores: Sequence[ActivationStore]) -> None:
    """Resumed with other batches, a row whose norm is within rounding of the limit may be dropped from one store."""
    for store in stores[1:]:
        found, expected = (
            [shard.resume.position for shard in one.meta.shards] for one in (store, stores[0])
        )
        if found != expected:
            raise StoreError(
                f"{stores[0].name} and {store.name} do not hold the same rows: their shards end at "
                f"different tokens; remove both and run the same command again, with one --batch-size on "
                f"one machine"
            )
