"""`sae finetune`: a finished SAE trained on through the language model that it acts in; see `through.py`."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from torch import Tensor

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.errors import ConfigError, RunError
from ..base.home import Home
from ..base.options import demand_known, words_of
from ..base.processes import communicator
from ..extract.language_model import LanguageModel
from ..extract.model_source import ModelSource
from ..extract.options import ExtractConfig, place_given
from ..extract.passes import Passes
from ..extract.splice import (
    Hooked,
    StoredWindow,
    check_rows,
    hooked,
    model_of,
    stored_windows,
)
from ..extract.streaming import Streamed, open_stream
from ..extract.together import demand_together
from ..sae.dictionary import SAE
from ..sae.library import SAELike, Subject, lasting_name, note_if_remade, open_sae
from ..store.opening import Joined, open_joined
from ..store.reader import Rows
from ..store.split import Split
from .finetune_options import FINETUNED, TEXT, Finetune
from .jobs import Job, unfinished_run
from .loop import Loop
from .options import MEASURED_ROWS, TRAINED, TrainingConfig
from .plan import split_kept_out
from .rows import ArrayRows
from .runs import CHECKPOINT, Run, RunRecord, claimed, load_checkpoint, save_checkpoint
from .start import Start, fingerprint
from .through import FinetunePlan, SplicedText, ThroughLoop, TogetherLoop
from .training import Progress, Record, Training, start_training

SAMPLE_TOKENS = 8192  # whose activations are kept, to normalise


Named = tuple[Sequence[str], str | None]  # stores, and a target


class Settings(NamedTuple):
    """The options of a fine-tuning; of `training` the seed, device, tracker and the learning rate are used."""

    config: Finetune
    training: TrainingConfig
    text: Mapping[str, Any]  # options of `sae extract`, without `dataset` those of the model

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
        saes: Sequence[SAELike],
        settings: Settings,
        named: Sequence[Named],
        listener: Listener,
    ) -> list[Self]:
        """Open what `sae finetune` names, several SAEs to train at once, on the text of the first; `named` has the
        stores of each, if not its own."""
        processes, (config, training, text) = communicator(), settings
        opened = [open_sae(home, sae, listener) for sae in saes]
        place = place_given(config.layer, config.site, config.module)
        acts = [hooked(one, *place, "fine-tuning") for one in opened]
        subject = opened[0][0]
        if config.together:
            demand_together(acts)
            if len({one.split_seed for one, _ in opened}) > 1:
                raise ConfigError(
                    "--together needs one split: expected runs of one --split-seed, so that the text kept out of "
                    "training is the same, got several"
                )
        source = model_of(acts, config.model, listener, config.model_revision)
        stores: list[Joined | Streamed]
        if "dataset" in text:
            if named:
                raise ConfigError(
                    "cannot use both --data and --dataset at the same time; use one of them"
                )
            seed = subject.split_seed
            stream, spliced = _stream_text(home, acts[0], source, settings, seed, listener)
            stores = [stream] * len(saes)
        else:
            its_named: Sequence[Named | None] = named or [None] * len(saes)
            joined = processes.main_first(
                lambda: [
                    _open_stores(home, one, its_stores, listener)
                    for (one, _), its_stores in zip(opened, its_named, strict=True)
                ]
            )
            stores = [*joined]
            model_dtype = text.get("model_dtype", "auto")
            device = device_named(training.device)
            model = LanguageModel(source, device, head=True, dtype=model_dtype)
            spliced = _read_text(joined[0], model, acts[0], config.tokens, subject.split_seed)
        order = np.random.default_rng(0).permutation(len(spliced.train))
        shuffled = [spliced.train[number] for number in order]
        train, test = processes.broadcast_object(
            lambda: (
                spliced.activations(shuffled, SAMPLE_TOKENS, acts),
                spliced.activations(spliced.test, MEASURED_ROWS, acts),
            )
        )
        together = tuple(acts) if config.together else ()
        parts = []
        of_saes = zip(saes, opened, acts, stores, train, test, strict=True)
        for sae, (one, saved), at, its_stores, rows, test_rows in of_saes:
            name = lasting_name(home, one.name if sae is None else sae, one)
            start = Start(name, fingerprint(saved.sae), saved.sae)
            its_text = replace(spliced, hooked=at, together=together)
            parts.append(cls(its_stores, start, its_text, rows, test_rows, subject.split_seed))
        return parts

    def run(self, settings: Settings, created: str) -> "FinetuneRun":
        tokens_per_step = self.text.windows_per_step * self.text.rows.mean()
        # A branch may move on until an interrupted fine-tuning is resumed.
        revision = self.text.passes.model.source.revision
        config = replace(settings.config, model_revision=revision)
        training = replace(
            settings.training,
            lr_warm_up=0.0,
            lr_decay=1.0,
            steps=max(1, round(config.tokens / tokens_per_step)),
            smoothing=0.0,
            precision="float32",
            split_seed=self.split_seed,
            shuffle_seed=settings.training.seed,
        )
        activation = self.text.hooked.sae.activation
        plan = FinetunePlan.resolve(
            self.rows, self.test_rows, training, config, activation, self.start
        )
        return FinetuneRun(self.stores, plan, created, self.text)


def _open_stores(home: Home, subject: Subject, named: Named | None, listener: Listener) -> Joined:
    """The stores named, else those that the SAE was trained on."""
    if named is not None:
        return open_joined(home, *named, listener)
    if subject.streamed and subject.data not in home.stores.names():
        text = {name: subject.streamed[name] for name in TEXT if name in subject.streamed}
        raise ConfigError(
            f"--dataset is needed: {subject.name} was trained on rows that were not stored; "
            f"give its text, {shlex.join(words_of(text))}, or name a store with --data"
        )
    names = [name for name in (subject.data, *subject.beside) if name]
    stores = open_joined(home, names, subject.target, listener)
    note_if_remade(subject, stores, listener)
    return stores


def _read_text(
    stores: Joined, model: LanguageModel, acts: Hooked, tokens: int, seed: int
) -> SplicedText:
    train, test = split_kept_out(stores.inputs[0], seed)
    assert isinstance(train, Rows) and isinstance(test, Rows), "of one store"
    check_rows(train, model.source)
    windows = [*stored_windows(train, tokens)]
    return SplicedText(Passes(model), acts, windows, [*stored_windows(test, MEASURED_ROWS)])


def _stream_text(
    home: Home, acts: Hooked, source: ModelSource, settings: Settings, seed: int, listener: Listener
) -> tuple[Streamed, SplicedText]:
    """Windows of a text, its documents split by the same hashes as a store's; those that `sae eval` measures on are
    left out."""
    extract = ExtractConfig(
        **settings.text,
        model=source.name,
        model_revision=source.revision,
        rows=settings.config.tokens,
    )
    stream, extraction = open_stream(
        extract,
        given=settings.text.keys(),
        at=(acts.read.layer, acts.read.site),
        device=settings.training.device,
        home=home,
        listener=listener,
        whole=True,
    )
    parts: tuple[list[StoredWindow], list[StoredWindow]] = [], []
    left = [extract.rows, MEASURED_ROWS]
    splits = [Split("train", TRAINED, seed, rest=rest) for rest in (False, True)]
    documents = extraction.text.documents(note=listener.note)
    for window in extraction.windows().cut(documents):
        for part, split in enumerate(splits):
            kept = window.kept & split.keeps(window.tokens["document"])
            if left[part] > 0 and kept.any():
                parts[part].append(StoredWindow(window.token_ids, kept))
                left[part] -= int(kept.sum())
        if max(left) <= 0:
            break
    if not all(parts):
        raise ConfigError(
            "--dataset has too few documents: expected windows to train on and to compare on, got "
            f"{len(parts[0])} and {len(parts[1])}; name a text of more documents"
        )
    return stream, SplicedText(Passes(extraction.model), acts, *parts)


class Members(NamedTuple):
    """The folders of the runs of a set that is trained at once, and their states until all are known. The checkpoint of
    the first has all of them, so that a kill leaves all at one step."""

    folders: Sequence[Path]
    states: dict[str, Tensor]  # by run/name

    def demand_whole(self) -> None:
        """RunError unless the set has a checkpoint, and these are all its runs."""
        saved, names = load_checkpoint(self.folders[0]), {folder.name for folder in self.folders}
        known = set() if saved is None else {name.partition("/")[0] for name in saved[0]}
        if known != names:
            missing = ", ".join(sorted(known - names)) or "its checkpoint"
            raise RunError(
                f"cannot go on with {self.folders[0].name}: it is one of a set that is trained at once, and "
                f"{missing} is missing; name all its runs by a pattern, --name 'u-*', or begin anew"
            )


class MemberRecord(RunRecord):
    """Writes the files of a run of a set."""

    def __init__(self, run: Run, folder: Path, members: Members) -> None:
        super().__init__(run, folder)
        self._members = members

    def checkpoint(self) -> tuple[dict[str, Tensor], Progress] | None:
        saved, begins = load_checkpoint(self._members.folders[0]), f"{self.folder.name}/"
        if saved is None:
            return None
        own = {name: tensor for name, tensor in saved[0].items() if name.startswith(begins)}
        return {name.removeprefix(begins): tensor for name, tensor in own.items()}, saved[1]

    def save(self, sae: SAE, state: dict[str, Tensor], progress: Progress) -> None:
        """Keep the SAE; with the last of the set write all states."""
        self.keep(sae)
        folders, states = self._members
        states |= {f"{self.folder.name}/{name}": tensor for name, tensor in state.items()}
        if len({name.partition("/")[0] for name in states}) < len(folders):
            return
        save_checkpoint(folders[0], states, progress)
        states.clear()
        for other in folders[1:]:
            if not (other / CHECKPOINT).exists():  # so that it counts as a run to resume
                save_checkpoint(other, {}, progress)


@dataclass(frozen=True)
class FinetuneRun(Run):
    """A fine-tuning, as a run: it acts where the SAE did from which it began."""

    command: ClassVar[str] = "finetune"

    text: SplicedText

    def name_to_resume(self, name: str) -> str:
        if not self.plan.as_one or self.plan.start is None:
            return name
        return f"'{name.removesuffix(Path(self.plan.start.name).name)}*'"

    def records(self, runs: Mapping[Path, Run]) -> list[RunRecord]:
        if not self.plan.as_one:
            return super().records(runs)
        members = Members(sorted(runs), {})
        return [MemberRecord(run, folder, members) for folder, run in runs.items()]

    def loop(self, trainings: Sequence[Training], alone: bool = True) -> Loop:
        kind = TogetherLoop if self.plan.as_one else ThroughLoop
        return kind(trainings, self.text, alone)

    @property
    def origin(self) -> dict[str, Any]:
        return super().origin | self.text.hooked.origin

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
        chosen = {
            name: value
            for name, value in of_stores.items()
            if name in names or name in ("data", "target")
        }
        return chosen, {name: resolved[name] for name in names & resolved.keys()}


def resume_jobs(home: Home, name: str | None, listener: Listener, claims: ExitStack) -> list[Job]:
    """The unfinished fine-tuning `name`, else the newest, or by a pattern the set that is trained at once; folders are
    claimed until `claims` is closed."""
    processes = communicator()
    names = [name] if name is None else home.runs.matching([name])
    unfinished = processes.main_first(
        lambda: [unfinished_run(home, one, listener, "finetune") for one in names]
    )
    folders, documents = zip(*unfinished, strict=True)
    if processes.is_main:
        for folder in folders:
            claims.enter_context(claimed(folder, new=False))
    folder, document = unfinished[0]
    try:
        config = {key: value for key, value in document["solver"].items() if key != "name"}
        streamed, begun = document.get("streamed") or {}, [each["init"] for each in documents]
        settings = Settings(
            Finetune.from_json(config),
            TrainingConfig.from_json(document["training"]),
            {key: value for key, value in streamed.items() if key in TEXT},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"cannot go on with {folder.name}: its run.json is not what this version of `sae finetune` "
            f"writes ({error}); begin it anew"
        ) from error
    if settings.config.together:
        Members(sorted(folders), {}).demand_whole()
    elif len(folders) > 1:
        raise RunError(
            f"cannot go on with {len(folders)} runs at once: {folder.name} is no part of a set; name one with --name"
        )
    named = [
        ([each["data"], *each.get("beside", [])], each.get("target"))
        for each in documents
        if not streamed
    ]
    starts = [each["name"] for each in begun]
    opened = Opened.open(home, starts, settings, named, listener)
    jobs = []
    for one, folder, document in zip(opened, folders, documents, strict=True):
        for what, has_changed in (
            (document["init"]["name"], one.start.hash != document["init"]["hash"]),
            (one.stores.name, one.stores.hash != document["data_hash"]),
        ):
            if has_changed:
                raise RunError(
                    f"cannot go on with {folder.name}: {what} has changed since it was begun; begin it anew"
                )
        jobs.append(Job(folder, one.run(settings, document["created"])))
    return jobs


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
    demand_known("finetune", options, {option.name for option in FINETUNED}, "finetune")
    listener = listening(progress)
    settings = Settings.of({"model": model, **options})
    names = [data] if isinstance(data, str) else data or []
    if settings.config.together:
        raise ConfigError(
            "--together is an option of the command alone: sae finetune 't-*' --together"
        )
    named = [(names, None)] if names else []
    (opened,) = Opened.open(Home.at(home), [sae], settings, named, listener)
    run = opened.run(settings, created="")
    with listener.progress("fine-tuning", run.plan.steps, "steps") as show:
        training = start_training(run.plan, Record(), show)
        (tuned,) = run.loop([training]).train()
    for note in training.notes():
        listener.note(note)
    assert training.comparison is not None, "it begins with an SAE"
    tuned.metadata = run.plan.settings() | run.origin | training.comparison.measures
    return tuned
