"""Training from Python: `saecli.open_store`, `join` and `fit`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.console import listening
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.options import Config, choose, demand_known, options_of
from ..base.words import flag_of
from ..sae.activations import ACTIVATIONS, Activation, KeepsK
from ..sae.dictionary import SAE
from ..store.opening import Joined, find_store, warn_of
from ..store.origin import Origin
from ..store.reader import ActivationStore, JoinedRows, Rows, StoredRows
from . import SOLVERS
from .options import DEFAULT_ACT, TrainingConfig
from .plan import Plan, SplitRows, doubts_at_start, split_rows
from .rows import ArrayLike, ArrayRows
from .start import Start
from .training import Record, start_training

# Training options on files, and on the choice of a store's rows.
OF_FOLDERS, OF_SPLITS = ("checkpoint_every", "log_to"), ("fraction", "split_seed")
Stored = ActivationStore | Joined | Rows | JoinedRows
Fitted = Stored | ArrayLike
RowsOf = Callable[[TrainingConfig, Activation], SplitRows]


def open_store(store: str | Path | None = None, home: str | Path | None = None) -> ActivationStore:
    """Open an activation store, by its name in the home ($SAE_HOME, else ./sae-data) or its folder; None: the newest.

    `store.split("train" | "test" | "all")` chooses rows; their `batches(B, seed=, epoch=)` and `sequential(B)` yield
    float32 arrays, (B, d_in).
    """
    return find_store(Home.at(home), None if store is None else str(store))


def join(
    *inputs: ActivationStore | str | Path, target: ActivationStore | str | Path | None = None
) -> Joined:
    """Stores of the same tokens side by side, for a crosscoder, or with a target, for a transcoder.

    Each is a store, its name in the home, or its folder. Batches of the result's `split` are (B, d_in + d_target).
    ConfigError if they are not row for row the same tokens.
    """
    if not inputs:
        raise ConfigError(
            "join takes stores: expected at least one, got none; give join(first, second)"
        )
    stores = tuple(_store(store) for store in inputs)
    joined = Joined(stores, None if target is None else _store(target))
    joined.demand_alike()
    return joined


def _store(store: ActivationStore | str | Path) -> ActivationStore:
    if isinstance(store, ActivationStore):
        return store
    if isinstance(store, str | Path):
        return open_store(store)
    raise ConfigError(
        f"expected a store or its name, got a {type(store).__name__}; give each by itself, join(first, second)"
    )


def fit(
    rows: str | Path | Fitted,
    *,
    target: ArrayLike | None = None,
    solver: str = "pam-sgd",
    act: str | None = None,
    init: SAE | str | Path | None = None,
    progress: bool = False,
    **options: Any,
) -> SAE:
    """Train an SAE, and write no files.

    The loss per row is `||x_hat - x||^2 + sparsity_weight * penalty`, with rows normalised to a mean squared norm of D.

    Args:
        rows: a store or its name, for bit for bit the SAE of `sae train`; rows of one (`store.split("all")`); or raw
            activations in memory, (N, D), all trained on.
        act: relu, jumprelu, gated, topk, relu-topk, abs-topk, batchtopk or matching-pursuit; None for that of
            `init`, or batchtopk.
        target: a transcoder's targets, (N, E), of rows in memory; stores take `join`.
        init: an SAE to train on, or whatever `load_sae` takes; `d_sae`, `prefixes`, and with its activation `k` are
            inherited. Returned as it was if its loss did not fall on a tenth of a store's training documents, kept out
            of training (on all rows, if these are chosen or in memory).
        **options: those of `sae train`: `d_sae` (4 D by default), `k` (32), `epochs`, `lr`, `sparsity_weight`, `seed`,
            `device` and so on.

    Returns the SAE, acting on raw activations, on the device of its training; TrainingError if it diverged.

    Source: the paper "SplInterp: Improving our Understanding and Training of Sparse Autoencoders", Algorithm 3.1.
    """
    if isinstance(rows, str | Path):
        rows = open_store(rows)
    if isinstance(rows, ActivationStore):
        rows = Joined((rows,))
    listener = listening(progress)
    start = None if init is None else Start.open(Home.at(None), init, listener)
    act = act or (DEFAULT_ACT if start is None else start.activation)
    plan = planned(rows, solver, act, options, target=target, start=start)
    if isinstance(rows, StoredRows | Joined):
        for store in Joined.of(rows).all:
            warn_of(store, listener)
    for warning in doubts_at_start(plan):
        listener.warn(warning)
    with listener.progress("training", plan.steps, "steps") as show:
        training = start_training(plan, Record(), show)
        sae = training.train()
    for warning in training.notes():
        listener.warn(warning)
    sae.metadata = plan.settings() | _origin(rows, plan.training).to_json()
    if target is not None:
        sae.metadata["transcodes"] = True
    return sae


def _origin(rows: Fitted, training: TrainingConfig) -> Origin:
    if isinstance(rows, Joined):
        return rows.origin.trained(training.split_seed, training.fraction)
    if isinstance(rows, Rows | JoinedRows):
        split = rows.inputs[0].split
        return Joined.of(rows).origin.trained(split.seed, split.fraction)
    return Origin()


def planned(
    rows: Fitted,
    solver: str,
    act: str,
    options: Mapping[str, Any],
    *,
    target: ArrayLike | None = None,
    start: Start | None = None,
) -> Plan:
    """The plan of `fit`; ConfigError for an option that is unknown, invalid or does nothing."""
    if target is not None and isinstance(rows, Stored):
        raise ConfigError(
            "--target goes with rows in memory; join stores by `saecli.join(store, target=other)`"
        )
    configs: list[type[Config]] = [TrainingConfig, *SOLVERS.values(), *ACTIVATIONS.values()]
    known = {name for config in configs for name in options_of(config)}
    idle = dict.fromkeys(OF_FOLDERS, ", which writes no files")
    if not isinstance(rows, ActivationStore | Joined):
        idle |= dict.fromkeys(OF_SPLITS, " with rows that are chosen already")
    demand_known("fit", options, {*known, "solver", "act"}, "train")
    for name in options:
        if name in idle:
            raise ConfigError(f"{flag_of(name)} does nothing in fit{idle[name]}; leave it out")

    def rows_of(training: TrainingConfig, activation: Activation) -> SplitRows:
        if isinstance(rows, ActivationStore | Joined):
            return replace(split_rows(training, rows, start is not None, activation), test=None)
        if isinstance(rows, Rows | JoinedRows):
            return SplitRows(rows)
        return SplitRows(ArrayRows(rows, target))

    return make_plan(rows_of, solver, act, options, start)


def make_plan(
    rows_of: RowsOf, solver: str, act: str, options: Mapping[str, Any], start: Start | None
) -> Plan:
    """The plan of a training; what the options leave open is inherited from `start`, or by default."""
    settings = {**(start.settings(act, options) if start else {}), **options}
    training = TrainingConfig.among(settings)
    activation = choose(ACTIVATIONS, "act", act, settings)
    rows = rows_of(training, activation)
    if isinstance(activation, KeepsK) and "k" not in settings:
        activation = activation.with_default_k(rows.train.d_in, training.latents(rows.train.d_in))
    if training.normalize == "init" and (start is None or start.reads is None):
        raise ConfigError(
            "--normalize init needs an --init whose file has the metric of its training; use auto"
        )
    return Plan.resolve(
        rows.train,
        rows.test,
        replace(training, fraction=rows.fraction),
        choose(SOLVERS, "solver", solver, settings),
        activation,
        start,
        rows.kept_out,
    )
