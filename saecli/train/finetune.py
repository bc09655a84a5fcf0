"""`sae finetune`: a finished SAE trained on through the language model that it acts in; see `through.py`."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.errors import ConfigError, RunError
from ..base.home import Home
from ..base.options import demand_known, words_of
from ..base.processes import communicator
from ..base.words import does_nothing, refuse_idle
from ..extract.extraction import Streamed, open_stream
from ..extract.options import ExtractConfig
from ..extract.plan import Selection
from ..extract.texts import REPEATED
from ..model import ModelDtype
from ..model.choice import check_rows
from ..model.language_model import LanguageModel
from ..model.saes import open_sae
from ..model.source import ModelSource
from ..model.windows import stored_windows
from ..sae.dictionary import SAE
from ..sae.library import SAELike, Subject, lasting_name, note_if_remade
from ..splice.passes import Passes
from ..splice.placement import Placement, model_of, placement
from ..store.opening import Joined, open_joined
from ..store.origin import Origin, place_given
from ..store.reader import Rows
from ..store.split import Split
from ..store.values import TextWindow
from .jobs import Job, unfinished_run
from .options import FINETUNED, MEASURED_ROWS, TEXT, TRAINED, Finetune, TrainingConfig
from .plan import NONE_KEPT_OUT, Plan, split_kept_out
from .rows import ArrayRows
from .runs import Run, claimed
from .start import Comparison, Start, fingerprint
from .through import EPOCH, SplicedText, compared, steps_of
from .training import Record, Training, start_training

SAMPLE_TOKENS = 8192  # whose activations are kept, to normalise
NamedStores = tuple[Sequence[str], str | None]  # stores, and a target


class FinetuneSettings(NamedTuple):
    """Of `training` the seed, device, tracker and learning rate are used."""

    config: Finetune
    training: TrainingConfig
    text: Mapping[str, Any]  # options of `sae extract`, for a text that is streamed; else empty

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        text = {name: options[name] for name in TEXT if options.get(name) is not None}
        return cls(Finetune.among(options), TrainingConfig.among(options), text)


@dataclass(frozen=True, eq=False)
class Opened:
    """An SAE to fine-tune, the text, stored or streamed, and activations of both parts of it."""

    stores: Joined | Streamed
    start: Start
    text: SplicedText
    rows: ArrayRows
    test_rows: ArrayRows
    split_seed: int

    @classmethod
    def open(
        cls,
        home: Home,
        sae: SAELike,
        settings: FinetuneSettings,
        named: NamedStores | None,
        listener: Listener,
    ) -> Self:
        """Open what `sae finetune` names; `named` stores, if not the SAE's own."""
        config = settings.config
        subject, saved = open_sae(home, sae, listener)
        place = place_given(config.layer, config.site, config.module)
        acts, seed = placement((subject, saved), *place, "fine-tuning"), subject.split_seed
        source = model_of([acts], config.model, listener, config.model_revision)
        _demand_one_text(settings.text, named)
        stores: Joined | Streamed
        if settings.text:
            stores, spliced = _stream_text(home, acts, source, settings, seed, listener)
        else:
            stores = communicator().main_first(lambda: _open_stores(home, subject, named, listener))
            device = device_named(settings.training.device)
            model = LanguageModel(source, device, head=True, dtype=config.model_dtype)
            spliced = _read_text(stores, model, acts, config.tokens, seed, listener)
        order = np.random.default_rng(0).permutation(len(spliced.train))
        shuffled = [spliced.train[number] for number in order]
        rows, test_rows = communicator().broadcast_object(
            lambda: (
                spliced.activations(shuffled, SAMPLE_TOKENS),
                spliced.activations(spliced.test, MEASURED_ROWS),
            )
        )
        name = lasting_name(home, subject.name if sae is None else sae, subject)
        start = Start(name, fingerprint(saved.sae), saved.sae)
        return cls(stores, start, spliced, rows, test_rows, seed)

    def run(self, settings: FinetuneSettings, created: str) -> "FinetuneRun":
        tokens_per_step = self.text.windows_per_step * self.text.rows.mean()
        # Until it is resumed, a branch may move on; and auto is this device's precision.
        model = self.text.passes.model
        dtype = model.source.dtype_on(model.device, settings.config.model_dtype)
        config = replace(
            settings.config,
            model_revision=model.source.revision,
            model_dtype=cast(ModelDtype, dtype),
        )
        training = replace(
            settings.training,
            lr_warm_up=0.0,
            lr_decay=1.0,
            steps=max(1, round(config.tokens / tokens_per_step)),
            smoothing=0.0,
            normalize="scale",
            precision="float32",
            fraction=TRAINED,
            split_seed=self.split_seed,
            shuffle_seed=settings.training.seed,
        )
        activation = self.text.placement.sae.activation
        # The training rows give the normalisation, the test rows are those kept out of training.
        plan = Plan.resolve(
            self.rows, self.test_rows, training, config, activation, self.start, self.test_rows
        )
        plan = replace(plan, kept_scale=self.text.placement.sae.scale, epoch_steps=EPOCH)
        return FinetuneRun(self.stores, plan, created, self.text)


