"""What to train, every setting resolved; and warnings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from ..base.devices import demand_precision, device_named, free_memory, multiplies_bf16
from ..base.errors import ConfigError, StoreError
from ..base.processes import Communicator, local_world
from ..base.words import counted, does_nothing, number, refuse_idle
from ..sae.activations import Activation, KeepsK
from ..sae.metrics import doubts
from ..store.opening import Joined
from ..store.reader import ActivationStore, JoinedRows, Rows, RowSource
from . import ridge
from .moments import sampled_bytes
from .options import (
    DEFAULT_STEPS,
    EXPANSION,
    MOST_DEFAULT_EPOCHS,
    PENALTY_WARM_UP,
    SMALLEST,
    TRAINED,
    WIDEST,
    ClosedForm,
    Normalize,
    Precision,
    SolverConfig,
    TrainingConfig,
)
from .rows import BLOCK_ROWS
from .start import Start

OVERFITTED = 1.3  # held-out FVU over that of training rows
ENOUGH_DOCUMENTS = 5  # held out, to measure on
NONE_KEPT_OUT = (
    "documents are too few to keep any out of training: thresholds are set, and SAEs compared, on training rows, "
    "where L0 is lower than on others; use a store of more documents, or another --split-seed"
)
STORE = "make a store of them by `sae extract`, and train on that"  # advice on rows that come once


@dataclass(frozen=True)
class SplitRows:
    """Rows to train on, to measure on, and kept out, to compare SAEs or set thresholds on; `fraction` of the training
    rows are trained on."""

    train: RowSource
    test: RowSource | None = None
    kept_out: RowSource | None = None
    fraction: float = 1.0


def split_rows(
    training: TrainingConfig,
    store: ActivationStore | Joined,
    from_sae: bool,
    activation: Activation,
) -> SplitRows:
    """The parts of a store; `from_sae`: training begins from an SAE."""
    seed, fraction = training.split_seed, training.fraction
    test = store.split("test", seed=seed)
    if not from_sae and not activation.is_calibrated(training.sparsity):
        return SplitRows(store.split("train", fraction=fraction, seed=seed), test, None, fraction)
    fraction = min(fraction, TRAINED)
    train, kept_out = split_kept_out(store, seed, fraction)
    return SplitRows(train, test, kept_out, fraction)


def split_kept_out(
    store: ActivationStore | Joined, seed: int, fraction: float = TRAINED
) -> tuple[Rows | JoinedRows, Rows | JoinedRows | None]:
    """A fraction of the training documents' rows, and rows after the first `TRAINED`; None if documents are too few."""
    train = store.split("train", fraction=fraction, seed=seed)
    try:
        return train, store.split("train", fraction=TRAINED, seed=seed, rest=True)
    except StoreError:
        return train, None


