"""Running a language model over text and storing its activations, by one process or by several ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from ..base.console import Console, Listener, Silent, Step
from ..base.devices import device_named
from ..base.distributed import Communicator, communicator
from ..base.errors import ConfigError, StoreError, did_you_mean
from ..base.home import STORE_MARKER, Home, checked_name
from ..store.codec import DTYPES
from ..store.opening import filling, finished_store
from ..store.ranks import RankedStore, joining_began, rank_folder, rank_meta
from ..store.reader import ActivationStore
from ..store.schema import StoreMeta, rows_per_shard
from ..store.writer import Admission, StoreWriter, other_number
from .config import Quota, StoreRequest, rows_by_rank, store_requests
from .fill import COLUMNS, Ahead, Progress, Target, demand_some, fill
from .forward import Forward, batch_tokens
from .options import DEFAULT_CONTEXT, SHARD_ROWS, ExtractConfig
from .places import SITES, Place
from .steady import Document
from .texts import TextSource
from .token_windows import Spot, Windows
from .window_blocks import Block, Cursor, in_blocks, look_ahead

if TYPE_CHECKING:
    from .language_model import LanguageModel
    from .model_source import ModelSource

Value = TypeVar("Value")


def extract(model: str | None = None, *, layer: int | None = None, site: str = "resid_post", name: str | None = None,
            home: str | Path | None = None, device: str = "auto", progress: bool = False,
            **options: Any) -> ActivationStore:
    """Run a language model over text and store its activations; a finished store of the same rows is opened at once.

    Under torchrun, once the process group is initialised, each rank runs the model on its own documents.

    Args:
        model: hub id or folder of a causal language model, or `tiny-gemma2`, which is bundled; None for the default of
            `sae extract`.
        layer: block to read, from 0; None for the middle one.
        site: resid_post, resid_pre, mlp_in, mlp_out or attn_out.
        name: name of the store; None to derive it from model, layer, site and a hash of the options.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        device: where to compute; auto is cuda if available.
        progress: show progress on stderr.
        **options: those of `sae extract` that determine the rows: `dataset`, `rows`, `context`, `dtype` and so on.

    Returns:
        The complete store.

    Raises:
        ConfigError: an option that is unknown, invalid, or does nothing with the others.
        ModelError: the model or the text cannot be loaded.
        StoreError: another process is writing the store, it holds something else, or a write fails.
    """
    known = {field.name for field in fields(ExtractConfig)}
    if unknown := sorted(options.keys() - known):
        advice = did_you_mean(unknown[0], known) or "expected one of `sae extract`'s"
        raise ConfigError(f"extract has no option {unknown[0]}; {advice}")
    if site not in SITES:
        raise ConfigError(f"--site must be one of {', '.join(SITES)}, got {site!r}", option="site")
    if model is not None:
        options["model"] = model
    ((store, _),) = extract_stores(
        ExtractConfig(**options), given=options.keys(), layers=[] if layer is None else [layer], sites=[site],
        name=name, device=device, home=Home.at(home), listener=Console() if progress else Silent(),
        communicator=communicator())
    return store


def extract_stores(config: ExtractConfig, *, given: Set[str], layers: Sequence[int], sites: Sequence[str],
                   name: str | None, device: str, home: Home, listener: Listener, communicator: Communicator,
                   begin: Callable[[list[Path]], None] = lambda folders: None) -> list[tuple[ActivationStore, bool]]:
    """Store every site of every layer, in one pass over the text, in stores of the same tokens row for row.

    Args:
        config: the options that determine the rows.
        given: names of the options that the user set.
        layers: blocks to read; none for the middle one.
        sites: where in each; none for resid_post.
        name: the store's name, for several stores the prefix of their names; None to derive it from the request.
        device: where to compute.
        home: the folder of stores and runs.
        listener: shows notes and progress.
        communicator: the ranks that take part.
        begin: called with the stores' folders before any of them is written.

    Returns:
        The complete stores, each with whether it existed already.

    Raises:
        SaeError: see `extract`.
    """
    if name is not None:
        checked_name(name)
    where = device_named(device)
    config, source, text = settled(config, given, where, listener, communicator)
    requests = store_requests(config, source, text, layers or [source.default_layer()], sites or ["resid_post"], name,
                              home.stores)
    begin([request.folder for request in requests])
    there = communicator.broadcast_object(lambda: {request.place for request in requests
                                              if finished_store(request.folder, request.hash)})
    if len(there) < len(requests):
        from .language_model import LanguageModel  # transformers takes seconds to import

        model = LanguageModel(source, where, dtype=config.model_dtype,
                              last=max(request.place.layer for request in requests))
        there |= Extraction(config, model, text, listener, communicator).run(requests, there)
    stores = [ActivationStore.open(request.folder) for request in requests]
    _check_same_rows(stores)
    return [(store, request.place in there) for store, request in zip(stores, requests, strict=True)]


def settled(config: ExtractConfig, given: Set[str], where: torch.device, listener: Listener,
            communicator: Communicator) -> tuple[ExtractConfig, "ModelSource", TextSource]:
    """The options with context and precision resolved, where the model is, and the text, pinned; ConfigError or
    ModelError as of `extract`."""
    from .model_source import find_model

    text = config.text(given)
    source = find_model(config.model)
    allowed = min(DEFAULT_CONTEXT, source.positions or DEFAULT_CONTEXT)
    context = allowed if config.context is None else config.context
    config = replace(config, context=context, model_dtype=source.dtype_on(where, config.model_dtype))
    source.check_context(context)
    return config, source, communicator.broadcast_object(lambda: text.pinned(listener.note))


class Extraction:
    """Fills stores with a model's activations, of the same tokens row for row, or streams those of one place.

    Args:
        config: with the context and the precision of the forward pass resolved.
        model: the language model.
        text: where the documents come from, pinned.
        listener: shows notes and progress.
        communicator: the ranks that take part.

    Attributes:
        block_rows: about the number of rows in a block, at most.
    """

    def __init__(self, config: ExtractConfig, model: "LanguageModel", text: TextSource, listener: Listener,
                 communicator: Communicator) -> None:
        self._config, self._model, self._text, self._listener = config, model, text, listener
        self._communicator = communicator
        self._windows = partial(Windows, model.tokenizer, config.context, config.positions, config.packed,
                                config.min_tokens)
        self.block_rows = look_ahead(model.size)

    def run(self, requests: Sequence[StoreRequest], there: Set[Place]) -> set[Place]:
        """Write the stores that are not finished.

        Args:
            requests: the stores.
            there: the places of those that are finished, and only decide with the others on their rows.

        Returns:
            The places of stores that another process has finished meanwhile.
        """
        self.prepare(requests)
        world_size = self._communicator.world_size
        complete = self._communicator.broadcast_object(lambda: {
            request.place: len(meta.ranks) or 1 for request in requests if (meta := _complete_meta(request.folder))})
        missing = [request for request in requests if request.place not in there]
        unfinished = [request for request in missing if request.place not in complete]
        for request in requests if unfinished else ():  # the number of processes decides on the order of the rows
            if (begun := complete.get(request.place, world_size)) != world_size:
                raise other_number(request.folder, begun, world_size)
        return self._alone(missing) if world_size == 1 else self._by_rank(missing)

    def prepare(self, requests: Sequence[StoreRequest]) -> dict[Place, StoreMeta]:
        """Measure what the model gives at some places, which stores of it would record; returns that."""
        self._requests = requests
        prefix = self._windows().prefix
        token_ids = torch.tensor([[*prefix, *self._model.tokenizer("a", add_special_tokens=False)["input_ids"]]])
        places = [request.place for request in requests]
        widths = self._model.read(token_ids, torch.ones_like(token_ids), places, lambda rows: rows.shape[-1])
        tokens = batch_tokens(self._model, self._config.batch_size, self._config.context, places, self.block_rows)
        self._forward = Forward(self._model, self._config.dtype, tokens, self._listener.note)
        self._metas = {
            request.place: StoreMeta(
                source={**request.source, "layers": self._model.source.layers, "prepend_bos": bool(prefix)},
                request_hash=request.hash, dtype=self._config.dtype, d_in=width, columns=COLUMNS,
                shard_rows=self._config.shard_rows or rows_per_shard(width, self._config.dtype, SHARD_ROWS),
                max_norm_multiple=self._config.max_norm_multiple)
            for request, width in zip(requests, widths, strict=True)}
        return self._metas

    def stream(self, show: Callable[[int, int], None]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The rows of the one place prepared, which are not stored: of each block, in the storage dtype, (R, D), and
        the numbers of their documents, (R,); to the text's end.

        Args:
            show: called after each batch with its numbers of tokens and rows; what it raises ends the stream.
        """
        (request,) = self._requests
        admission = Admission(request.folder, self._metas[request.place])
        stored, dtype = 0, DTYPES[self._config.dtype]
        with Ahead(self._blocks(Cursor(), Quota(0, 1, self._config.rows))) as blocks:
            for block in blocks:
                if not len(block.lengths):  # all its documents were left out
                    continue
                (found,) = self._forward(block, [request.place], show)
                rows, columns, _ = admission(found.rows, block.columns, {})
                stored += len(rows)
                demand_some(stored, "float32", block.offered, 1)  # whose range bfloat16 has: another would not help
                yield rows if rows.dtype == dtype.storage else dtype.encode_rows(rows), columns["document"]

    def _alone(self, requests: Sequence[StoreRequest]) -> set[Place]:
        """Write stores by this process alone."""
        with ExitStack() as held:
            targets = [Target(request.place, held.enter_context(
                StoreWriter.open(request.folder, self._metas[request.place], limit=self._config.rows)))
                for request in requests]
            missing = [target for target in targets if not target.writer.complete]
            if missing:
                left = max(0, self._config.rows - _first_cursor(missing).offered)
                with filling([target.writer for target in missing], "extracting", left, self._listener) as show:
                    self._fill(missing, Quota(0, 1, self._config.rows), show)
        return {target.place for target in targets} - {target.place for target in missing}

    def _by_rank(self, requests: Sequence[StoreRequest]) -> set[Place]:
        """Write stores with all ranks, each its own documents' rows; rank 0 joins them."""
        communicator = self._communicator
        with ExitStack() as held:
            claimed = [held.enter_context(RankedStore.open(request.folder, self._metas[request.place],
                                                           world_size=communicator.world_size))
                       for request in (requests if communicator.rank == 0 else [])]
            metas = communicator.broadcast_object(lambda: [store.meta for store in claimed])
            for request, meta in zip(requests, metas, strict=True):
                if meta.request() != self._metas[request.place].request():
                    raise StoreError(f"cannot write to {request.folder} by several processes: expected the same model, "
                                     f"text and options in every process, got others in this one; give all of them the "
                                     f"same files")
            there = {request.place for request, meta in zip(requests, metas, strict=True) if meta.complete}
            if any(not meta.ranks and not meta.complete for meta in metas):
                self._begin(requests, claimed)
                metas = communicator.broadcast_object(lambda: [store.meta for store in claimed])
            self._fill_own([(request, meta) for request, meta in zip(requests, metas, strict=True)
                            if not meta.complete])
            communicator.barrier()
            for store in claimed:
                if not store.meta.complete:
                    store.join()
            communicator.barrier()
        return there

    def _begin(self, requests: Sequence[StoreRequest], claimed: Sequence[RankedStore]) -> None:
        """Count how many rows each rank stores, and record it in the stores, which rank 0 has locked."""
        with self._listener.progress("counting", self._config.rows, "rows") as show:
            rows = rows_by_rank(self._text.documents(), self._windows(), self._config.rows, self._communicator, show)
        if claimed:
            medians = self._median_norms(requests)
            for request, store in zip(requests, claimed, strict=True):
                if not store.meta.ranks and not store.meta.complete:
                    store.begin(rows, medians[request.place])

    def _median_norms(self, requests: Sequence[StoreRequest]) -> dict[Place, float | None]:
        """The median norm for each place, as one process would have it: of the first block that has a finite row."""
        admissions = {request.place: Admission(request.folder, self._metas[request.place]) for request in requests}
        blocks = self._blocks(Cursor(), Quota(0, 1, self._config.rows))
        while waiting := [place for place, admission in admissions.items() if admission.waits]:
            if (block := next(blocks, None)) is None:
                break
            if len(block.lengths):
                found = self._forward(block, waiting, lambda tokens, rows: None)
                for place, one in zip(waiting, found, strict=True):
                    admissions[place].judge(one.rows)
        return {place: admission.median for place, admission in admissions.items()}

    def _fill_own(self, stores: Sequence[tuple[StoreRequest, StoreMeta]]) -> None:
        """Write this rank's rows, for each store into the rank's own."""
        rank, world_size = self._communicator.rank, self._communicator.world_size
        with ExitStack() as held:
            targets, quota = [], Quota(rank, world_size, 0)
            for request, meta in stores:
                quota = Quota(rank, world_size, meta.ranks[rank].rows)
                if quota.rows and not joining_began(request.folder):
                    writer = StoreWriter.open(rank_folder(request.folder, rank), rank_meta(meta), limit=quota.rows)
                    targets.append(Target(request.place, held.enter_context(writer)))
            of_ranks = self._communicator.all_gather_object({target.place: target.rows for target in targets})
            stored = {request.folder.name: sum(rows.get(request.place, 0) for rows in of_ranks)
                      for request, _ in stores}
            for name, rows in stored.items():
                if rows:
                    self._listener.note(f"{name}: going on after {rows:,} rows")
            left = max(0, self._config.rows - min(stored.values(), default=0))
            with self._listener.progress("extracting", left, "rows") as show:
                self._fill([target for target in targets if not target.writer.complete], quota, show,
                           {target.place: target.admission for target in targets})

    def _fill(self, targets: Sequence[Target], quota: Quota, show: Step,
              others: Mapping[Place, Admission] | None = None) -> None:
        """Fill stores of a rank's documents, in one pass; `others`: the admissions of its finished stores."""
        if not targets:
            return
        fill(targets, self._blocks(_first_cursor(targets), quota), self._forward, quota.rows,
             Progress(show, targets, quota.world_size), self._beside(targets, others or {}))
        for target in targets:
            target.writer.finish()

    def _beside(self, targets: Sequence[Target], others: Mapping[Place, Admission]) -> dict[Place, Admission]:
        """The places whose stores are not filled, and what decides which rows these can store.

        Where they need a median, their stores have recorded it: a store that has no rows yet is filled in each pass,
        from the text's beginning.
        """
        filled = {target.place for target in targets}
        return {request.place: others.get(request.place) or Admission(request.folder,
                                                                      ActivationStore.open(request.folder).meta)
                for request in self._requests if request.place not in filled}

    def _blocks(self, cursor: Cursor, quota: Quota) -> Iterator[Block]:
        """The blocks of a rank's documents from a cursor on."""
        def documents_from(spot: Spot) -> Iterator[Document]:
            return quota.documents(self._text.documents(spot.document, spot.mark, self._listener.note))

        return in_blocks(documents_from, self._windows(), quota.rows, cursor, self.block_rows)


def _complete_meta(folder: Path) -> StoreMeta | None:
    """The `store.json` of a finished store, damaged or not; None if there is none."""
    meta = ActivationStore.open(folder).meta if (folder / STORE_MARKER).exists() else None
    return meta if meta and meta.complete else None


def _check_same_rows(stores: Sequence[ActivationStore]) -> None:
    """Raise a StoreError if shards of one number end at different tokens in different stores, as they may where a row's
    norm is within rounding of the limit and an interrupted extraction resumed with other batches."""
    for store in stores[1:]:
        found, expected = ([shard.resume.position for shard in one.meta.shards] for one in (store, stores[0]))
        if found != expected:
            raise StoreError(f"{stores[0].name} and {store.name} do not hold the same rows: expected shards that end "
                             f"at the same tokens, got others; remove both and run the same command again, with one "
                             f"--batch-size on one machine")


def _first_cursor(targets: Sequence[Target]) -> Cursor:
    return min((target.cursor for target in targets), key=lambda cursor: cursor.place)
