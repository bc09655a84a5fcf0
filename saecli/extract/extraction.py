"""Running a language model over text, its activations stored, by one process or several ranks, or streamed.

Rank r reads the documents i with i mod world_size = r, and writes a store of its own within the joint one.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ..base.console import Listener, Silent, listening
from ..base.devices import device_named
from ..base.errors import ConfigError
from ..base.files import expanded
from ..base.home import STORE_MARKER, Home, checked_name
from ..base.options import demand_known, options_of, with_options
from ..base.processes import ALONE, Communicator, communicator
from ..base.words import counted
from ..model import TINY_GEMMA2
from ..model.choice import ModelLike
from ..model.windows import CPU_TOKENS, pass_tokens
from ..store.blocks import ADMITTED, Admission
from ..store.opening import note_when_stopped, warn_of, warn_of_nonfinite
from ..store.origin import HookPoint, Origin, last_layer
from ..store.reader import ActivationStore
from ..store.schema import StoreMeta, read_meta, rows_per_shard
from ..store.values import DTYPES
from ..store.writer import StoreWriter, no_rows, ranked_store
from .filling import Forward, ahead, check_some_stored, fill, read_activations
from .options import SHARD_ROWS, TOKEN_COLUMNS, ExtractConfig
from .plan import ExtractionPlan, Selection, StoreRequest, plan_extraction
from .readers import STDLIB_DOCS
from .texts import REPEATED, Chats, Document, text_of
from .windows import BLOCK_TOKENS, START, Block, Cursor, Cutter, in_blocks

if TYPE_CHECKING:
    from ..model.language_model import LanguageModel

BLOCK_WORK = 1 << 42  # parameters times tokens of a block on a CPU: half a minute on two cores
EXTRACTED_BYTES = 1 << 32  # of its rows at all hook points
Blocks = Callable[
    [Callable[[int, int], None]], Generator[tuple[np.ndarray, np.ndarray], None, None]
]


@with_options(ExtractConfig)
def extract(
    model: ModelLike | list[ModelLike] | None = None,
    *,
    layer: int | Sequence[int] | Literal["all"] | None = None,
    site: str | Sequence[str] = "resid_post",
    module: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    name: str | None = None,
    home: str | Path | None = None,
    device: str = "auto",
    progress: bool | Listener = False,
    **options: Any,
) -> Any:
    """Run a language model over text and store its activations; CLI equivalent: `sae extract`.

    A finished store of the same rows is opened at once, an interrupted one resumed. Under torchrun each rank stores
    its own documents.

    Args:
        model: hub id, also ID@REVISION, folder or GGUF file of a causal language model, or the bundled `tiny-gemma2`.
            Or a loaded model of transformers, with its `tokenizer`: read as it is, on its device, without dropout, and
            recognised by its weights.
        layer: block to read, from 0, or "all"; None for the middle one. Lists of models with one tokenizer, of layers
            or of sites give a list of stores, one for each combination, of the same tokens.
        site: resid_post, resid_pre, resid_mid, mlp_in, mlp_out, attn_out or attn_z.
        module: in place of layer and site modules by name, as in `model.layers.3.self_attn.o_proj:in`; without `:in`
            its output. `*` is any part of the name, and gives a list of stores.
        name: of the store, for several their prefix; None: from model, layer, site and a hash of the options.
        home: the folder of stores and runs; None for $SAE_HOME, else ./sae-data.

    Returns the `ActivationStore`, or a list of them.
    """
    demand_known("extract", options, options_of(ExtractConfig).keys() - {"model"}, "extract")
    selection = Selection.of(layer, site, module)
    if name is not None:
        checked_name(name)
    from ..model.source import loaded_sources  # transformers takes seconds to import

    models: list[Any] = (
        model if isinstance(model, list) and model else [model or ExtractConfig.model]
    )
    shelf, listener, processes = Home.at(home).stores, listening(progress), communicator()
    with note_when_stopped(listener) as folders:
        sources = loaded_sources(models, tokenizer, options.keys(), device) or models
        first = sources[0] if isinstance(sources[0], str) else sources[0].id
        chosen: dict[str, Any] = {**options, "model": first}
        config = ExtractConfig(**chosen)
        plan = plan_extraction(
            config, options.keys(), sources, selection, name, shelf, device_named(device), processes
        )
        folders += [request.folder for request in plan.requests]
        finished = processes.broadcast_object(plan.finished)
        if len(finished) < len(plan.requests):
            _run(plan, listener, processes)
        stores = _opened(plan, finished, listener if processes.is_main else Silent())
    several = isinstance(model, list) or selection.is_several(layer, site, module)
    return stores if several else stores[0]


def _run(plan: ExtractionPlan, listener: Listener, processes: Communicator) -> None:
    from ..model.language_model import LanguageModel  # transformers takes seconds to import
    from ..model.source import in_eval_mode

    if plan.config.rows < processes.world_size:
        raise ConfigError(
            f"--rows must be at least the number of processes, {processes.world_size}, got {plan.config.rows}"
        )
    plan.text.check_readable()
    last = last_layer([request.point for request in plan.requests])
    dtype = plan.config.model_dtype
    models = [LanguageModel(source, plan.device, dtype=dtype, last=last) for source in plan.sources]
    with in_eval_mode([model.model for model in models]):
        write_stores(Extraction(plan, models, listener, processes))


def _opened(
    plan: ExtractionPlan, finished: Set[HookPoint], listener: Listener
) -> list[ActivationStore]:
    stores = [ActivationStore.open(request.folder) for request in plan.requests]
    if stores[0].rows < plan.config.rows:
        listener.warn(
            f"the text ended after {counted(stores[0].rows, 'row')} of {plan.config.rows:,}"
        )
    for store, request in zip(stores, plan.requests, strict=True):
        store.cached = request.point in finished
        warn_of(store, listener)
        warn_of_nonfinite(store.name, store.meta, listener)
    return stores


class Extraction:
    """A plan's text, run through its models by one rank, which stores `rows` rows."""

    def __init__(
        self,
        plan: ExtractionPlan,
        models: "Sequence[LanguageModel]",
        listener: Listener,
        processes: Communicator = ALONE,
    ) -> None:
        self.plan, self.models = plan, models
        self.listener, self.processes = listener, processes
        self._read_chat = self._chats().read if plan.text.chat else text_of
        for note in filter(None, [source.note() for source in plan.sources]):
            listener.warn(note)
        self._rows_of = self.cutter().rows
        self._widths = self._measured_widths()
        self.block_tokens = self._block_tokens()
        rows, more = divmod(plan.config.rows, processes.world_size)
        self.rows = rows + (processes.rank < more)

    def _chats(self) -> Chats:
        config = self.plan.config
        chats = Chats(self.models[0].tokenizer, config.template(), config.model)
        template = config.chat_template or f"the chat template of {config.model}"
        for source in self.plan.text.sources:
            if source.chat:
                self.listener.note(
                    f"{source.dataset} holds chats in its column {source.column!r}, which go through {template}"
                )
        return chats

    def _measured_widths(self) -> dict[HookPoint, int]:
        token_ids = torch.zeros(1, 2, dtype=torch.int64)
        mask = torch.ones_like(token_ids)
        points = [request.point for request in self.plan.requests]
        widths = read_activations(self.models, token_ids, mask, points, lambda x: x.shape[-1])
        return dict(zip(points, widths, strict=True))

    def _block_tokens(self) -> int:
        """Fewer on a CPU, where a large model takes minutes for them, or where rows are wide."""
        tokens = BLOCK_TOKENS
        if self.models[0].device.type != "cuda":
            weights = (weight for model in self.models for weight in model.model.parameters())
            tokens = max(CPU_TOKENS, BLOCK_WORK // sum(map(torch.numel, weights)))
        row_bytes = sum(self._widths.values()) * DTYPES[self.plan.config.dtype].storage.itemsize
        return max(1, min(tokens, EXTRACTED_BYTES // row_bytes))

    def cutter(self) -> Cutter:
        config = self.plan.config
        control = config.control_tokens if self.plan.text.chat else None
        tokenizer, positions = self.models[0].tokenizer, config.positions
        return Cutter(tokenizer, config.window, positions, config.packed, control, config.begins)

    def forward(self) -> Forward:
        config, tokens = self.plan.config, pass_tokens(self.models[0].device)
        if config.batch_size != "auto":
            tokens = int(config.batch_size) * config.window
        return Forward(self.models, config.dtype, tokens, self.listener.note)

    @cached_property
    def metas(self) -> dict[HookPoint, StoreMeta]:
        """The `store.json` of each store."""
        config, text, cutter = self.plan.config, self.plan.text, self.cutter()
        further = {"role": text.chat, "source": text.names}
        columns = (*TOKEN_COLUMNS, *(name for name, present in further.items() if present))
        metas = {}
        for request in self.plan.requests:
            point, width = request.point, self._widths[request.point]
            model = self.models[point.model]
            module = model.modules.named(point)
            origin = {"module": module, "prepend_bos": bool(cutter.prefix)}
            reads = model.reads(point)
            metas[point] = StoreMeta(
                source=request.source | model.source.origin | origin,
                request_hash=request.hash,
                dtype=config.dtype,
                d_in=width,
                columns=columns,
                sources=dict.fromkeys(text.names, 0),
                control_tokens=dict.fromkeys(map(str, cutter.control), 0),
                shard_rows=config.shard_rows or rows_per_shard(width, config.dtype, SHARD_ROWS),
                max_norm_multiple=config.max_norm_multiple,
                reads=() if reads is None else tuple(float(f"{read:.6g}") for read in reads),
                windows=True,
            )
        return metas

    def blocks(self, cursor: Cursor = START) -> Generator[Block, None, None]:
        warned, size = False, self.block_tokens
        for block in in_blocks(self.documents, self.cutter(), self.rows, cursor, size):
            if "repeated_bos" in block.before and not warned:
                self.listener.warn(f"a text {REPEATED}")
                warned = True
            yield block

    def documents(self, begin: Cursor = START) -> Iterator[Document]:
        rank, world_size = self.processes.rank, self.processes.world_size
        documents = self._all_documents(begin, self.listener.warn)
        return (document for document in documents if document.number % world_size == rank)

    def _all_documents(self, begin: Cursor, warn: Callable[[str], None]) -> Iterator[Document]:
        return self.plan.text.documents(
            begin.document, begin.mark, warn, self._read_chat, self._rows_of
        )

    def medians(self) -> dict[HookPoint, float | None]:
        """The median norms by which ranks drop rows, of all documents as in one process."""
        admissions = {point: Admission(meta) for point, meta in self.metas.items()}
        forward, points = self.forward(), [*self.metas]
        every = partial(self._all_documents, warn=Silent().warn)
        rows = self.plan.config.rows
        for block in in_blocks(every, self.cutter(), rows, size=self.block_tokens):
            activations = forward(block.windows.each(), points, lambda *_: None)
            for point, of_point in activations.items():
                admissions[point].verdicts(of_point)
            if None not in [admission.median for admission in admissions.values()]:
                break
        return {point: admission.median for point, admission in admissions.items()}


def write_stores(extraction: Extraction) -> None:
    requests, processes = extraction.plan.requests, extraction.processes
    metas, several = extraction.metas, processes.world_size > 1
    if several and extraction.plan.config.max_norm_multiple is not None:
        medians = processes.broadcast_object(extraction.medians)
        metas = {point: replace(meta, median_norm=medians[point]) for point, meta in metas.items()}
    rows_before = processes.broadcast_object(partial(_rows_of_unfinished, requests))
    with ExitStack() as opened:
        if several and processes.is_main:
            for request in requests:
                meta = replace(metas[request.point], ranks=processes.world_size)
                opened.enter_context(ranked_store(request.folder, meta))
        processes.barrier()
        writers = {
            request.point: opened.enter_context(
                StoreWriter.open(
                    request.folder,
                    metas[request.point],
                    limit=extraction.rows,
                    rank=processes.rank if several else None,
                )
            )
            for request in requests
        }
        with _progress(extraction, rows_before) as show:
            fill(writers, extraction.blocks, extraction.forward(), extraction.rows, show)
        processes.barrier()
        for request in requests:
            meta = processes.broadcast_object(partial(read_meta, request.folder))
            if not meta.rows:
                raise no_rows(request.folder, meta.dropped)


def _rows_of_unfinished(requests: Sequence[StoreRequest]) -> dict[Path, int]:
    rows = {}
    for folder in (request.folder for request in requests):
        if not (folder / STORE_MARKER).exists():
            rows[folder] = 0
        elif not (meta := read_meta(folder)).complete:
            rows[folder] = meta.rows
    return rows


@contextmanager
def _progress(
    extraction: Extraction, rows_before: Mapping[Path, int]
) -> Iterator[Callable[[int, int], None]]:
    """Shows the progress of all ranks, assumed to be as far as this one."""
    rows, ranks = extraction.plan.config.rows, extraction.processes.world_size
    for folder, before in rows_before.items():
        if before:
            extraction.listener.note(f"{folder.name}: going on after {before:,} rows")
    left = max(0, rows - min(rows_before.values(), default=0))
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


@dataclass(frozen=True)
class Streamed:
    """One hook point of a model, in place of the stores that a run names.

    `blocks(show)` yields rows in the storage dtype, (R, D), and the numbers of their documents, (R,); `show` takes each
    batch's numbers of tokens and rows.
    """

    name: str  # of the store that `sae extract` makes of the same options
    meta: StoreMeta  # its `store.json`
    given: dict[str, Any]  # the options of `sae train` that determine the rows
    blocks: Blocks

    @property
    def hash(self) -> str:
        return self.meta.request_hash

    @property
    def d_in(self) -> int:
        return self.meta.d_in

    @property
    def origin(self) -> Origin:
        return self.meta.origin

    def names(self) -> dict[str, Any]:
        """The entries of `run.json`."""
        return {"data": self.name, "data_hash": self.hash, "streamed": self.given}

    def options(self) -> dict[str, Any]:
        return self.given


def open_stream(
    config: ExtractConfig,
    *,
    given: Set[str],
    selection: Selection,
    device: str,
    home: Home,
    listener: Listener,
    whole: bool = False,
) -> tuple[Streamed, Extraction]:
    """Load a model, `whole` or up to the layer of one hook point, and open a text; `given` names the user's options."""
    from ..model.language_model import LanguageModel  # transformers takes seconds to import

    plan = plan_extraction(
        config, given, [config.model], selection, None, home.stores, device_named(device), ALONE
    )
    plan.text.check_readable()
    if len(plan.requests) > 1:
        raise ConfigError(
            f"--module must name one module here, got {len(plan.requests)} for {selection.modules[0]}; name a layer"
        )
    (request,), (source,) = plan.requests, plan.sources
    model = LanguageModel(
        source,
        plan.device,
        head=whole,
        dtype=plan.config.model_dtype,
        last=None if whole else last_layer([request.point]),
    )
    extraction = Extraction(plan, [model], listener)
    meta = extraction.metas[request.point]
    place = request.point.to_json()
    if selection.modules:
        place = {"module": model.modules.named(request.point)}
    chosen = _options(plan, given) | place
    blocks = partial(_blocks, extraction, meta)
    return Streamed(request.folder.name, meta, chosen, blocks), extraction


def _options(plan: ExtractionPlan, given: Set[str]) -> dict[str, Any]:
    """The options of `sae train` that determine the rows, but for the hook point."""
    config, sources = plan.config, plan.text.sources
    chosen = {name: value for name, value in asdict(config).items() if name in given}
    chosen |= {
        "model": _absolute(config.model),
        "rows": config.rows,
        "context": config.context,
        "model_dtype": config.model_dtype,
        "dataset": [_absolute(source.dataset) for source in sources],
    }
    if plan.sources[0].revision:
        chosen["model_revision"] = plan.sources[0].revision
    revisions = [source.revision or "" for source in sources]
    if any(revisions):
        chosen["dataset_revision"] = revisions
    if config.chat_template is not None:
        chosen["chat_template"] = _absolute(config.chat_template)
    return chosen


def _blocks(
    extraction: Extraction, meta: StoreMeta, show: Callable[[int, int], None]
) -> Generator[tuple[np.ndarray, np.ndarray], None, None]:
    forward, admission, points = extraction.forward(), Admission(meta), [*extraction.metas]
    stored = offered = 0
    with closing(ahead(extraction.blocks())) as in_order:
        for block in in_order:
            activations = forward(block.windows.each(), points, show)
            if not activations:  # all its documents were left out
                continue
            rows, verdicts = admission.verdicts(activations[points[0]])
            admitted = verdicts == ADMITTED
            stored, offered = stored + int(admitted.sum()), block.offered
            check_some_stored(stored, meta.dtype, offered)
            yield rows[admitted], block.columns["document"][admitted]
    check_some_stored(stored, meta.dtype, offered, ended=True)


def _absolute(name: str) -> str:
    """A file's or folder's whole path; other names unchanged."""
    path = expanded(name)
    return str(path.resolve()) if path.exists() and name not in (TINY_GEMMA2, STDLIB_DOCS) else name