def _demand_one_text(text: Mapping[str, Any], named: NamedStores | None) -> None:
    if "dataset" in text and named is not None:
        raise ConfigError("cannot use both --data and --dataset at the same time; use one of them")
    if "dataset" not in text:
        refuse_idle(text, "without --dataset; leave it out, or name a text")


def _open_stores(
    home: Home, subject: Subject, named: NamedStores | None, listener: Listener
) -> Joined:
    """The stores named, else the SAE's own."""
    if named is not None:
        return open_joined(home, *named, listener)
    if subject.streamed and subject.data not in home.stores:
        text = {name: subject.streamed[name] for name in TEXT if name in subject.streamed}
        raise ConfigError(
            f"--dataset is needed: {subject.name} was trained on rows that were not stored; give its text, "
            f"{shlex.join(words_of(text))}, or name a store with --data"
        )
    stores = open_joined(home, subject.inputs, subject.target, listener)
    note_if_remade(subject, stores, listener)
    return stores


def _read_text(
    stores: Joined,
    model: LanguageModel,
    acts: Placement,
    tokens: int,
    seed: int,
    listener: Listener,
) -> SplicedText:
    train, kept_out = split_kept_out(stores.inputs[0], seed)
    if kept_out is None:
        listener.warn(NONE_KEPT_OUT)
        kept_out = train
    assert isinstance(train, Rows) and isinstance(kept_out, Rows), "of one store"
    check_rows(train, model.source)
    windows = [*stored_windows(train, tokens)]
    return SplicedText(Passes(model), acts, windows, [*stored_windows(kept_out, MEASURED_ROWS)])


def _stream_text(
    home: Home,
    acts: Placement,
    source: ModelSource,
    settings: FinetuneSettings,
    seed: int,
    listener: Listener,
) -> tuple[Streamed, SplicedText]:
    """Windows of a text, without the documents that `sae eval` would measure on: split as a store's."""
    extract = ExtractConfig(
        **settings.text,
        model=source.name,
        model_revision=source.revision,
        model_dtype=settings.config.model_dtype,
        prepend_bos="on" if acts.prepend_bos else "off",
        rows=settings.config.tokens,
    )
    stream, extraction = open_stream(
        extract,
        given=settings.text.keys(),
        selection=Selection.at(acts.read.layer, acts.read.site),
        device=settings.training.device,
        home=home,
        listener=listener,
        whole=True,
    )
    parts: tuple[list[TextWindow], list[TextWindow]] = [], []
    left = [extract.rows, MEASURED_ROWS]
    splits = [Split("train", TRAINED, seed, rest=rest) for rest in (False, True)]
    cutter = extraction.cutter()
    for window in cutter.cut(extraction.documents()):
        for part, split in enumerate(splits):
            kept = window.is_row & split.keeps(window.tokens["document"])
            if left[part] > 0 and kept.any():
                parts[part].append(TextWindow(window.token_ids, kept))
                left[part] -= int(kept.sum())
        if max(left) <= 0:
            break
    if cutter.left_out["repeated_bos"]:
        listener.warn(f"a text {REPEATED}")
    if not all(parts):
        raise ConfigError(
            "--dataset has too few documents: expected windows to train and to compare on, got "
            f"{len(parts[0])} and {len(parts[1])}; name a text of more documents"
        )
    return stream, SplicedText(Passes(extraction.models[0]), acts, *parts)


