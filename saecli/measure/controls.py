"""`sae controls`, and the same from Python: what is left of a run's result in trainings that cannot deserve it.

    fixed encoder     W_enc stays random; biases, thresholds and decoder are trained, by the run's own solver
    fixed decoder     W_dec stays random; encoder and biases are trained, by descent
    shuffled rows     the run's training on its rows with each dimension permuted by itself
    random weights    the run's training on the activations of its model with weights drawn anew, at the same tokens

Fixed weights are those of the run's start: unit directions, drawn for the encoder and times one number fitted to the
rows, and a decoder W_enc' B, B the identity or, of a transcoder, the regression of the targets on the rows. No latent
is revived there, since that would aim it at rows.

Stability alone does not set a run apart: the dimensions of shuffled rows are independent, and where they are not normal
these axes are features that every seed finds (in a world of 64 known features: PW-MCC 0.95, of the run 0.86).

Sources: Korznikov et al., "Sanity Checks for Sparse Autoencoders: Do SAEs Beat Random Baselines?", arXiv:2602.14111
(fixed encoder and decoder); Heap et al., "Sparse Autoencoders Can Interpret Randomly Initialized Transformers",
arXiv:2501.17727 (random weights; shuffled rows are a simpler relative of its controls).

Shapes: D = d_in, F = d_sae.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from ..base.console import Listener, listening
from ..base.devices import device_named
from ..base.documents import read_settings
from ..base.errors import ConfigError, MachineError, RunError, TrainingError, counted
from ..base.home import KEPT, Home
from ..sae.dictionary import SAE
from ..sae.formats import SavedSAE
from ..sae.library import open_sae
from ..sae.metrics import reconstruction
from ..store.joined import JoinedRows
from ..store.rows import RowSource
from ..train.array_rows import ArrayRows
from ..train.loop import Loop, Record, start_training
from ..train.options import Sgd, SolverConfig
from ..train.plan import Plan
from ..train.rows import raw_batches
from ..train.runs import run_again
from ..train.solvers import SOLVERS
from .control_rows import demand_memory, shuffled
from .evaluate import check_model, check_tokens_of_model, evaluated
from .measured import Measured
from .stability import matching

SEEDS = 2  # trainings of the run and of each control
MEASURES = ("fvu", "l0", "dead_fraction", "mcc", "f1", "ce_recovered", "kl", "stability")
FIXED = {"fixed encoder": "W_enc", "fixed decoder": "W_dec"}
SHUFFLED, RANDOM = "shuffled rows", "random weights"


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained SAE, and what measuring it on held-out rows does not tell.

    Args:
        name: of its control; `none` for the run itself.
        sae: acting on raw rows.
        dead_fraction: fraction of its latents that fire on none of its training rows; None if unknown.
        stability: mean PW-MCC between the training's seeds; None with one seed.
    """

    name: str
    sae: SAE
    dead_fraction: float | None
    stability: float | None

    def line(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Its line, given what `evaluated` says of it."""
        return {"control": self.name, "rows": document["rows"],
                **{name: document.get(name) for name in MEASURES if name != "stability"}, "stability": self.stability}


def controls(run: str | Path | None = None, *, model: str | None = None, tokens: int | None = None,
             seeds: int = SEEDS, device: str = "auto", home: str | Path | None = None,
             progress: bool = False) -> dict[str, Any]:
    """Train and measure the controls of a run, as `sae controls` does; no files are written.

    Args:
        run: name of a finished run of `sae train`, an SAE or a transcoder; None for the newest run.
        model: hub id or folder of the language model that the rows came from, for its control with random weights, and
            to splice into it what acts on its own rows; None for neither.
        tokens: number of tokens of held-out rows that the model is run over for that, as of `evaluate`.
        seeds: trainings of each control, and of the run, at least 1. The first has the run's seed, and is what is
            measured; further ones are for `stability`.
        device: where to compute: cpu, cuda, cuda:1; auto takes cuda where there is one.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
        progress: show progress, and what is left out, on stderr.

    Returns:
        run, data: names.
        seeds: of all trainings.
        controls: a list, the run itself first. Of each: `control`, its name, or "none"; `rows`, how many held-out ones
            it is measured on; `fvu`, `l0` and `dead_fraction`, as of `evaluate`; with a world of known features `mcc`
            and, of those on the run's own rows, `f1`; with a model, of these, `ce_recovered` and `kl`; and
            `stability`, the mean over pairs of seeds of PW-MCC (see `saecli.stability`). Where a measure is not
            defined it is None.
        notes: sentences on controls that are left out.

    Raises:
        ConfigError: an argument that cannot work.
        RunError: it is no finished run of `sae train`, is a crosscoder, or began from an SAE.
        StoreError, ModelError: its store or model is missing, or cannot be read.

    Cost: `seeds` trainings of each of up to four controls and `seeds - 1` of the run, one after another, with the
    memory of the run's own. Shuffled rows, and a random model's, are in memory, 4 bytes per number; if they take more
    than half of what is free, their control is left out.
    """
    return controlled(Home.at(home), run, model, tokens, seeds, device, listening(progress))


def controlled(home: Home, run: str | Path | None, model: str | None, tokens: int | None, seeds: int, device: str,
               listener: Listener) -> dict[str, Any]:
    """The document that `sae controls --json` prints; arguments as of `controls`."""
    check_tokens_of_model(tokens, model)
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {seeds}", option="seeds")
    one, plan = _original(home, run, device, listener)
    if model is not None:
        check_model(one, model)  # before the work, not after it
    first = plan.training.seed
    work = _Work(one, plan, range(first, first + seeds), listener, [])
    lines = work.on_own_rows(model, tokens) + work.on_shuffled_rows()
    if model is not None:
        lines += work.on_random_weights(model)
    return {"run": one.subject.name, "data": one.stores.name, "seeds": list(work.seeds), "controls": lines,
            "notes": work.notes}


def _original(home: Home, name: str | Path | None, device: str, listener: Listener) -> tuple[Measured, Plan]:
    """The SAE of that run with its held-out rows, on the device, and what was trained; RunError for what has no
    controls."""
    subject, saved = open_sae(home, name, listener)
    marker = subject.folder / home.runs.marker
    expected = f"{subject.name} has no controls: expected a finished run of `sae train`, got"
    if not marker.is_file():
        raise RunError(f"{expected} a folder with an SAE of unknown training; name a run, which `sae list` shows")
    if subject.folder.parent.name == KEPT:
        raise RunError(f"{expected} an epoch of one; name the run itself")
    if not subject.complete:
        raise RunError(f"{expected} an unfinished one; finish it by `sae train --resume --name {subject.name}`")
    document = read_settings(marker)
    if (solver := document["solver"].get("name")) not in SOLVERS:
        raise RunError(f"{expected} one of `sae {solver}`; name the run that it was made from")
    if "init" in document:
        raise RunError(f"{expected} one that began from {document['init']['name']}; name one without --init, which "
                       "began from random directions")
    if document.get("beside"):
        raise RunError(f"{expected} a crosscoder; name a run on one store, or on one and its target")
    plan = run_again(home, subject.folder, document, listener, "make controls of").plan
    sae = saved.sae.copy_to(device_named(device))
    return (Measured(subject, SavedSAE(sae, saved.origin), "test", plan.test_rows),
            replace(plan, training=replace(plan.training, device=device), test_rows=None))


@dataclass(frozen=True)
class _Work:
    """Trains and measures the controls of a run.

    Args:
        one: the run's SAE and held-out rows.
        plan: of the run, on the device to compute on, without rows to measure after each epoch.
        seeds: of the trainings, from the run's own on.
        listener: shows progress.
        notes: sentences on what is left out, which grow.
    """

    one: Measured
    plan: Plan
    seeds: Sequence[int]
    listener: Listener
    notes: list[str]

    def on_own_rows(self, model: str | None, tokens: int | None) -> list[dict[str, Any]]:
        """The lines of the run itself, and of the controls on its rows."""
        one, run = self.one, self.one.subject
        saes = [one.sae]
        with self._noting(f"the stability of {run.name} is left out"):
            saes += self._saes(run.name, self.plan, self.seeds[1:])
        found = [Trained("none", one.sae, run.dead_fraction, self._stability(run.name, saes))]
        if getattr(self.plan.solver, "tied", False):
            self.notes.append("fixed encoder and fixed decoder are left out: weights are tied, so that to fix one is "
                              "to fix both")
        else:
            for name, held in FIXED.items():
                with self._noting(f"{name} is left out"):
                    found.append(self._trained(name, replace(self.plan, solver=_solver(self.plan.solver, held),
                                                             held=held)))
        documents = evaluated([self._measured(each, one.split, one.rows) for each in found], model, tokens,
                              self.listener)
        return [each.line(document) for each, document in zip(found, documents, strict=True)]

    def on_shuffled_rows(self) -> list[dict[str, Any]]:
        """The line of shuffled rows; none if it is left out."""
        with self._noting(f"{SHUFFLED} are left out"):
            if isinstance(self.one.rows, JoinedRows):
                self.notes.append(f"{SHUFFLED} are left out: a transcoder's targets would be independent of its rows")
                return []
            demand_memory(self._all_rows)
            return [self._line(SHUFFLED, *(shuffled(rows, self.seeds[0]) for rows in self._all_rows))]
        return []

    def on_random_weights(self, name: str) -> list[dict[str, Any]]:
        """The line of a model's random weights; none if it is left out."""
        from ..extract.language_model import LanguageModel
        from ..extract.model_source import find_model  # transformers takes seconds to import
        from .model_rows import of_model

        with self._noting(f"{RANDOM} are left out"):
            demand_memory(self._all_rows)
            model = LanguageModel(find_model(name), self.one.sae.W_enc.device, weights_seed=self.seeds[0])
            total, found = sum(rows.rows for rows in self._all_rows), []
            with self.listener.progress(f"running {name} with {RANDOM}", total, "rows") as show:
                for rows in self._all_rows:
                    before = sum(each.rows for each in found)
                    found.append(of_model(model, rows, lambda done, before=before: show(before + done)))
            del model
            if missing := total - sum(rows.rows for rows in found):
                self.notes.append(f"{RANDOM}: {counted(missing, 'row')} of {total:,} left out, of windows from which "
                                  "the store dropped a token")
            return [self._line(RANDOM, *found)]
        return []

    @property
    def _all_rows(self) -> tuple[RowSource, RowSource]:
        """The run's training rows and held-out rows."""
        return self.plan.train_rows, self.one.rows

    def _line(self, name: str, train: ArrayRows, test: ArrayRows) -> dict[str, Any]:
        """The line of the run's training on other rows; with mcc by the directions of its own."""
        trained = self._trained(name, replace(self.plan, train_rows=train))
        (document,) = evaluated([self._measured(trained, None, test)], None, None, self.listener)
        alignment = self._measured(trained, self.one.split, self.one.rows).alignment()
        return trained.line(document if alignment is None else document | {"mcc": alignment.mcc()})

    def _trained(self, name: str, plan: Plan) -> Trained:
        """A control's training with each seed; the first one's SAE is the one to measure."""
        saes = self._saes(name, plan, self.seeds)
        dead = reconstruction(saes[0], raw_batches(plan.train_rows))["silent_fraction"]
        return Trained(name, saes[0], dead, self._stability(name, saes))

    def _saes(self, name: str, plan: Plan, seeds: Sequence[int]) -> list[SAE]:
        """The SAEs of a plan, one per seed, on raw rows. One after another, so that the memory of the run suffices."""
        found = []
        for seed in seeds:
            seeded = replace(plan, training=replace(plan.training, seed=seed))
            with self.listener.progress(f"training {name}, seed {seed}", plan.steps, "steps") as show:
                found += Loop([start_training(seeded, Record(), show)]).train()
        return found

    def _stability(self, name: str, saes: Sequence[SAE]) -> float | None:
        """The mean PW-MCC of SAEs, see `saecli.stability`; None for one, or where there is too little memory."""
        with self._noting(f"the stability of {name} is left out"):
            pairs = list(combinations(saes, 2))
            return float(np.mean([matching(*pair).cosine.mean() for pair in pairs])) if pairs else None
        return None

    def _measured(self, trained: Trained, split: str | None, rows: RowSource) -> Measured:
        """An SAE with the rows to measure it on, under the name that progress shows."""
        name = self.one.subject.name if trained.name == "none" else trained.name
        return Measured(replace(self.one.subject, name=name, dead_fraction=trained.dead_fraction),
                        SavedSAE(trained.sae, self.one.saved.origin), split, rows)

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Note, in place of an error, that something is left out because its training diverged or lacks memory."""
        try:
            yield
        except (MachineError, TrainingError) as error:
            self.notes.append(f"{what}: {error}")


def _solver(solver: SolverConfig, held: str) -> SolverConfig:
    """The solver with which those weights are held: to solve for the decoder is to train it."""
    if held == "W_enc" or isinstance(solver, Sgd):
        return solver
    return Sgd(**{field.name: getattr(solver, field.name) for field in fields(SolverConfig)})
