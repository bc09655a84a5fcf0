"""Baselines: a run's training with one ingredient removed.

    fixed encoder     W_enc stays random; biases, thresholds and decoder are trained, by the run's own solver
    fixed decoder     W_dec stays random; encoder and biases are trained, by descent
    shuffled rows     the run's training on its rows with each dimension permuted by itself
    random weights    the run's training on the activations of its model with weights drawn anew, at the same tokens

Fixed weights are the run's at the start: unit directions for the encoder, times one number fitted to the rows, and a
decoder W_enc' B, B the identity or, for a transcoder, the regression of the targets on the rows. No latent is
revived there, since that would aim it at rows.

Stability alone does not set a run apart: the dimensions of shuffled rows are independent, and unless normal they are
features that every seed finds (in a world of 64 known features: PW-MCC 0.95, the run's 0.86).

Sources: Korznikov et al., "Sanity Checks for Sparse Autoencoders: Do SAEs Beat Random Baselines?", arXiv:2602.14111
(fixed encoder and decoder); Heap et al., "Sparse Autoencoders Can Interpret Randomly Initialized Transformers",
arXiv:2501.17727 (random weights; shuffled rows are a simpler relative of its controls).

Shapes: N rows, T tokens, D = d_in, E the width of targets; 0 without.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.documents import read_run
from ..base.errors import (
    ConfigError,
    MachineError,
    RunError,
    TrainingError,
    counted,
    demand_at_least,
    size_words,
)
from ..base.home import KEPT, Home
from ..base.machine import available_memory
from ..extract.options import at_revisions
from ..extract.splice import spec_of, stored_activations, stored_windows
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import open_sae
from ..sae.metrics import reconstruction
from ..store.reader import RowSource
from ..train import SOLVERS
from ..train.loop import Loop, Record, start_training
from ..train.options import Sgd, SolverConfig
from ..train.plan import Plan
from ..train.rows import CHECKED_ROWS, ArrayRows, raw_batches
from ..train.runs import run_again
from .evaluate import check_model, check_tokens_of_model, evaluated
from .measured import Measured
from .stability import matching

if TYPE_CHECKING:
    from ..extract.language_model import LanguageModel

SEEDS = 2  # trainings of the run and of each control
MEASURES = ("fvu", "l0", "dead_fraction", "mcc", "f1", "ce_recovered", "kl", "stability")
FIXED = {"fixed encoder": "W_enc", "fixed decoder": "W_dec"}
SHUFFLED, RANDOM = "shuffled rows", "random weights"
USED = 0.5  # fraction of the free memory that a control's rows may take


def controls(
    run: str | Path | None = None,
    *,
    model: str | None = None,
    model_revision: str | None = None,
    tokens: int | None = None,
    seeds: int = SEEDS,
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Train and measure the baselines of a run; CLI equivalent: `sae controls`. No files are written.

    Args:
        run: name of a finished run of `sae train`; None for the newest run.
        model: hub id, folder or GGUF file of the language model that the rows came from, for the control with random
            weights, and for CE and KL of what acts on the run's own rows; not for a crosscoder of several models.
        model_revision: branch, tag or commit of a hub model; None for the one that the rows came from.
        tokens: held-out tokens that the model is run over, as in `evaluate`.
        seeds: trainings of each control, and of the run, at least 1. The first has the run's seed and is measured; the
            others are for `stability`.
        device, home, progress: as in `evaluate`.

    Returns:
        controls: a list, the run itself first. For each: `control`, its name, or "none"; `rows`, the number of held-out
            rows that it is measured on; `fvu`, `l0` and `dead_fraction`; with a world of known features `mcc` and, on
            the run's own rows, `f1`; with a model, on these, `ce_recovered` and `kl`; and `stability`, the mean PW-MCC
            over pairs of seeds (see `saecli.stability`). A measure that is not defined is None.
        notes: sentences on controls that are left out.

    Cost: `seeds` trainings of each of up to four controls and `seeds - 1` of the run. Shuffled rows and a random
    model's are in memory, 4 bytes per number; a control whose rows take more than half of the free memory is left out.
    """
    listener = listening(progress)
    check_tokens_of_model(tokens, model)
    models = at_revisions(model, model_revision)
    demand_at_least("seeds", seeds)
    one, plan = _original(Home.at(home), run, device, listener)
    if models is not None:
        if (
            len(
                named := dict.fromkeys(
                    str(spec_of(end.store.meta.source)) for end in one.rows.inputs
                )
            )
            > 1
        ):
            raise ConfigError(
                f"--model does nothing for {one.subject.name}, a crosscoder of {' and '.join(named)}: "
                "random weights are drawn for one model; leave it out"
            )
        ((_, source), *_) = check_model(one, models)
        model = source.spec
    first = plan.training.seed
    work = _Work(one, plan, range(first, first + seeds), listener, [])
    lines = work.on_own_rows(model, tokens) + work.on_shuffled_rows()
    if model is not None:
        lines += work.on_random_weights(model)
    return {
        "run": one.subject.name,
        "data": one.stores.name,
        "seeds": list(work.seeds),
        "controls": lines,
        "notes": work.notes,
    }


