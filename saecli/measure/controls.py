"""Baselines: a run's training with one ingredient removed.

    fixed encoder     W_enc stays random; biases, thresholds and decoder are trained, by the run's own solver
    fixed decoder     W_dec stays random; encoder and biases are trained, by descent
    shuffled rows     the run's training on its rows with each dimension permuted by itself
    random weights    the run's training on the activations of its model with weights drawn anew, at the same tokens

Fixed weights are the run's at the start: unit directions for the encoder, times one number fitted to the rows, and a
decoder W_enc' B, B the identity or, for a transcoder, the regression of targets on rows. No latent is revived there,
which would aim it at rows.

Sources: Korznikov et al., "Sanity Checks for Sparse Autoencoders: Do SAEs Beat Random Baselines?", arXiv:2602.14111
(fixed encoder and decoder); Heap et al., "Sparse Autoencoders Can Interpret Randomly Initialized Transformers",
arXiv:2501.17727 (random weights; shuffled rows are a simpler relative of its controls).

Shapes: N rows, T tokens, D = d_in, E the width of targets; 0 without.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..base.console import Listener
from ..base.devices import device_named
from ..base.errors import ConfigError, RunError, TrainingError
from ..base.home import Home
from ..model.saes import open_sae
from ..model.windows import stored_activations, stored_windows
from ..sae.formats import SavedSAE
from ..sae.metrics import reconstruction
from ..sae.run_documents import read_run
from ..store.reader import RowSource
from ..train import SOLVERS
from ..train.options import Sgd
from ..train.plan import Plan
from ..train.rows import BLOCK_ROWS, ArrayRows, raw_batches
from ..train.runs import reopen_run
from ..train.training import Record, start_training
from .evaluate import check_model, evaluate_all, noted
from .measured import Measured

if TYPE_CHECKING:
    from ..model.language_model import LanguageModel

CONTROL_MEASURES = ("fvu", "l0", "dead_fraction", "mcc", "f1", "ce_recovered", "kl")
FIXED = {"fixed encoder": "W_enc", "fixed decoder": "W_dec"}
SHUFFLED, RANDOM = "shuffled rows", "random weights"
_Line = dict[str, Any]  # of a table, for one control


def original_of(
    home: Home, name: str | Path | None, device: str, listener: Listener
) -> tuple[Measured, Plan]:
    """The run's SAE with its held-out rows, on the device, and its plan."""
    subject, saved = open_sae(home, name, listener)
    marker = None if subject.folder is None else subject.folder / home.runs.marker
    document = read_run(marker).settings if marker is not None and marker.is_file() else {}
    trained = subject.complete and document.get("solver", {}).get("name") in SOLVERS
    if not trained or "init" in document:
        raise RunError(
            f"{subject.name} has no controls: expected a finished run of `sae train`, without --init; name another"
        )
    plan = reopen_run(home, subject.path, document, listener, "make controls of").plan
    assert plan.test_rows is not None  # a run's, which has a store
    saved = SavedSAE(saved.sae.copy_to(device_named(device)), saved.origin)
    training = replace(plan.training, device=device)
    measured = Measured(subject, saved, plan.test_rows)
    return measured, replace(plan, training=training, test_rows=None)


# The rows of a control in place of those to train on, those to measure on, and those to set thresholds on, if any.
_Replaced = Callable[[Sequence[RowSource]], Sequence[ArrayRows]]