@dataclass(frozen=True)
class Plan:
    """What to train, every setting resolved."""

    train_rows: RowSource
    test_rows: RowSource | None
    training: TrainingConfig
    solver: SolverConfig
    activation: Activation
    start: Start | None = None  # None for random directions
    fixed: str | None = None  # see `Task`
    kept_out: RowSource | None = None  # to compare SAEs and set thresholds on, else training rows
    kept_scale: Tensor | None = None  # see `Normalisation.kept`
    epoch_steps: int | None = None  # between measures of test rows; None for a pass over all rows

    @classmethod
    def resolve(
        cls,
        train_rows: RowSource,
        test_rows: RowSource | None,
        training: TrainingConfig,
        solver: SolverConfig,
        activation: Activation,
        start: Start | None = None,
        kept_out: RowSource | None = None,
    ) -> Self:
        """Every default filled in; ConfigError if settings contradict each other, or do nothing together."""
        if training.skip and not train_rows.d_target:
            refuse_idle(
                ["skip"], "without --target; leave it out, or name the store that is predicted"
            )
        if start is not None:
            training, activation = start.inherit(training, activation, train_rows)
        if train_rows.passes == 1 and training.epochs is None and training.steps is None:
            training = replace(training, epochs=1)
        if training.smoothing == "auto" and not solver.smooths:
            training = replace(training, smoothing=0.0)
        training = fill_defaults(training, activation, train_rows.rows, train_rows.d_in)
        if training.normalize == "auto":
            chosen: Normalize = "model" if train_rows.reads is not None else "scale"
            if start is not None and start.reads is not None:
                chosen = "init"
            training = replace(training, normalize=chosen)
        if training.normalize == "model" and train_rows.reads is None:
            raise ConfigError(
                "--normalize model needs weights of the model's later norms, which a store of a residual stream has; "
                "use --normalize scale"
            )
        solver.check(training, train_rows)
        activation = activation.resolved(str(training.sparsity), int(training.d_sae or 0))
        plan = cls(train_rows, test_rows, training, solver, activation, start, kept_out=kept_out)
        if train_rows.passes == 1:
            plan._demand_one_pass()
        return plan

    def _demand_one_pass(self) -> None:
        epochs, steps, most = self.training.epochs, self.training.steps, self.batches
        if (epochs or 1) > 1:
            raise ConfigError(
                f"--epochs must be 1 with --model, whose rows come once, got {epochs}; {STORE}"
            )
        if (steps or 0) > most:
            raise ConfigError(
                f"--steps must be at most {most} with --model's rows, got {steps}; raise --rows, or {STORE}"
            )

    @cached_property  # cached: a text that ends early changes `rows`
    def batches(self) -> int:
        return self.epoch_steps or self.training.epoch_batches(self.train_rows.rows)

    @cached_property
    def steps(self) -> int:
        return self.training.steps or (self.training.epochs or 0) * self.batches

    @cached_property
    def epochs(self) -> int:
        """Passes over the rows; the last may be partial."""
        return math.ceil(self.steps / self.batches)

    @property
    def d_sae(self) -> int:
        assert self.training.d_sae is not None, "resolved"
        return self.training.d_sae

    @property
    def k(self) -> int:
        """0 for activations without."""
        return self.activation.k if isinstance(self.activation, KeepsK) else 0

    @property
    def is_dense(self) -> bool:
        """Whether k reaches the number of latents or dimensions."""
        return self.k >= min(self.train_rows.d_in, self.d_sae)

    def settings(self) -> dict[str, Any]:
        start = {} if self.start is None else {"init": self.start.name}
        return {
            "solver": self.solver.name,
            "act": self.activation.name,
            **start,
            **self.training.to_json(),
            **self.solver.to_json(),
            **self.activation.to_json(),
        }


def fill_defaults(
    training: TrainingConfig, activation: Activation, rows: int, d_in: int
) -> TrainingConfig:
    """The options with the defaults that depend on data or activation filled in; idempotent."""
    if training.epochs is not None and training.steps is not None:
        raise ConfigError("cannot use both --epochs and --steps at the same time; use one of them")
    training = replace(training, batch_size=min(training.batch_size, rows))
    d_sae = training.latents(d_in)
    activation.check(d_sae)
    if training.k_start is not None:
        _check_k_start(training.k_start, activation, d_sae)
    training = _fill_sparsity(training, activation, d_in)
    if not training.steps:
        wanted = math.ceil(DEFAULT_STEPS / training.epoch_batches(rows))
        epochs = training.epochs or min(MOST_DEFAULT_EPOCHS, wanted)
        training = replace(training, epochs=epochs)
    if training.smoothing == "auto":
        training = replace(training, smoothing=default_width(rows, d_in, d_sae))
    return replace(
        training,
        d_sae=d_sae,
        prefixes=_prefixes(training.prefixes, d_sae),
        precision=_precision(training, d_in * d_sae),
    )