def _original(
    home: Home, name: str | Path | None, device: str, listener: Listener
) -> tuple[Measured, Plan]:
    """The run's SAE with its held-out rows, on the device, and its plan."""
    subject, saved = open_sae(home, name, listener)
    folder, expected = (
        subject.folder,
        f"{subject.name} has no controls: expected a finished run of `sae train`, got",
    )
    if folder is None or not (marker := folder / home.runs.marker).is_file():
        raise RunError(
            f"{expected} a folder with an SAE of unknown training; name a run, which `sae list` shows"
        )
    if folder.parent.name == KEPT:
        raise RunError(f"{expected} an epoch of one; name the run itself")
    if not subject.complete:
        raise RunError(
            f"{expected} an unfinished one; finish it by `sae train --resume --name {subject.name}`"
        )
    document = read_run(marker).settings
    if (solver := document["solver"].get("name")) not in SOLVERS:
        raise RunError(f"{expected} one of `sae {solver}`; name the run that it was made from")
    if "init" in document:
        raise RunError(
            f"{expected} one that began from {document['init']['name']}; name one without --init, which "
            "began from random directions"
        )
    plan = run_again(home, folder, document, listener, "make controls of").plan
    if plan.test_rows is None:
        raise RunError(f"{expected} one without held-out rows; train it anew")
    saved = SavedSAE(saved.sae.copy_to(device_named(device)), saved.origin)
    return (
        Measured(subject, saved, "test", plan.test_rows),
        replace(plan, training=replace(plan.training, device=device), test_rows=None),
    )


@dataclass(frozen=True, eq=False)
class _Trained:
    name: str  # of its control; `none` for the run itself
    sae: SAE  # acting on raw rows
    dead_fraction: float | None
    stability: float | None  # mean PW-MCC between the training's seeds; None with one seed

    def line(self, document: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: document.get(name) for name in MEASURES}
        return {
            "control": self.name,
            "rows": document["rows"],
            **found,
            "stability": self.stability,
        }


