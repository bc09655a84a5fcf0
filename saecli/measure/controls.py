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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
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
    demand_at_least,
    size_words,
)
from ..base.home import Home
from ..base.machine import available_memory
from ..extract.splice import spec_of, stored_activations, stored_windows
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import open_sae
from ..sae.metrics import reconstruction
from ..store.reader import RowSource
from ..train import SOLVERS
from ..train.loop import Loop
from ..train.options import Sgd, SolverConfig
from ..train.plan import Plan
from ..train.rows import BLOCK_ROWS, ArrayRows, raw_batches
from ..train.runs import reopen_run
from ..train.training import Record, start_training
from .evaluate import check_model, check_tokens, evaluate_all
from .measured import Measured
from .stability import matching

if TYPE_CHECKING:
    from ..extract.language_model import LanguageModel

SEEDS = 2  # trainings of the run and of each control
MEASURES = ("fvu", "l0", "dead_fraction", "mcc", "f1", "ce_recovered", "kl", "stability")
FIXED = {"fixed encoder": "W_enc", "fixed decoder": "W_dec"}
SHUFFLED, RANDOM = "shuffled rows", "random weights"
USED = 0.5  # fraction of the free memory that a control's rows may take
_Line = dict[str, Any]  # of a table, for one control


def controls(
    run: str | Path | None = None,
    *,
    model: str | None = None,
    tokens: int | None = None,
    seeds: int = SEEDS,
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Train and measure the baselines of a run; CLI equivalent: `sae controls`. No files are written.

    Args:
        run: name of a finished run of `sae train`; None for the newest run.
        model: the language model that the rows came from, as in `evaluate`, for the control with random weights, and
            for CE and KL of what acts on the run's own rows; not for a crosscoder of several models.
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
    check_tokens(tokens, model)
    demand_at_least("seeds", seeds)
    run_rows, plan = _original(Home.at(home), run, device, listener)
    if model is not None:
        specs = dict.fromkeys(str(spec_of(rows.store.meta.source)) for rows in run_rows.rows.inputs)
        if len(specs) > 1:
            raise ConfigError(
                f"--model does nothing for {run_rows.subject.name}, a crosscoder of {' and '.join(specs)}: "
                "random weights are drawn for one model; leave it out"
            )
        ((_, source), *_) = check_model(run_rows, model)
        model = source.spec
    first = plan.training.seed
    work = _Work(run_rows, plan, range(first, first + seeds), listener, [])
    lines = work.on_own_rows(model, tokens)
    if run_rows.rows.d_target:
        work.notes.append(
            f"{SHUFFLED} are left out: a transcoder's targets would be independent of its rows"
        )
    else:
        lines += work.on_other_rows(SHUFFLED, work.shuffled_rows)
    if model is not None:
        lines += work.on_other_rows(RANDOM, partial(work.rows_of_random_weights, model))
    return {
        "run": run_rows.subject.name,
        "data": run_rows.stores.name,
        "seeds": list(work.seeds),
        "controls": lines,
        "notes": work.notes,
    }


def _original(
    home: Home, name: str | Path | None, device: str, listener: Listener
) -> tuple[Measured, Plan]:
    """The run's SAE with its held-out rows, on the device, and its plan."""
    subject, saved = open_sae(home, name, listener)
    expected = f"{subject.name} has no controls: expected a finished run of `sae train`, got"
    marker = None if subject.folder is None else subject.folder / home.runs.marker
    if marker is None or not marker.is_file():
        raise RunError(f"{expected} an SAE of unknown training; name a run, which `sae list` shows")
    if not subject.complete:
        raise RunError(
            f"{expected} an unfinished one; finish it by `sae train --resume --name {subject.name}`"
        )
    document = read_run(marker).settings
    solver = document["solver"].get("name")
    if solver not in SOLVERS:
        raise RunError(f"{expected} one of `sae {solver}`; name the run that it was made from")
    if "init" in document:
        raise RunError(
            f"{expected} one that began from {document['init']['name']}; name one without --init, which "
            "began from random directions"
        )
    plan = reopen_run(home, marker.parent, document, listener, "make controls of").plan
    assert plan.test_rows is not None  # those of a store
    saved = SavedSAE(saved.sae.copy_to(device_named(device)), saved.origin)
    training = replace(plan.training, device=device)
    measured = Measured(subject, saved, plan.test_rows)
    return measured, replace(plan, training=training, test_rows=None)


_Trained = tuple[Measured, float | None]  # an SAE with rows, and its stability
# The rows of a control in place of those to train on, those to measure on, and those to set thresholds on, if any.
_Replaced = Callable[[Sequence[RowSource]], Sequence[ArrayRows]]


@dataclass(frozen=True)
class _Work:
    run: Measured  # the run's SAE and held-out rows
    plan: Plan  # of the run, without rows to measure after each epoch
    seeds: Sequence[int]  # of the trainings, the run's first
    listener: Listener
    notes: list[str]  # sentences on controls that are left out; grows

    @contextmanager
    def left_out_if_it_fails(self, control: str) -> Iterator[None]:
        """A note instead of an error if a training diverged or lacks memory."""
        try:
            yield
        except (MachineError, TrainingError) as error:
            self.notes.append(f"{control} left out: {error}")

    def on_own_rows(self, model: str | None, tokens: int | None) -> list[_Line]:
        name, stability = self.run.subject.name, None
        with self.left_out_if_it_fails(f"stability of {name}"):
            stability = _stability([self.run.sae, *self._saes(name, self.plan, self.seeds[1:])])
        trained: list[_Trained] = [(self.run, stability)]
        if getattr(self.plan.solver, "tied", False):
            self.notes.append(
                "fixed encoder and fixed decoder are left out: weights are tied, so that to fix one is "
                "to fix both"
            )
            return self._lines(trained, model, tokens)
        for control, held in FIXED.items():
            solver = self.plan.solver
            if held == "W_dec" and not isinstance(solver, Sgd):  # to solve for it is to train it
                shared = {field.name: getattr(solver, field.name) for field in fields(SolverConfig)}
                solver = Sgd(**shared)
            with self.left_out_if_it_fails(control):
                plan = replace(self.plan, solver=solver, held=held)
                trained.append(self._trained(control, plan))
        return self._lines(trained, model, tokens)

    def on_other_rows(self, control: str, replaced: _Replaced) -> list[_Line]:
        """The run's training on rows in place of its own; with mcc by the directions of its own."""
        kept_out = self.plan.kept_out
        sources = [self.plan.train_rows, self.run.rows, *([kept_out] if kept_out else [])]
        with self.left_out_if_it_fails(control):
            demand_memory(sources)
            train, test, *others = replaced(sources)
            plan = replace(self.plan, train_rows=train, kept_out=others[0] if others else None)
            sae, stability = self._trained(control, plan)
            (line,) = self._lines([(replace(sae, rows=test), stability)], None, None)
            if (alignment := sae.alignment()) is not None:
                line["mcc"] = alignment.mcc()
            return [line]
        return []

    def shuffled_rows(self, sources: Sequence[RowSource]) -> list[ArrayRows]:
        return [shuffled(rows, self.seeds[0]) for rows in sources]

    def rows_of_random_weights(self, name: str, sources: Sequence[RowSource]) -> list[ArrayRows]:
        from ..extract.language_model import LanguageModel  # transformers takes seconds to import
        from ..extract.model_source import find_model

        device = self.run.sae.W_enc.device
        model = LanguageModel(find_model(name), device, weights_seed=self.seeds[0])
        activations = []
        for rows in sources:
            label = f"running {name} with {RANDOM}"
            with self.listener.progress(label, rows.rows, "rows") as show:
                activations.append(of_model(model, rows, show))
        return activations

    def _trained(self, control: str, plan: Plan) -> _Trained:
        saes = self._saes(control, plan, self.seeds)
        dead = reconstruction(saes[0], raw_batches(plan.train_rows))["silent_fraction"]
        subject = replace(self.run.subject, name=control, dead_fraction=dead)
        saved = SavedSAE(saes[0], self.run.saved.origin)
        return replace(self.run, subject=subject, saved=saved), _stability(saes)

    def _saes(self, name: str, plan: Plan, seeds: Sequence[int]) -> list[SAE]:
        saes: list[SAE] = []
        for seed in seeds:  # one after another, so that the memory of the run suffices
            seeded = replace(plan, training=replace(plan.training, seed=seed))
            label = f"training {name}, seed {seed}"
            with self.listener.progress(label, plan.steps, "steps") as show:
                saes += Loop([start_training(seeded, Record(), show)]).train()
        return saes

    def _lines(
        self, trained: Sequence[_Trained], model: str | None, tokens: int | None
    ) -> list[_Line]:
        saes = [sae for sae, _ in trained]
        lines = []
        documents = evaluate_all(saes, model, tokens, self.listener)
        for (sae, stability), document in zip(trained, documents, strict=True):
            control = "none" if sae is self.run else sae.subject.name
            measures = {name: document.get(name) for name in ("rows", *MEASURES)}
            lines.append({"control": control, **measures, "stability": stability})
        return lines


def _stability(saes: Sequence[SAE]) -> float | None:
    """The mean PW-MCC; None for one SAE."""
    cosines = [matching(*pair).cosine.mean() for pair in combinations(saes, 2)]
    return float(np.mean(cosines)) if cosines else None


def demand_memory(sources: Sequence[RowSource]) -> None:
    needed = sum(4 * rows.rows * (rows.d_in + rows.d_target) for rows in sources)
    allowed = USED * available_memory()
    if needed > allowed:
        raise MachineError(
            f"the rows, in memory, take {size_words(needed)}: expected {size_words(allowed)} at "
            "most, half of what is free; end other programs, or take a run with a smaller --fraction"
        )


def shuffled(rows: RowSource, seed: int) -> ArrayRows:
    """Rows without targets, each dimension permuted by itself: every marginal stays, all other structure goes.

    Cost: 4 N D bytes, and 7 s per 100 million numbers on one core.
    """
    x = np.empty((rows.rows, rows.d_in), np.float32)
    done = 0
    for batch in rows.sequential(BLOCK_ROWS):
        x[done : done + len(batch)] = batch
        done += len(batch)
    random = np.random.default_rng(seed)
    return _like(rows, random.permuted(x, axis=0, out=x))


def _like(rows: RowSource, x: np.ndarray, y: np.ndarray | None = None) -> ArrayRows:
    replacement = ArrayRows(x, y)
    replacement.widths, replacement.places = rows.widths, rows.places
    replacement.reads = rows.reads
    return replacement


def of_model(model: "LanguageModel", rows: RowSource, show: Callable[[float], None]) -> ArrayRows:
    """A model's activations at the hook points and tokens of stores' rows, and of their target's, in stored order.

    Cost: a forward pass over the tokens, up to the last of the hook points; 4 N (D + E) bytes.
    """
    from ..extract.forward import pass_tokens  # transformers takes seconds to import
    from ..extract.options import HookPoint

    stored = [*rows.inputs, *([rows.target] if rows.target else [])]
    sources = [each.store.meta.source for each in stored]
    points = list(map(HookPoint.of, sources))
    windows = stored_windows(stored[0], stored[0].rows)
    tokens = pass_tokens(model.device)
    activations = np.empty((rows.rows, rows.d_in + rows.d_target), np.float32)
    done = 0
    for parts in stored_activations(model, windows, points, tokens):
        batch = torch.cat(parts, 1).to("cpu", torch.float32).numpy()
        activations[done : done + len(batch)] = batch
        done += len(batch)
        show(done)
    x, y = np.split(activations, [rows.d_in], axis=1)
    return _like(rows, x, y if rows.d_target else None)