def _check_k_start(k_start: int, activation: Activation, d_sae: int) -> None:
    if not isinstance(activation, KeepsK):
        advice = "leave it out, or use an activation with --k"
        raise does_nothing("k_start", f"with --act {activation.name}; {advice}")
    if not activation.k <= k_start <= d_sae:
        raise ConfigError(
            f"--k-start must be from --k, {activation.k}, to --d-sae, {d_sae}, got {k_start}; change one of them"
        )


def _fill_sparsity(training: TrainingConfig, activation: Activation, d_in: int) -> TrainingConfig:
    sparsity = activation.default_sparsity if training.sparsity is None else training.sparsity
    activation.check_sparsity(sparsity)
    weight, warm_up = training.sparsity_weight, training.sparsity_warm_up
    given = {
        "--sparsity-weight": bool(weight),
        "--sparsity-warm-up": warm_up not in (None, PENALTY_WARM_UP),
    }
    for option, is_given in given.items():
        if sparsity == "none" and is_given:
            names = ", ".join(name for name in activation.penalties() if name != "none")
            penalised = f"name a penalty ({names})" if training.sparsity else "use --act relu"
            raise ConfigError(
                f"{option} does nothing with --act {activation.name} and --sparsity none; leave it out, or {penalised}"
            )
    if weight is None:
        weight = activation.penalty(sparsity).default_weight(d_in)
    return replace(
        training,
        sparsity=sparsity,
        sparsity_weight=weight,
        sparsity_warm_up=PENALTY_WARM_UP if warm_up is None else warm_up,
    )


def _prefixes(prefixes: str | None, d_sae: int) -> str | None:
    if prefixes is None:
        return None
    if prefixes == "auto":
        numbers = [math.ceil(d_sae / ratio) for ratio in (16, 4, 2)]
    else:
        numbers = [int(word) for word in prefixes.split(",")]
    if max(numbers) > d_sae:
        raise ConfigError(f"--prefixes must be at most --d-sae, {d_sae}, got {max(numbers)}")
    return ",".join(str(number) for number in sorted({*numbers, d_sae}))


def _precision(training: TrainingConfig, weights: int) -> Precision:
    if training.precision == "auto":
        if training.dtype == "float64" or weights < SMALLEST:
            return "float32"
        return "bf16" if multiplies_bf16(device_named(training.device)) else "float32"
    if training.dtype == "float64" and training.precision != "float32":
        raise ConfigError(
            f"--precision {training.precision} cannot be used with --dtype float64; leave it out"
        )
    return training.precision


def demand_machine(plan: Plan, communicator: Communicator) -> int:
    """The bytes free for a decoder step; ConfigError if it needs more, if the device lacks the precision, or if a batch
    has fewer rows than there are processes."""
    training, solver, rows, d_sae = plan.training, plan.solver, plan.train_rows, plan.d_sae
    device = device_named(training.device)
    demand_precision(training.precision, device)
    if training.batch_size < communicator.world_size:
        raise ConfigError(
            f"--batch-size must be at least {communicator.world_size}, the processes, got {training.batch_size}"
        )
    width = max(rows.d_in, rows.d_target)
    weights = 9 * 4 * d_sae * width  # three matrices; of two a gradient and two vectors of Adam
    batch = 3 * 4 * d_sae * max(training.batch_size, BLOCK_ROWS)  # codes, their gradients, a copy
    free = free_memory(device, local_world() if communicator.world_size > 1 else 1)
    least_free = communicator.all_reduce(torch.tensor([free], dtype=torch.float64), "min")
    free = int(least_free.item()) - weights - batch - sampled_bytes(rows.rows, width, d_sae)
    if isinstance(solver, ClosedForm):
        needed = ridge.method_for(
            rows.rows, d_sae, width, free, solver.solve, training.nested
        ).bytes
        if needed > free:
            raise ConfigError(
                f"--solver {solver.name} with --d-sae {d_sae} needs {needed / 2**30:.1f} GiB for a decoder step, "
                f"{max(free, 0) / 2**30:.1f} GiB are free; use a smaller --d-sae, or --solver sgd"
            )
    return free