@dataclass(frozen=True)
class _Work:
    one: Measured  # the run's SAE and held-out rows
    plan: Plan  # of the run, without rows to measure after each epoch
    seeds: Sequence[int]  # of the trainings, the run's first
    listener: Listener
    notes: list[str]  # sentences on controls that are left out; grows

    def on_own_rows(self, model: str | None, tokens: int | None) -> list[dict[str, Any]]:
        one, run = self.one, self.one.subject
        saes = [one.sae]
        with self._noting(f"the stability of {run.name} is left out"):
            saes += self._saes(run.name, self.plan, self.seeds[1:])
        found = [_Trained("none", one.sae, run.dead_fraction, self._stability(run.name, saes))]
        if getattr(self.plan.solver, "tied", False):
            self.notes.append(
                "fixed encoder and fixed decoder are left out: weights are tied, so that to fix one is "
                "to fix both"
            )
        else:
            for name, held in FIXED.items():
                with self._noting(f"{name} is left out"):
                    solver = self.plan.solver
                    if held == "W_dec" and not isinstance(
                        solver, Sgd
                    ):  # to solve for the decoder is to train it
                        solver = Sgd(
                            **{
                                field.name: getattr(solver, field.name)
                                for field in fields(SolverConfig)
                            }
                        )
                    found.append(self._trained(name, replace(self.plan, solver=solver, held=held)))
        documents = evaluated(
            [self._measured(each, one.split, one.rows) for each in found],
            model,
            tokens,
            self.listener,
        )
        return [each.line(document) for each, document in zip(found, documents, strict=True)]

    def on_shuffled_rows(self) -> list[dict[str, Any]]:
        with self._noting(f"{SHUFFLED} are left out"):
            if self.one.rows.d_target:
                self.notes.append(
                    f"{SHUFFLED} are left out: a transcoder's targets would be independent of its rows"
                )
                return []
            demand_memory(self._all_rows)
            return [
                self._line(SHUFFLED, *(shuffled(rows, self.seeds[0]) for rows in self._all_rows))
            ]
        return []

    def on_random_weights(self, name: str) -> list[dict[str, Any]]:
        from ..extract.language_model import LanguageModel  # transformers takes seconds to import
        from ..extract.model_source import find_model

        with self._noting(f"{RANDOM} are left out"):
            demand_memory(self._all_rows)
            model = LanguageModel(
                find_model(name), self.one.sae.W_enc.device, weights_seed=self.seeds[0]
            )
            total, found = sum(rows.rows for rows in self._all_rows), list[ArrayRows]()
            with self.listener.progress(f"running {name} with {RANDOM}", total, "rows") as show:
                for rows in self._all_rows:
                    before = sum(each.rows for each in found)

                    def add(done: float, before: int = before) -> None:
                        show(before + done)

                    found.append(of_model(model, rows, add))
            del model
            if missing := total - sum(rows.rows for rows in found):
                self.notes.append(
                    f"{RANDOM}: {counted(missing, 'row')} of {total:,} left out, of windows from which "
                    "the store dropped a token"
                )
            return [self._line(RANDOM, *found)]
        return []

    @property
    def _all_rows(self) -> tuple[RowSource, RowSource]:
        return self.plan.train_rows, self.one.rows

    def _line(self, name: str, train: ArrayRows, test: ArrayRows) -> dict[str, Any]:
        """The line of the run's training on other rows; with mcc by the directions of its own."""
        trained = self._trained(name, replace(self.plan, train_rows=train))
        (document,) = evaluated([self._measured(trained, None, test)], None, None, self.listener)
        alignment = self._measured(trained, self.one.split, self.one.rows).alignment()
        return trained.line(document if alignment is None else document | {"mcc": alignment.mcc()})

    def _trained(self, name: str, plan: Plan) -> _Trained:
        saes = self._saes(name, plan, self.seeds)
        dead = reconstruction(saes[0], raw_batches(plan.train_rows))["silent_fraction"]
        return _Trained(name, saes[0], dead, self._stability(name, saes))

    def _saes(self, name: str, plan: Plan, seeds: Sequence[int]) -> list[SAE]:
        found: list[SAE] = []
        for seed in seeds:  # one after another, so that the memory of the run suffices
            seeded = replace(plan, training=replace(plan.training, seed=seed))
            with self.listener.progress(
                f"training {name}, seed {seed}", plan.steps, "steps"
            ) as show:
                found += Loop([start_training(seeded, Record(), show)]).train()
        return found

    def _stability(self, name: str, saes: Sequence[SAE]) -> float | None:
        """The mean PW-MCC; None for one SAE, or if there is too little memory."""
        with self._noting(f"the stability of {name} is left out"):
            pairs = list(combinations(saes, 2))
            return (
                float(np.mean([matching(*pair).cosine.mean() for pair in pairs])) if pairs else None
            )
        return None

    def _measured(self, trained: _Trained, split: str | None, rows: RowSource) -> Measured:
        name = self.one.subject.name if trained.name == "none" else trained.name
        return Measured(
            replace(self.one.subject, name=name, dead_fraction=trained.dead_fraction),
            SavedSAE(trained.sae, self.one.saved.origin),
            split,
            rows,
        )

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Note, instead of raising, that a training diverged or lacks memory."""
        try:
            yield
        except (MachineError, TrainingError) as error:
            self.notes.append(f"{what}: {error}")


def demand_memory(rows: Sequence[RowSource]) -> None:
    needed, free = (
        sum(4 * some.rows * (some.d_in + some.d_target) for some in rows),
        available_memory(),
    )
    if needed > USED * free:
        raise MachineError(
            f"the rows, in memory, take {size_words(needed)}: expected {size_words(USED * free)} at "
            "most, half of what is free; end other programs, or take a run with a smaller --fraction"
        )


def shuffled(rows: RowSource, seed: int) -> ArrayRows:
    """Rows without targets, each dimension permuted by itself: every marginal stays, all other structure goes.

    Cost: 4 N D bytes, and 7 s per 100 million numbers on one core.
    """
    found, at = np.empty((rows.rows, rows.d_in), np.float32), 0
    for batch in rows.sequential(CHECKED_ROWS):
        found[at : at + len(batch)] = batch
        at += len(batch)
    random = np.random.default_rng(seed)
    return _like(rows, random.permuted(found, axis=0, out=found))


def _like(rows: RowSource, *arrays: np.ndarray) -> ArrayRows:
    found = ArrayRows(*arrays)
    found.widths, found.places = rows.widths, rows.places
    return found


def of_model(model: "LanguageModel", rows: RowSource, show: Callable[[float], None]) -> ArrayRows:
    """A model's activations at the hook points and tokens of stores' rows, and of their target's, in stored order.

    Cost: a forward pass over the tokens, up to the last of the hook points; 4 N (D + E) bytes.
    """
    from ..extract.forward import batch_tokens  # transformers takes seconds to import
    from ..extract.options import HookPoint

    ends = [*rows.inputs, *([rows.target] if rows.target else [])]
    context = ends[0].store.meta.source["context"]
    places = [
        HookPoint(end.store.meta.source["layer"], end.store.meta.source["site"]) for end in ends
    ]
    found, done = np.empty((rows.rows, rows.d_in + rows.d_target), np.float32), 0
    windows = stored_windows(ends[0], ends[0].rows)
    most = batch_tokens(model, "auto", context, places)
    for parts in stored_activations(model, windows, places, most):
        found[done : done + len(parts[0])] = torch.cat(parts, 1).to("cpu", torch.float32).numpy()
        done += len(parts[0])
        show(done)
    return _like(rows, *filter(np.size, np.split(found, [rows.d_in], axis=1)))
