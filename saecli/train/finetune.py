"""`sae finetune`: a finished SAE trained on through the language model that it acts in; see `through.py`."""

import shlex
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.errors import ConfigError, RunError
from ..base.home import Home
from ..base.options import demand_known, words_of
from ..base.processes import Communicator, communicator
from ..extract.language_model import LanguageModel
from ..extract.options import ExtractConfig
from ..extract.passes import Passes
from ..extract.splice import (
    Hooked,
    StoredWindow,
    check_rows,
    hooked,
    largest,
    model_of,
    stored_windows,
    unfit,
)
from ..extract.streaming import Streamed, open_stream
from ..sae.dictionary import SAE
from ..sae.library import SAELike, lasting_name, note_if_remade, open_sae
from ..store.joined import Joined
from ..store.opening import open_joined
from ..store.reader import Rows
from ..store.split import Split
from .files import claimed
from .loop import Loop
from .options import FINETUNED, TEXT, TRAINED, Finetune, TrainingConfig, parted
from .plan import Plan
from .runs import Job, Run, unfinished_run
from .start import Start, fingerprint
from .through import FinetunePlan, Sampled, Through
from .training import Record, start_training

SAMPLE_TOKENS, TEST_TOKENS = 8192, 16_384  # whose activations are kept, to normalise and to measure


@dataclass(frozen=True, eq=False)
class Opened:
    """An SAE to fine-tune, the text, stored or streamed, and activations of both parts of it."""

    stores: Joined | Streamed
    start: Start
    through: Through
    rows: Sampled
    test_rows: Sampled
    split_seed: int

    @classmethod
    def open(
        cls,
        home: Home,
        sae: SAELike,
        config: Finetune,
        *,
        data: Sequence[str],
        text: Mapping[str, Any],
        device: str,
        listener: Listener,
    ) -> Self:
        """Open what `sae finetune` names; `text` are options of `sae extract`, without `dataset` those of the model."""
        processes = communicator()
        opened = subject, saved = open_sae(home, sae, listener)
        acts = hooked(opened, config.layer, config.site, "fine-tuning")
        source = model_of([acts], config.model, config.model_revision, listener)
        stores: Joined | Streamed
        if "dataset" in text:
            if data:
                raise ConfigError(
                    "cannot use both --data and --dataset at the same time; use one of them"
                )
            commit = None if source.revision is None else (source.revision,)
            extract = ExtractConfig(
                **text, model=source.name, model_revision=commit, rows=config.tokens
            )
            stores, through = _streamed(
                home, acts, extract, text.keys(), subject.split_seed, device, listener
            )
        else:
            if not data and subject.streamed and subject.data not in home.stores.names():
                texts = {name: subject.streamed[name] for name in TEXT if name in subject.streamed}
                raise ConfigError(
                    f"--dataset is needed: {subject.name} was trained on rows that were not stored; "
                    f"give its text, {shlex.join(words_of(texts))}, or name a store with --data"
                )
            names = data or [name for name in (subject.data, *subject.beside) if name]
            joined = stores = processes.main_first(
                lambda: open_joined(home, names, None if data else subject.target, listener)
            )
            if not data:
                note_if_remade(subject, joined, listener)
            model = LanguageModel(
                source, device_named(device), head=True, dtype=text.get("model_dtype", "auto")
            )
            through = _stored(joined, model, acts, config.tokens, subject.split_seed)
        name = lasting_name(home, subject.name if sae is None else sae, subject)
        start = Start(name, fingerprint(saved.sae), saved.sae)
        shuffled = [
            through.train[one] for one in np.random.default_rng(0).permutation(len(through.train))
        ]
        train, test = processes.broadcast_object(
            lambda: (
                through.activations(shuffled, SAMPLE_TOKENS),
                through.activations(through.test, TEST_TOKENS),
            )
        )
        return cls(
            stores,
            start,
            through,
            Sampled(through, train),
            Sampled(through, test),
            subject.split_seed,
        )

    def plan(self, config: Finetune, training: TrainingConfig) -> FinetunePlan:
        """The plan of a training; of `training` the seed, device, trackers and the learning rate are used."""
        tokens = self.through.per_step * self.through.rows.mean()
        # A branch may move on until an interrupted fine-tuning is resumed.
        config = replace(config, model_revision=self.through.passes.model.source.revision)
        training = replace(
            training,
            lr_warm_up=0.0,
            lr_decay=1.0,
            steps=max(1, round(config.tokens / tokens)),
            smoothing=0.0,
            precision="float32",
            split_seed=self.split_seed,
            shuffle_seed=training.seed,
        )
        activation = self.through.hooked.sae.activation
        plan = Plan.resolved(self.rows, self.test_rows, training, config, activation, self.start)
        return FinetunePlan(
            **{one.name: getattr(plan, one.name) for one in fields(Plan)}, through=self.through
        )


def _stored(stores: Joined, model: LanguageModel, acts: Hooked, tokens: int, seed: int) -> Through:
    store = stores.inputs[0]
    train, test = parted(store, TRAINED, seed)
    assert isinstance(train, Rows) and isinstance(test, Rows), "of one store"
    check_rows(train, model.source)
    if (last := largest(train, "token_id")) >= model.vocabulary:
        raise unfit(train, model.source, f"a token {last}, got token ids below {model.vocabulary}")
    return Through(
        Passes(model),
        acts,
        [*stored_windows(train, tokens)],
        [*stored_windows(test, TEST_TOKENS)],
    )


