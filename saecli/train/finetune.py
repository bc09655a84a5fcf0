"""Fine-tuning a finished SAE through the language model that it acts in.

    loss = KL(clean || spliced) + w FVU        or, with `--objective ce`, the spliced model's cross-entropy + w FVU

per token that is not special. The clean pass gives the activations that the SAE encodes; the spliced one has its
predictions in their place, and a gradient from the hook point up: blocks below keep no activations for it. The SAE acts
on rows normalised as in training, so that one learning rate fits all models. L0 is held where it starts: by one factor
on all thresholds, or with relu by the weight of an L1 penalty; with topk it is fixed.

Source: Karvonen, "Revisiting End-To-End Sparse Autoencoder Training: A Short Finetune Is All You Need" (2025).

Shapes: n plain tokens of a forward pass, D = d_in, E = d_out, F = d_sae, L prefixes.
"""

import math
from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ..base.console import Listener
from ..base.devices import device_named
from ..base.errors import ConfigError, ModelError
from ..base.home import Home
from ..base.machine import is_out_of_memory
from ..base.processes import ALONE, Communicator
from ..extract.language_model import LanguageModel
from ..extract.options import ExtractConfig
from ..extract.splice import (
    BATCH_LOGITS,
    CleanPass,
    Hooked,
    check_rows,
    effects,
    hooked,
    in_batches,
    largest,
    model_of,
    stored_windows,
    unfit,
)
from ..extract.streaming import Streamed, open_stream
from ..extract.windows import Windows
from ..sae.activations import Relu
from ..sae.activations.elementwise import Thresholded
from ..sae.codes import Codes
from ..sae.dictionary import SAE
from ..sae.library import SAELike, lasting_name, open_sae
from ..sae.metrics import reconstruction
from ..store.joined import Joined
from ..store.opening import open_joined
from ..store.split import is_test
from .options import Finetune, TrainingConfig
from .plan import Plan
from .rows import ArrayRows, Normalisation, TrainingRows, raw_batches
from .solver import Solver, StepReport, Task
from .start import Start, fingerprint

STEP_TOKENS = 3072  # of a step, about: 24 windows of 128
EPOCH = 50  # steps between checkpoints, each with measures on held-out windows
SAMPLE_TOKENS, TEST_TOKENS = 8192, 16_384  # whose activations are kept, to normalise and to measure
ON_GPU = 8  # times the logits of a forward pass on a CPU
RATE = 1e-3
THRESHOLD_RATE, WEIGHT_RATE = 0.05, 0.5  # change per step, of the logarithm, over the relative excess of L0


@dataclass(frozen=True, eq=False)
class Through:
    """A language model, where an SAE acts in it, and windows of token ids: to train on, and held out."""

    model: LanguageModel
    hooked: Hooked
    special: Tensor
    train: Sequence[list[int]]
    test: Sequence[list[int]]

    @cached_property
    def plain(self) -> np.ndarray:
        """Tokens per training window that are not special."""
        special = {*self.special.tolist()}
        return np.array([sum(token not in special for token in window) for window in self.train])

    @cached_property
    def per_step(self) -> int:
        """Windows of a step."""
        return max(1, round(STEP_TOKENS / self.plain.mean()))

    @property
    def most(self) -> int:
        """Tokens of one forward pass."""
        return BATCH_LOGITS * (ON_GPU if self.model.device.type == "cuda" else 1) // self.model.vocabulary

    def clean(self, windows: list[list[int]]) -> CleanPass:
        return CleanPass.of(self.model, windows, self.special, self.hooked.reads, self.hooked.writes)

    def step(self, number: int, seed: int) -> np.ndarray:
        """The windows of a step, out of passes over all of them, each in an order of its own."""
        wanted = np.arange(number * self.per_step, (number + 1) * self.per_step)
        passes, places = np.divmod(wanted, len(self.train))
        order = {one: np.random.default_rng((seed, one)).permutation(len(self.train)) for one in {*passes.tolist()}}
        return np.array([order[one][place] for one, place in zip(passes.tolist(), places.tolist(), strict=True)])

    @torch.no_grad()
    def activations(self, windows: Sequence[list[int]], tokens: int) -> tuple[Tensor, Tensor | None]:
        """Those of about the first `tokens` plain tokens, and a transcoder's targets."""
        parts: list[tuple[Tensor, Tensor]] = []
        for batch in in_batches(windows, self.most):
            found = self.clean(batch)
            parts.append((found.x.float().cpu(), found.y.float().cpu()))
            if sum(len(x) for x, _ in parts) >= tokens:
                break
        x, y = (torch.cat(one) for one in zip(*parts, strict=True))
        return x, None if self.hooked.reads == self.hooked.writes else y


