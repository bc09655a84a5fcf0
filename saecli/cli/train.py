"""Train a sparse autoencoder from a store or a model.

Writes a folder into runs/ of the home: the SAE (acting on raw activations), a checkpoint after every epoch
and every 1,000 steps, metrics.jsonl, loss.png, and config.toml, with which --config repeats the training. --resume
goes on with a run that was stopped or killed.

With --model google/gemma-2-2b --layer 12 --rows 1000000, rows go from the model through memory to the trainer: each
comes once, nothing but the run is written, and a stopped run begins anew.

Options marked "..." can be given several times (--seed 0 --seed 1): one run per combination, one after another, in
one table; if one fails, the others go on.

--data 'mlp-*' --each trains one SAE for each store with such a name. With --target 'out-*' each predicts the store
of its layer: a set of transcoders, which `sae export` puts into one folder.

Example: sae train --solver pam-sgd --act topk --k 32
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..base.errors import ConfigError, SaeError
from ..base.home import checked_name, now
from ..base.options import options_from
from ..base.processes import communicator
from ..base.words import flag_of, refuse_idle
from ..extract.options import ExtractConfig
from ..model import TINY_GEMMA2
from ..sae.activations import ACTIVATIONS
from ..store.origin import place_given
from ..train import SOLVERS
from ..train.options import DEFAULT_ACT, TRAINED, TrainingConfig
from .extract import Places
from .options import Given, Json, Session, configured, start

if TYPE_CHECKING:
    from ..extract.extraction import Streamed
    from ..store.opening import Joined
    from ..train.fit import RowsOf
    from ..train.jobs import Job

MODEL_PANEL = "Rows of --model"
_HELP = {
    "model": f"Train without a store, on activations of this language model as it gives them: hub id, folder, or "
    f"{TINY_GEMMA2}; with --layer, --site, --dataset, --rows, --context (--help-all).",
    "rows": "Training rows, without held-out ones; fewer if the text ends first.",
    "layer": "Block of --model to read, from 0. Default: the middle one.",
    "site": "Hook point in the block; see `sae extract`. Default: resid_post.",
    "module": "Instead of --layer and --site a module of --model; see `sae extract`.",
}
PLACE = ("layer", "site", "module")
# The dataset's commit is for `config.toml`.
_OF_ROWS = ("model_revision", "dataset", "dataset_revision", "rows", "context", "model_dtype")
FROM_MODEL = (
    *options_from(ExtractConfig, ["model"], _HELP, once=True, default=None),
    *options_from(ExtractConfig, _OF_ROWS, _HELP, once=True, panel=MODEL_PANEL, advanced=True),
    *options_from(Places, PLACE, _HELP, once=True, panel=MODEL_PANEL, advanced=True, default=None),
)
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Resume the run --name, else the newest unfinished one, from "
        "its last checkpoint, as if never stopped.",
    ),
]


@configured(TrainingConfig, repeated=True, more=FROM_MODEL, solver=SOLVERS, act=ACTIVATIONS)
def command(
    ctx: typer.Context,
    options: tuple[Given, ...],
    solver: Annotated[
        Literal[tuple(SOLVERS)],  # type: ignore[valid-type]
        typer.Option(help="Training algorithm."),
    ] = "pam-sgd",
    act: Annotated[
        Literal[tuple(ACTIVATIONS)],  # type: ignore[valid-type]
        typer.Option(
            help="Activation. batchtopk has --k active latents on average, and at equal L0 far less error than relu, "
            "whose L0 is unknown beforehand. jumprelu and gated, with --target-l0, find the most features; "
            "matching-pursuit, with --k, and less with --least-squares, has the least error, in 2 to 4 times topk's "
            "time, but its latents are harder to label.",
        ),
    ] = DEFAULT_ACT,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Activation store to train on, by name or folder; several of the same tokens, for a crosscoder; or "
            "with --each any, also by patterns such as 'mlp-*'.",
            show_default="the newest",
        ),
    ] = None,
    each: Annotated[
        bool,
        typer.Option(
            "--each",
            help="Train one SAE for each store of --data, or with --target one transcoder for each layer, one after "
            "another; rerun it to resume.",
        ),
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            help="Store of the same tokens to predict from --data, for a transcoder; with --each a pattern, such as "
            "'mlp-*-mlp_out', of one store for each layer.",
            show_default="--data itself",
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            hidden=True,
            help="SAE to train on: run name, folder, or user/repo/folder@revision on the Hugging Face "
            "hub. d_sae and prefixes are inherited; act and k can be overridden. It is kept as "
            "it was if its loss on a tenth of the training documents, kept out of training, does not fall.",
            show_default="random directions",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the run; with --each, before the store's.",
            show_default="solver, activation and a number",
        ),
    ] = None,
    resume: ResumeOption = False,
    json: Json = False,
) -> None:
    if not (resume or data or "model" in options[0].values):
        ctx.find_root().obj.stores.find(None)  # before torch is imported
    from ..train.jobs import resume_job

    session = start(ctx)
    with ExitStack() as claims:
        if resume:
            demand_alone(session)
            jobs = [resume_job(session.home, name, session.console, claims)]
        else:
            jobs = _new_jobs(session, options, claims)
        train_and_print(session, jobs, each)


def demand_alone(session: Session) -> None:
    others = session.given - {"name", "resume", "json"}
    if others:
        words = ["RUN" if name == "run" else flag_of(name) for name in others]
        raise ConfigError(
            f"{min(words)} does nothing with --resume, which keeps the run's settings; leave it out"
        )


def _new_jobs(session: Session, options: Sequence[Given], claims: ExitStack) -> list[Job]:
    """For each store of `--each` a run for each combination of options."""
    from ..train.fit import make_plan
    from ..train.jobs import Job, claim_folder, known_job, run_names
    from ..train.runs import Run
    from ..train.start import Start

    solver, act, init, name, each = (
        session.options[option] for option in ("solver", "act", "init", "name", "each")
    )
    processes, start_sae = communicator(), None
    if init is not None:
        start_sae = processes.broadcast_object(
            lambda: Start.open(session.home, init, session.console)
        )
    if start_sae is not None and "act" not in session.given:
        act = start_sae.activation
    stem = f"{solver}-{act}"
    of_rows = {option.name for option in FROM_MODEL}  # which the stores' options repeat
    jobs = []
    for data, target in _stores_of_each(session):
        source, rows_of = _rows(session, options, (data, target), claims, start_sae is not None)
        prefix = f"{name or stem}-{Path(data[0]).name}" if each else name
        names = run_names(prefix, [option.varied for option in options])
        plans = [make_plan(rows_of, solver, act, option.values, start_sae) for option in options]
        for run_name, option, plan in zip(names, options, plans, strict=True):
            run, job = Run(source, plan, now()), None
            if run_name is not None and (each or option.varied):
                job = known_job(session.home, run_name, run, option.varied, session.console, claims)
            if job is None:
                given = {key: value for key, value in option.values.items() if key not in of_rows}
                folder = claim_folder(session.home, run_name, stem, claims)
                job = Job(folder, run, given, option.varied)
            jobs.append(job)
    return jobs


def train_and_print(session: Session, jobs: Sequence[Job], each: bool = False) -> None:
    """Train runs in claimed folders, in turn, and print their results; with `each` as of several."""
    from ..show.tables import compared_tables, figures_table, results_table
    from ..train.jobs import train_run

    processes, first = communicator(), jobs[0]
    alone = not each and len(jobs) == 1
    documents: list[dict[str, Any]] = []
    errors: list[Exception] = []
    for job in jobs:
        try:
            documents.append(train_run(job, session.console))
        except KeyboardInterrupt:
            is_sweep = job.run.command == "train" and len(jobs) > 1
            if is_sweep and (each or "name" in session.given):
                session.console.note("the same command again resumes this sweep")
            raise
        except Exception as error:  # reported at the end, when the others have finished
            if alone or processes.world_size > 1:  # the other processes may wait for this one
                raise
            traceback.clear_frames(error.__traceback__)  # which hold the run's tensors
            errors.append(error.within(job.name) if isinstance(error, SaeError) else error)
    if processes.is_main:
        _draw_curves([Path(document["path"]) for document in documents])
    shown: list[Any] = []
    folder, where = (first.folder, "there") if alone else (first.folder.parent, "in each")
    if documents:  # else all have failed
        shown = [
            results_table(documents, [*first.varied]),
            *compared_tables(documents),
            figures_table(documents),
            f"saved in {folder}; loss.png {where} has its curves",
        ]
    session.console.print_result(documents[0] if alone else {"runs": documents}, *shown)
    for failure in errors[:-1]:
        session.console.note(str(failure))
    if errors:
        raise errors[-1]


def _draw_curves(folders: Sequence[Path]) -> None:
    from ..show.pictures import draw_losses  # matplotlib takes a second to import
    from ..train.runs import read_metrics

    for folder in folders:
        draw_losses(folder / "loss.png", folder.name, read_metrics(folder))


def _stores_of_each(session: Session) -> list[tuple[Sequence[str], str | None]]:
    """For each training the names of its stores, and of its target."""
    from ..store.opening import paired

    data, target = session.options["data"] or [], session.options["target"]
    if not session.options["each"] or session.options["model"]:
        return [(data, target)]
    if not data:
        raise ConfigError(
            "--each needs the names of stores, got none; name them, such as --data 'mlp-*'"
        )
    names = session.home.stores.matching(data)
    if target is None:
        return [([name], None) for name in names]
    targets = session.home.stores.matching([target])
    return [([own], its_target) for own, its_target in paired(session.home, names, targets)]


def _rows(
    session: Session,
    options: Sequence[Given],
    names: tuple[Sequence[str], str | None],
    claims: ExitStack,
    from_sae: bool,
) -> tuple[Joined | Streamed, RowsOf]:
    """The stores of these names, inputs and target, or a model, stopped when `claims` closes, and the parts of their
    rows; `from_sae` if training begins from an SAE."""
    from ..store.opening import open_joined
    from ..train.plan import split_rows

    processes, values = communicator(), options[0].values
    if "model" in values:
        refuse_idle(
            session.given & {"data", "each", "target", "fraction", "checkpoint_every"},
            f"with --model {values['model']}, whose rows are not stored; store them by `sae extract`, or leave it out",
        )
        if len(options) > 1:
            raise ConfigError(
                "--model gives its rows once, to one run: expected one value of each option, got "
                f"{len(options)} combinations; train on a store made by `sae extract`"
            )
        if processes.world_size > 1:
            raise ConfigError(
                f"--model goes with one process, got {processes.world_size}; run it without torchrun, or "
                "train on a store made by `sae extract`"
            )
        return _rows_of_model(session, values, claims, from_sae)
    idle = session.given & {option.name for option in FROM_MODEL}
    refuse_idle(idle, "without --model; name a model, or leave it out")
    stores = processes.main_first(lambda: open_joined(session.home, *names, session.console))
    for store in stores.all:
        checked_name(store.name, "the name of the store's folder")
    return stores, lambda training, activation: split_rows(training, stores, from_sae, activation)


def _rows_of_model(
    session: Session, options: Mapping[str, Any], claims: ExitStack, from_sae: bool
) -> tuple[Streamed, RowsOf]:
    from ..extract.extraction import open_stream
    from ..extract.plan import Selection
    from ..train.live import LiveRows
    from ..train.plan import SplitRows
    from ..train.rows import SAMPLED_ROWS

    training = TrainingConfig.among(options)
    places = [options.get(name, (None,)) for name in PLACE]
    for name, values in zip(PLACE, places, strict=True):
        if len(values) > 1 or values == ("all",):
            raise ConfigError(
                f"{flag_of(name)} takes one value in sae train, got {', '.join(map(str, values))}; name one, or "
                "train with --each on stores made by `sae extract`"
            )
    layer, site = place_given(*(values[0] for values in places))
    names = [option.name for option in FROM_MODEL if option.name not in PLACE]
    extraction = ExtractConfig(**{name: options[name] for name in names if name in options})
    stream, _ = open_stream(
        extraction,
        given=options.keys(),
        selection=Selection.at(layer, site or "resid_post"),
        device=training.device,
        home=session.home,
        listener=session.console,
    )
    rows = claims.enter_context(
        LiveRows(
            stream,
            extraction.rows,
            training.split_seed,
            SAMPLED_ROWS + training.batch_size,
            session.console,
            from_sae=from_sae,
        )
    )
    fraction = TRAINED if from_sae else 1.0
    return stream, lambda *_: SplitRows(rows, rows.test_rows, rows.kept_out, fraction)
