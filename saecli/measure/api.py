"""saecli from Python: open stores, and fit SAEs.

`saecli/__init__.py` exports these functions, and imports them on first use. Options have the names, meanings and checks
of the command line's; see `sae train --help`.

Shapes: N rows, D = d_in, F = d_sae.
"""

from pathlib import Path
from typing import Any

from ..base.console import listening
from ..base.errors import ConfigError, did_you_mean, flag_of
from ..base.home import Home
from ..base.options import choose, options_of
from ..base.other_names import in_place_of
from ..sae.activations import ACTIVATIONS
from ..sae.dictionary import SAE
from ..sae.library import origin_of
from ..store.joined import Joined, JoinedRows
from ..store.opening import found_store
from ..store.reader import ActivationStore
from ..store.rows import Rows
from ..train.array_rows import ArrayLike, ArrayRows
from ..train.config import TrainingConfig
from ..train.loop import Loop
from ..train.plan import Plan
from ..train.solvers import SOLVERS
from ..train.starting import Start
from ..train.trainer import Record, Trainer

# Training options on files, and on the choice of a store's rows.
OF_FOLDERS, OF_SPLITS = ("keep_every", "log_to"), ("fraction", "split_seed")


def open_store(store: str | Path | None = None, home: str | Path | None = None) -> ActivationStore:
    """Open an activation store.

    Args:
        store: its name in the home, else its folder; None for the newest.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.

    Returns:
        The store. `store.split("train" | "test" | "all")` chooses rows as the commands do; their
        `batches(B, seed=, epoch=)` and `sequential(B)` yield float32 arrays (B, D), each valid until the next.

    Raises:
        StoreError: there is none, or its `store.json` is damaged.
    """
    return found_store(Home.at(home), None if store is None else str(store))


def join(*inputs: ActivationStore | str | Path, target: ActivationStore | str | Path | None = None) -> Joined:
    """Stores of the same tokens side by side, for a crosscoder, or with a target, for a transcoder.

    Args:
        *inputs: at least one, or its name in the home or its folder; their rows are read side by side.
        target: what is predicted from them; None for the inputs themselves.

    Returns:
        What `fit` and `evaluate` take; its `split` gives batches (B, D + E) of the inputs and the target, side by side.

    Raises:
        ConfigError: they are not row for row the same tokens, or none.
        StoreError: one is missing.
    """
    if not inputs:
        raise ConfigError("join takes stores: expected at least one, got none; give join(first, second)")
    joined = Joined(tuple(_store(one) for one in inputs), None if target is None else _store(target))
    joined.demand_alike()
    return joined


def _store(one: ActivationStore | str | Path) -> ActivationStore:
    """A store given itself or by its name."""
    if isinstance(one, ActivationStore):
        return one
    if isinstance(one, str | Path):
        return open_store(one)
    raise ConfigError(f"expected a store or its name, got a {type(one).__name__}; give each by itself, join(first, "
                      "second)")