@dataclass(frozen=True)
class Controls:
    run: Measured  # the run's SAE and held-out rows
    plan: Plan  # of the run, without rows to measure after each epoch
    listener: Listener
    notes: list[str]  # sentences on controls that are left out; grows

    def model_spec(self, model: str | None) -> str | None:
        """The model that the rows came from, if given; ConfigError if they are of several."""
        if model is None:
            return None
        rows = self.run.rows
        specs = dict.fromkeys(str(part.store.meta.origin.spec) for part in rows.inputs)
        if len(specs) > 1:
            raise ConfigError(
                f"--model does nothing for {self.run.subject.name}, a crosscoder of {' and '.join(specs)}: "
                "random weights are drawn for one model; leave it out"
            )
        ((_, source), *_) = check_model(self.run, model)
        return source.spec

    def on_own_rows(self, model: str | None, tokens: int | None) -> list[_Line]:
        measured = [self.run]
        if not self.plan.solver.can_fix:
            self.notes.append(
                "fixed encoder and fixed decoder are left out: weights are tied, so that to fix one is to fix both"
            )
            return self._lines(measured, model, tokens)
        for control, fixed in FIXED.items():
            solver = self.plan.solver
            if fixed not in solver.can_fix:  # to solve for it is to train it
                solver = Sgd()
            with noted(control, self.notes.append, kind=TrainingError):
                plan = replace(self.plan, solver=solver, fixed=fixed)
                measured.append(self._trained(control, plan))
        return self._lines(measured, model, tokens)

    def on_other_rows(self, control: str, replaced: _Replaced) -> list[_Line]:
        """The run's training on other rows; mcc is by the directions of its own."""
        if control == SHUFFLED and self.run.rows.d_target:
            self.notes.append(
                f"{SHUFFLED} are left out: a transcoder's targets would be independent of its rows"
            )
            return []
        kept_out = self.plan.kept_out
        sources = [self.plan.train_rows, self.run.rows, *([kept_out] if kept_out else [])]
        with noted(control, self.notes.append, kind=TrainingError):
            train, test, *others = replaced(sources)
            plan = replace(self.plan, train_rows=train, kept_out=others[0] if others else None)
            sae = self._trained(control, plan)
            (line,) = self._lines([replace(sae, rows=test)], None, None)
            if (alignment := sae.alignment()) is not None:
                line["mcc"] = alignment.mcc()
            return [line]
        return []

    def shuffled_rows(self, sources: Sequence[RowSource]) -> list[ArrayRows]:
        return [shuffle_columns(rows, self.plan.training.seed) for rows in sources]

    def rows_of_random_weights(self, name: str, sources: Sequence[RowSource]) -> list[ArrayRows]:
        from ..model.language_model import LanguageModel  # transformers takes seconds to import
        from ..model.source import find_model

        device = self.run.sae.W_enc.device
        model = LanguageModel(find_model(name), device, weights_seed=self.plan.training.seed)
        activations = []
        for rows in sources:
            label = f"running {name} with {RANDOM}"
            with self.listener.progress(label, rows.rows, "rows") as show:
                activations.append(of_model(model, rows, show))
        return activations

    def _trained(self, control: str, plan: Plan) -> Measured:
        with self.listener.progress(f"training {control}", plan.steps, "steps") as show:
            sae = start_training(plan, Record(), show).train()
        dead = reconstruction(sae, raw_batches(plan.train_rows))["silent_fraction"]
        subject = replace(self.run.subject, name=control, dead_fraction=dead)
        return replace(self.run, subject=subject, saved=SavedSAE(sae, self.run.saved.origin))

    def _lines(
        self, measured: Sequence[Measured], model: str | None, tokens: int | None
    ) -> list[_Line]:
        lines = []
        documents = evaluate_all(measured, model, tokens, self.listener)
        for sae, document in zip(measured, documents, strict=True):
            control = "none" if sae is self.run else sae.subject.name
            measures = {name: document.get(name) for name in ("rows", *CONTROL_MEASURES)}
            lines.append({"control": control, **measures})
        return lines


def shuffle_columns(rows: RowSource, seed: int) -> ArrayRows:
    """Rows without targets, each dimension permuted by itself: only marginals stay.

    Cost: 4 N D bytes, 7 s per 100 million numbers on one core.
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
    """A model's activations at the hook points and tokens of rows and their target, in stored order.

    Cost: a forward pass up to the last hook point; 4 N (D + E) bytes.
    """
    from ..model.windows import pass_tokens  # transformers takes seconds to import

    stored = [*rows.inputs, *([rows.target] if rows.target else [])]
    points = [each.store.meta.origin.read[0] for each in stored]
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
    replacement = _like(rows, x, y if rows.d_target else None)
    reads = [model.reads(point) for point in points]
    own = zip(stored, reads, strict=True)
    weights = [np.ones(each.d_in) if read is None else read.numpy() for each, read in own]
    replacement.reads = np.concatenate(weights, dtype=np.float64)
    return replacement