def doubts_at_start(plan: Plan) -> list[str]:
    rows, d_in, d_sae, k = plan.train_rows.rows, plan.train_rows.d_in, plan.d_sae, plan.k
    warnings = []
    if rows < d_in:
        warnings.append(
            f"there are fewer training rows, {rows:,}, than dimensions, {d_in:,}: if the array has a column per row, "
            "import it with --transpose, in Python rows.T; else train on more rows"
        )
    documents = few_documents(plan.test_rows)
    if plan.test_rows is not None and documents:
        warnings.append(
            f"test rows, {plan.test_rows.rows:,}, are of {counted(documents, 'document')}: their FVU and L0 are "
            "noisy; use a store of more documents to compare runs by"
        )
    keeps_out = plan.start is not None or plan.activation.is_calibrated(plan.training.sparsity)
    if keeps_out and plan.kept_out is None and plan.training.fraction <= TRAINED:
        warnings.append(NONE_KEPT_OUT)
    if plan.is_dense:
        words = f"is all of d_sae, {d_sae}" if k == d_sae else f"is not below d_in, {d_in}"
        warnings.append(f"--k {k} {words}, so codes are not sparse; lower --k")
    if k and plan.training.sparsity != "none":
        warnings.append(
            f"--act {plan.activation.name} keeps {k} latents per row whatever --sparsity {plan.training.sparsity} "
            "weighs; use --sparsity none, or for an L0 that the penalty sets --act relu"
        )
    return warnings


def few_documents(rows: RowSource | None) -> int:
    """The documents of stored rows, if fewer than `ENOUGH_DOCUMENTS`; else, or if unknown, 0."""
    documents: set[int] = set()
    if rows is not None and rows.inputs and "document" in rows.inputs[0].store.meta.columns:
        for numbers in rows.inputs[0].column("document", BLOCK_ROWS):
            documents.update(numbers.tolist())
            if len(documents) >= ENOUGH_DOCUMENTS:
                return 0
    return len(documents)


def doubts_at_end(plan: Plan, train: Mapping[str, Any], test: Mapping[str, Any]) -> list[str]:
    """Warnings on measures of held-out rows, or of training rows if held-out ones do not vary."""
    which, measures = ("held-out", test) if math.isfinite(test["fvu"]) else ("train", train)
    has_penalty = plan.training.sparsity != "none"
    if measures["l0"] < 1 and has_penalty:
        for_fvu = "fewer than one latent is active per row: lower --sparsity-weight"
    elif train["fvu"] <= 1:
        for_fvu = "train FVU is not: lower --d-sae, or train on more rows"
    else:
        for_fvu = "lower --lr" + (" or --sparsity-weight" if has_penalty else "")
    for_l0 = "raise --sparsity-weight" if has_penalty else "use --sparsity l1"
    advice = {"fvu": for_fvu, "l0": "lower --k" if plan.k else for_l0}
    doubted = doubts(measures, plan.train_rows.d_in, plan.d_sae)
    if plan.is_dense:  # which is said at the start
        doubted.pop("l0", None)
    warnings = [f"{which} {words}; {advice[name]}" for name, words in doubted.items()]
    overfitted = test["fvu"] > OVERFITTED * train["fvu"]
    if overfitted and "fvu" not in doubted:
        fewer = "fewer --epochs or " if plan.epochs > 1 else ""
        warnings.append(
            f"held-out FVU {number(test['fvu'])} is far above training rows' {number(train['fvu'])}, after "
            f"{counted(plan.epochs, 'epoch')}; make a store of more rows, or use {fewer}a smaller --d-sae"
        )
    return [*plan.train_rows.warnings, *warnings]


def default_width(rows: int, d_in: int, d_sae: int) -> float:
    """`WIDEST` for up to max(d_sae, 4 d_in) rows, then falling as 1 / sqrt(rows), as overfitting does."""
    return WIDEST * min(1.0, math.sqrt(max(d_sae, EXPANSION * d_in) / rows))