@dataclass(frozen=True)
class FinetuneRun(Run):
    """A fine-tuning, as a run, which acts where its start did."""

    text: SplicedText

    def train(self, training: Training) -> SAE:
        plan, rows, communicator = self.plan, training.rows, training.rows.communicator

        def measured(comparison: Comparison) -> list[dict[str, Any]]:
            dictionary = training.solver.dictionary
            return communicator.broadcast_object(
                lambda: compared(comparison, dictionary, self.text, plan)
            )

        steps = steps_of(self.text, plan, rows, training.progress.step)
        return training.train_on(steps, measured)

    def result(self, training: Training, sae: SAE) -> dict[str, Any]:
        return super().result(training, sae) | {"rows_train": int(self.text.rows.sum())}

    @property
    def origin(self) -> Origin:
        acts = self.text.placement
        written = acts.target or super().origin.written
        return replace(super().origin, read=acts.reads, written=written)

    @property
    def summary(self) -> str:
        plan = self.plan
        assert plan.start is not None and plan.test_rows is not None
        return (
            f"{plan.start.name}, {plan.activation.name}, {plan.d_sae} latents, through "
            f"{self.text.passes.model.source.name}, {int(self.text.rows.sum()):,} training and "
            f"{plan.test_rows.rows:,} validation tokens, {plan.steps:,} steps"
        )

    def options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        names = {option.name for option in FINETUNED}
        of_stores = self.stores.options()
        resolved = self.plan.training.to_json() | self.plan.solver.to_json() | of_stores
        assert self.plan.start is not None, "it begins with an SAE"
        chosen = {"run": self.plan.start.name}
        # The text is the input's; a target has none of its own.
        chosen |= {name: of_stores[name] for name in of_stores if name in names or name == "data"}
        return chosen, {name: resolved[name] for name in resolved if name in names}


def resume_finetuning(home: Home, name: str | None, listener: Listener, claims: ExitStack) -> Job:
    """The unfinished fine-tuning `name`, else the newest; its folder is claimed until `claims` is closed."""
    processes = communicator()
    folder, document = processes.main_first(
        lambda: unfinished_run(home, name, listener, "finetune")
    )
    if processes.is_main:
        claims.enter_context(claimed(folder, new=False))
    try:
        config = {key: value for key, value in document["solver"].items() if key != "name"}
        streamed, start = document.get("streamed") or {}, document["init"]
        settings = FinetuneSettings(
            Finetune.from_json(config),
            TrainingConfig.from_json(document["training"]),
            {key: value for key, value in streamed.items() if key in TEXT},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"cannot go on with {folder.name}: its run.json is of another version ({error}); begin it anew"
        ) from error
    named = None
    if not streamed:
        named = [document["data"], *document.get("beside", [])], document.get("target")
    opened = Opened.open(home, start["name"], settings, named, listener)
    for what, has_changed in (
        (start["name"], opened.start.hash != start["hash"]),
        (opened.stores.name, opened.stores.hash != document["data_hash"]),
    ):
        if has_changed:
            raise RunError(
                f"cannot go on with {folder.name}: {what} has changed since it was begun; begin it anew"
            )
    return Job(folder, opened.run(settings, document["created"]))


def finetune(
    sae: SAELike,
    model: str | None = None,
    *,
    data: str | Sequence[str] | None = None,
    home: str | Path | None = None,
    progress: bool | Listener = False,
    **options: Any,
) -> SAE:
    """Train an SAE on through the language model that it acts in, and write no files; CLI equivalent: `sae finetune`.

    Args:
        sae: an SAE, a run's name or whatever else `load_sae` takes.
        model: hub id, folder or GGUF file; None for the one that the SAE's file names.
        data: a store, whose token ids are the text; None for the one that the SAE was trained on.
        home: by default $SAE_HOME, else ./sae-data.
        **options: of `sae finetune`: `tokens`, `objective`, `fvu_weight`, `only`, `lr`, `dataset`, `device` and so on.

    Returns the better SAE, before or after, on a tenth of the training documents, kept out of training; `metadata` has
    `before`, `after` and `kept`. Cost: two forward passes and one backward pass over the tokens.
    """
    demand_known("finetune", options, {option.name for option in FINETUNED}, "finetune")
    if "log_to" in options:
        raise does_nothing("log_to", "in finetune, which writes no files; leave it out")
    listener = listening(progress)
    settings = FinetuneSettings.of({"model": model, **options})
    names = [data] if isinstance(data, str) else data
    opened = Opened.open(Home.at(home), sae, settings, (names, None) if names else None, listener)
    run = opened.run(settings, created="")
    with listener.progress("fine-tuning", run.plan.steps, "steps") as show:
        training = start_training(run.plan, Record(), show)
        tuned = run.train(training)
    for warning in training.notes():
        listener.warn(warning)
    assert training.comparison is not None, "it begins with an SAE"
    tuned.metadata = run.plan.settings() | run.origin.to_json() | training.comparison.measures
    return tuned