def fit(rows: str | Path | ActivationStore | Joined | Rows | JoinedRows | ArrayLike, *,
        target: ArrayLike | None = None, solver: str = "pam-sgd", act: str | None = None,
        init: SAE | str | Path | None = None, progress: bool = False, **options: Any) -> SAE:
    """Train an SAE, and write no files.

    The loss per row is `||x_hat - x||^2 + sparsity_weight * penalty`, with rows normalised to a mean squared norm of D.
    PAM-SGD alternates descent on the encoder with the decoder's closed-form optimum; see `saecli/train/pam_sgd.py`.

    Args:
        rows: a store or its name, on whose training rows it returns bit for bit the SAE that `sae train` writes; rows
            chosen from one (`store.split("all")`); or raw activations in memory, (N, D), a tensor or an array, all of
            which are trained on, uniformly shuffled.
        solver: pam-sgd or sgd.
        act: the activation: relu, jumprelu, topk, relu-topk, abs-topk, batchtopk, swish or soft-topk; None for that
            of `init`, or relu.
        target: with rows in memory, what is predicted from them, (N, E), for a transcoder; stores take `join`.
        init: an SAE to start from instead of random directions, or whatever `load_sae` takes; `d_sae` is its own, and
            so are `prefixes`, and with its activation `k`, unless given.
        progress: show progress on stderr, and the solver's notes at the end.
        **options: the training options of `sae train`: `d_sae` (F; 4 D by default), `k`, `epochs`, `lr`,
            `sparsity_weight`, `seed`, `device` and so on.

    Returns:
        The SAE, acting on raw activations, on the device that it was trained on.

    Raises:
        ConfigError: an option that is unknown, invalid, or does nothing with the others.
        StoreError: a shard is missing or damaged.
        RunError, FormatError, HubError: `init` is missing or cannot be read.
        TrainingError: it diverged.

    Source: the paper "SplInterp: Improving our Understanding and Training of Sparse Autoencoders", Algorithm 3.1.
    """
    if isinstance(rows, str | Path):
        rows = open_store(rows)
    start = None if init is None else Start.open(Home.at(None), init, listening(progress))
    act = act or (start.sae.activation.name if start else "relu")
    trainer = Trainer(_planned(rows, target, solver, act, options, start), Record())
    listener = listening(progress)
    with listener.progress("training", trainer.steps, "steps") as trainer.show:
        (sae,) = Loop([trainer]).train()
    for note in trainer.solver.notes():
        listener.note(note)
    sae.metadata = trainer.plan.settings() | _origin(rows, trainer.plan.training)
    return sae


def _origin(rows: ActivationStore | Joined | Rows | JoinedRows | ArrayLike, training: TrainingConfig) -> dict[str, Any]:
    """Where rows come from, as of `origin_of`; nothing of rows in memory."""
    if isinstance(rows, ActivationStore | Joined):
        stores = rows if isinstance(rows, Joined) else Joined((rows,))
        return origin_of(stores, training.split_seed, training.fraction)
    if isinstance(rows, Rows | JoinedRows):
        first, stores = (rows, Joined((rows.store,))) if isinstance(rows, Rows) else (rows.inputs[0], rows.stores)
        return origin_of(stores, first.split.seed, first.split.fraction)
    return {}


def _planned(rows: ActivationStore | Joined | Rows | JoinedRows | ArrayLike, target: ArrayLike | None, solver: str,
             act: str, options: dict[str, Any], start: Start | None = None) -> Plan:
    of_store = isinstance(rows, ActivationStore | Joined)
    if target is not None and isinstance(rows, ActivationStore | Joined | Rows | JoinedRows):
        raise ConfigError("--target goes with rows in memory; give fit the stores as one, by `saecli.join(store, "
                          "target=other)`", option="target")
    known = {name for config in (TrainingConfig, *SOLVERS.values(), *ACTIVATIONS.values())
             for name in options_of(config)}
    idle = dict.fromkeys(OF_FOLDERS, ", which writes no files")
    if not of_store:
        idle |= dict.fromkeys(OF_SPLITS, " with rows that are chosen already")
    for name in options:
        if name not in known:
            taken = {*known, "solver", "act"}
            advice = in_place_of(name, taken) or did_you_mean(name, taken) or "expected one of `sae train`'s"
            raise ConfigError(f"fit has no option {name}; {advice}")
        if name in idle:
            raise ConfigError(f"{flag_of(name)} does nothing in fit{idle[name]}; leave it out", option=name)
    training = TrainingConfig(**{name: options[name] for name in options_of(TrainingConfig) if name in options})
    chosen = choose(SOLVERS, "solver", solver, options, options.keys())
    settings = (start.settings(act) if start else {}) | options
    activation = choose(ACTIVATIONS, "act", act, settings, settings.keys())
    if of_store:
        rows = training.rows_of(rows)
    elif not isinstance(rows, Rows | JoinedRows):
        rows = ArrayRows(rows, target)
    return Plan.resolved(rows, None, training, chosen, activation, start)