@dataclass(frozen=True, eq=False)
class StepWindows:
    """A step's windows in this process; `size` counts the plain tokens in all processes."""

    through: Through
    normalisation: Normalisation
    token_ids: list[list[int]]
    size: int


class Sampled(ArrayRows):
    """Activations of some windows, a `RowSource`: the rows that training is normalised by, or held-out ones."""

    def __init__(self, through: Through, rows: tuple[Tensor, Tensor | None]) -> None:
        super().__init__(*rows)
        self.through = through
        self.widths = self.places = through.hooked.sae.widths


class WindowRows(TrainingRows):
    """As batches the windows, `EPOCH` steps an epoch."""

    def shuffled(self, epoch: int) -> Generator[Any, None, None]:
        assert isinstance(self.stored, Sampled)
        through, communicator = self.stored.through, self.communicator
        for number in range(epoch * EPOCH, (epoch + 1) * EPOCH):
            windows = through.step(number, self.seed)
            own = [through.train[window] for window in windows[communicator.rank :: communicator.world_size]]
            yield StepWindows(through, self.normalisation, own, int(through.plain[windows].sum()))


class ThroughModel(Solver):
    """Descent on windows of tokens, through the language model."""

    def __init__(self, initial: SAE, task: Task, config: Finetune, communicator: Communicator = ALONE) -> None:
        codes_stay = ("W_enc", "b_enc", *initial.activation_parameters) if config.only == "decoder" else ()
        super().__init__(initial.sae(), ("threshold", *codes_stay), task, config, 1, communicator)
        self.through, self.codes_stay, self.most = config, bool(codes_stay), math.inf
        with torch.no_grad():
            codes = self.dictionary.codes(task.sample.x)
            self.target = codes.count().double() / len(task.sample.x)  # L0
            self.weight = self._stationary_weight(codes)

    def _stationary_weight(self, codes: Codes) -> Tensor:
        """The weight of L1 at which the sample's codes are about stationary: over active latents, the mean of
        `2 (y - y_hat) . W_dec_i / ||W_dec_i||`; 0 for activations that need no penalty."""
        batch, dictionary = self.task.sample, self.dictionary
        if self.codes_stay or not isinstance(dictionary.activation, Relu):
            return self.target.new_zeros(())
        W_dec = dictionary.decoder()
        residuals = batch.y - dictionary.predicted(batch.x, codes)[:, -1]
        slopes = 2 * residuals @ (W_dec / dictionary.weighed(W_dec).norm(dim=1, keepdim=True)).T
        active = codes.dense() > 0
        return ((slopes * active).sum() / active.sum().clamp(min=1)).clamp(min=1e-6).double()

    def step(self, batch: Any) -> list[StepReport]:
        return [] if self.finished else [self._step(batch)]

    def end_epoch(self) -> list[StepReport]:
        if self.finished:
            self.calibrate()
        return []

    def _step(self, batch: StepWindows) -> StepReport:
        if self.through.windows != "auto":
            self.most = min(self.most, int(self.through.windows) * max(map(len, batch.token_ids), default=1))
        sums = None
        while sums is None:
            self.optimizer.zero_grad()
            try:
                sums = torch.zeros(3, dtype=torch.float64, device=batch.through.model.device)
                for windows in in_batches(batch.token_ids, int(min(self.most, batch.through.most))):
                    sums += self._part(batch, windows)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                sums = None
            if sums is None:  # outside of the except clause, where the error has released its tensors
                self._halve(batch)
        self.optimizer.step(self.task.learning_rate(self.steps))
        self.steps += 1
        loss, squared_error, active = sums.unbind()
        self._hold_l0(self.communicator.all_reduce(active.clone()) / batch.size)
        return StepReport(self.steps, batch.size, loss, squared_error, active / batch.size)

    def _part(self, batch: StepWindows, windows: list[list[int]]) -> Tensor:
        """Add the gradient of some of a step's windows; returns their parts of the loss, squared error and L0."""
        dictionary, config, normalisation = self.dictionary, self.through, batch.normalisation
        mean, scale, target_mean, target_scale = normalisation.of_sae()
        clean = batch.through.clean(windows)
        x = (clean.x.to(mean) - mean) / scale
        y = x if clean.y is clean.x else (clean.y.to(mean) - target_mean) / target_scale
        pre = dictionary.pre_activations(x)
        codes = dictionary.activation(pre, dictionary.activation_parameters)
        y_hat = dictionary.predicted(x, codes)  # (n, L, E)
        spliced = clean.spliced(y_hat[:, -1] * target_scale + target_mean)
        objective = clean.kl(spliced) if config.objective == "kl" else clean.cross_entropy(spliced)
        errors = (y_hat - y[:, None]).square().sum(-1).sum(0).double()  # (L,)
        loss = objective + config.fvu_weight * errors.mean() / normalisation.variance
        if self.weight:
            norms = dictionary.weighed(dictionary.decoder()).norm(dim=1)
            penalty = self.weight * codes.times(norms[:, None]).sum()
            loss = loss + max(config.fvu_weight, 1.0) * penalty / normalisation.variance
        (loss / batch.size).backward()
        return torch.stack([loss.detach(), errors[-1].detach(), codes.count().double() * batch.size]) / batch.size

    def _halve(self, batch: StepWindows) -> None:
        longest = max(map(len, batch.token_ids))
        most = int(min(self.most, batch.through.most, longest * len(batch.token_ids)))
        if most <= longest:
            raise ModelError(f"a window of {longest:,} tokens does not fit in the memory of "
                             f"{batch.through.model.device} with its gradient; lower --context, or use "
                             "--model-dtype bfloat16")
        self.most = most // 2
        if batch.through.model.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _hold_l0(self, l0: Tensor) -> None:
        """Move the thresholds, or the penalty's weight, against an excess of L0."""
        excess = (l0 / self.target - 1).clamp(max=1.0)
        if self.weight:
            self.weight *= (WEIGHT_RATE * excess).exp()
        elif not self.codes_stay and (threshold := self.dictionary.activation_parameters.get("threshold")) is not None:
            threshold *= (THRESHOLD_RATE * excess).exp()

    @torch.no_grad()
    def calibrate(self) -> None:
        """Scale the thresholds to give the sample the L0 that it had at the start."""
        activation, parameters = self.dictionary.activation, self.dictionary.activation_parameters
        if self.codes_stay or "threshold" not in parameters or not isinstance(activation, Thresholded):
            return
        pre = self.dictionary.pre_activations(self.task.sample.x)
        thresholds = activation.thresholds(parameters, pre.shape[1]).clamp(min=torch.finfo(pre.dtype).tiny)
        kept = round(self.target.item() * len(pre))
        if 0 < kept < pre.numel():
            factor = (pre / thresholds).flatten().topk(kept + 1).values[-2:].mean()
            parameters["threshold"] *= factor.clamp(min=0)

    def notes(self) -> list[str]:
        lacking = math.isfinite(self.most) and self.through.windows == "auto"
        return [f"for lack of memory, forward passes took at most {self.most:,} tokens"] * lacking

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"target": self.target, "weight": self.weight}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.target, self.weight = state["target"].to(self.target), state["weight"].to(self.weight)