def _streamed(
    home: Home,
    acts: Hooked,
    config: ExtractConfig,
    given: Set[str],
    seed: int,
    device: str,
    listener: Listener,
) -> tuple[Streamed, Through]:
    """Windows of a text, its documents split by the same hashes as a store's; those that `sae eval` measures on are
    left out."""
    stream, extraction = open_stream(
        config,
        given=given,
        at=(acts.read.layer, acts.read.site),
        device=device,
        home=home,
        listener=listener,
        whole=True,
    )
    found: tuple[list[StoredWindow], list[StoredWindow]] = [], []
    left = [config.rows, TEST_TOKENS]
    cutter = extraction.windows()
    splits = [Split("train", TRAINED, seed, rest=rest) for rest in (False, True)]
    for window in cutter.cut(extraction.text.documents(note=listener.note)):
        for part, split in enumerate(splits):
            chosen = window.kept & split.keeps(window.documents)
            if left[part] > 0 and chosen.any():
                found[part].append(StoredWindow(window.token_ids, chosen))
                left[part] -= int(chosen.sum())
        if max(left) <= 0:
            break
    if not all(found):
        raise ConfigError(
            "--dataset has too few documents: expected windows to train on and to compare on, got "
            f"{len(found[0])} and {len(found[1])}; name a text of more documents"
        )
    return stream, Through(Passes(extraction.model), acts, *found)


@dataclass(frozen=True)
class FinetuneRun(Run):
    """A fine-tuning, as a run: it acts where the SAE did from which it began."""

    command: ClassVar[str] = "finetune"

    @property
    def origin(self) -> dict[str, Any]:
        assert isinstance(self.plan, FinetunePlan)
        return super().origin | self.plan.through.hooked.origin

    @property
    def summary(self) -> str:
        plan = self.plan
        assert (
            isinstance(plan, FinetunePlan) and plan.start is not None and plan.test_rows is not None
        )
        return (
            f"{plan.start.name}, {plan.activation.name}, {plan.d_sae} latents, through "
            f"{plan.through.passes.model.source.name}, {plan.rows_trained:,} training and {plan.test_rows.rows:,} "
            f"validation tokens, {plan.steps:,} steps"
        )

    def options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        settled = self.plan.training.to_json() | self.plan.solver.to_json() | self.stores.options()
        names = {one.name for one in FINETUNED}
        return (
            {
                name: value
                for name, value in self.stores.options().items()
                if name in {*names, "data", "target"}
            },
            {name: settled[name] for name in names & settled.keys()},
        )


def resumed(
    home: Home, name: str | None, listener: Listener, claims: ExitStack, processes: Communicator
) -> Job:
    """The unfinished fine-tuning `name`, else the newest; its folder is claimed until `claims` is closed."""
    folder, document = processes.main_first(
        lambda: unfinished_run(home, name, listener, "finetune")
    )
    if processes.is_main:
        claims.enter_context(claimed(folder, new=False))
    try:
        settings, training = (
            dict(document["solver"]),
            TrainingConfig.from_json(document["training"]),
        )
        config = Finetune.from_json(
            {key: value for key, value in settings.items() if key != "name"}
        )
        streamed, begun = document.get("streamed"), document["init"]
        text = {key: value for key, value in (streamed or {}).items() if key in TEXT}
        data = [] if streamed else [document["data"], *document.get("beside", [])]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"cannot go on with {folder.name}: its run.json is not what this version of `sae finetune` "
            f"writes ({error}); begin it anew"
        ) from error
    opened = Opened.open(
        home, begun["name"], config, data=data, text=text, device=training.device, listener=listener
    )
    if opened.start.hash != begun["hash"] or opened.stores.hash != document["data_hash"]:
        what = begun["name"] if opened.start.hash != begun["hash"] else opened.stores.name
        raise RunError(
            f"cannot go on with {folder.name}: {what} has changed since it was begun; begin it anew"
        )
    return Job(
        folder, FinetuneRun(opened.stores, opened.plan(config, training), document["created"])
    )


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
        model: hub id, folder or GGUF file of the language model; None for the one that the SAE's file names.
        data: the name of a store, whose token ids are the text; None for the store that the SAE was trained on.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        **options: those of `sae finetune`: `tokens`, `objective`, `fvu_weight`, `only`, `lr`, `dataset`, `device` and
            so on.

    Returns the better SAE of the two, before and after, on a tenth of the training documents, kept out of training, so
    that the held-out ones, which `sae eval` measures on, stay out of the choice; `metadata` has `before`, `after` and
    `kept`. Cost: two forward passes and one backward pass over the tokens.
    """
    demand_known("finetune", options, {one.name for one in FINETUNED}, "finetune")
    listener = listening(progress)
    config, training, text = chosen({"model": model, **options})
    opened = Opened.open(
        Home.at(home),
        sae,
        config,
        data=[data] if isinstance(data, str) else data or [],
        text=text,
        device=training.device,
        listener=listener,
    )
    plan = opened.plan(config, training)
    with listener.progress("fine-tuning", plan.steps, "steps") as show:
        found = start_training(plan, Record(), show)
        (tuned,) = Loop([found]).train()
    for note in found.notes():
        listener.note(note)
    tuned.metadata = plan.settings() | FinetuneRun(opened.stores, plan, "").origin
    assert found.comparison is not None, "it begins with an SAE"
    tuned.metadata |= found.comparison.measures
    return tuned


def chosen(options: Mapping[str, Any]) -> tuple[Finetune, TrainingConfig, dict[str, Any]]:
    """The options given, by their configurations, and those of the text."""
    return (
        Finetune.among(options),
        TrainingConfig.among(options),
        {name: options[name] for name in TEXT if options.get(name) is not None},
    )