@dataclass(frozen=True)
class FinetunePlan(Plan):
    """Its training rows are the sample that gives the normalisation."""

    in_batches: ClassVar[type[TrainingRows]] = WindowRows

    through: Through = field(kw_only=True)

    @cached_property
    def batches(self) -> int:
        return EPOCH

    def judged(self, sae: SAE, listener: Listener) -> tuple[SAE, dict[str, Any]]:
        """Before and after, on held-out windows: FVU, L0, CE and KL; and the one that has the lower objective."""
        assert self.start is not None and self.start.sae is not None and isinstance(self.solver, Finetune)
        assert self.test_rows is not None
        through, solver = self.through, self.solver
        saes = [self.start.sae.copy_to(torch.float32, through.model.device), sae.copy_to(through.model.device)]
        with listener.progress(f"splicing into {through.model.source.name}", self.test_rows.rows, "tokens") as show:
            found = effects(through.model, through.test, through.special, through.hooked.reads, through.hooked.writes,
                            saes, show)
        for one, measures in zip(saes, found, strict=True):
            errors = reconstruction(one, raw_batches(self.test_rows))
            measures |= {name: errors[name] for name in ("fvu", "l0", "rows")}
        name = "kl" if solver.objective == "kl" else "ce_spliced"
        before, after = (measures[name] + solver.fvu_weight * measures["fvu"] for measures in found)
        better = after < before
        return saes[better], {"before": found[0], "after": found[1], "kept": "after" if better else "before"}


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
    def open(cls, home: Home, sae: SAELike, config: Finetune, *, data: Sequence[str], target: str | None,
             text: Mapping[str, Any], device: str, listener: Listener, processes: Communicator = ALONE) -> Self:
        """Open what `sae finetune` names; `text` are options of `sae extract`, without `dataset` those of the model."""
        opened = subject, saved = open_sae(home, sae, listener)
        acts = hooked(opened, config.layer, config.site)
        source = model_of([acts], config.model, listener)
        stores: Joined | Streamed
        if "dataset" in text:
            if data or target:
                raise ConfigError("cannot use both --data and --dataset at the same time; use one of them")
            extract = ExtractConfig(**text, model=source.name, rows=config.tokens)
            stores, through = _streamed(home, acts, extract, text.keys(), subject.split_seed, device, listener)
        else:
            names = data or [name for name in (subject.data, *subject.beside) if name]
            joined = stores = processes.main_first(lambda: open_joined(home, names, target or (
                None if data else subject.target), listener))
            model = LanguageModel(source, device_named(device), head=True, dtype=text.get("model_dtype", "auto"))
            through = _stored(joined, model, acts, config.tokens, subject.split_seed)
        name = lasting_name(home, subject.name if sae is None else sae, subject)
        start = Start(name, fingerprint(saved.sae), saved.sae)
        train, test = processes.broadcast_object(lambda: (through.activations(through.train, SAMPLE_TOKENS),
                                                          through.activations(through.test, TEST_TOKENS)))
        return cls(stores, start, through, Sampled(through, train), Sampled(through, test), subject.split_seed)

    def plan(self, config: Finetune, training: TrainingConfig) -> FinetunePlan:
        """The plan of a training; of `training` the seed, device, trackers and the learning rate are used."""
        tokens = self.through.per_step * self.through.plain.mean()
        training = replace(training, lr=RATE if training.lr == "auto" else training.lr, lr_warm_up=0.0, lr_decay=1.0,
                           steps=max(1, round(config.tokens / tokens)), smoothing=0.0, precision="float32",
                           split_seed=self.split_seed, shuffle_seed=training.seed)
        plan = Plan.resolved(self.rows, self.test_rows, training, config, self.start.activation_of(), self.start)
        return FinetunePlan(**{one.name: getattr(plan, one.name) for one in fields(Plan)}, through=self.through)


def _stored(stores: Joined, model: LanguageModel, acts: Hooked, tokens: int, seed: int) -> Through:
    train, test = (stores.inputs[0].split(which, seed=seed) for which in ("train", "test"))
    check_rows(train, model.source)
    if (last := largest(train, "token_id")) >= model.vocabulary:
        raise unfit(train, model.source, f"a token {last}, got token ids below {model.vocabulary}")
    cutter = Windows(model.tokenizer, train.store.meta.source["context"])
    return Through(model, acts, cutter.special, [*stored_windows(train, cutter.prefix, tokens)],
                   [*stored_windows(test, cutter.prefix, TEST_TOKENS)])


def _streamed(home: Home, acts: Hooked, config: ExtractConfig, given: Set[str], seed: int, device: str,
              listener: Listener) -> tuple[Streamed, Through]:
    """Windows of a text, its documents held out by the same hash as in a store."""
    stream, extraction = open_stream(config, given=given, layer=acts.read.layer, site=acts.read.site, device=device,
                                     home=home, listener=listener, whole=True)
    found: tuple[list[list[int]], list[list[int]]] = [], []
    left = [config.rows, TEST_TOKENS]
    cutter = extraction.windows()
    for window in cutter.cut(extraction.text.documents(note=listener.note)):
        part = int(is_test(window.documents[-1:], seed=seed)[0])
        if left[part] > 0:
            found[part].append(window.token_ids.tolist())
            left[part] -= int(window.kept.sum())
        if max(left) <= 0:
            break
    if not all(found):
        raise ConfigError(f"--dataset has too few documents: expected training windows and held-out ones, got "
                          f"{len(found[0])} and {len(found[1])}; name a text of more documents", option="dataset")
    return stream, Through(extraction.model, acts, cutter.special, *found)
