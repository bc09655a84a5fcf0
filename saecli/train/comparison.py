"""Before and after: the SAE that training begins with, `--init`, against the one that it ends with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ..base.devices import moved
from ..base.errors import number
from ..base.processes import Communicator
from ..sae.dictionary import SAE, Batch, Dictionary
from ..sae.metrics import reconstructions
from .plan import Plan
from .rows import Normalisation, on_raw_rows, raw_batches
from .start import Start, rescaled


@dataclass(eq=False)
class Comparison:
    """Keeps the SAE of less loss, which training minimises, of the two."""

    before: SAE  # on normalised rows, its codes times `factor`
    factor: float
    normalisation: Normalisation
    measures: dict[str, Any] = field(default_factory=dict)  # before, after, and which is kept

    @classmethod
    def of(
        cls, start: Start, initial: SAE, normalisation: Normalisation, state: Mapping[str, Tensor]
    ) -> Self:
        """Of a training that begins with `initial`, or resumes from a checkpoint."""
        factor = 1.0
        if state:
            factor = float(state.get("begun.factor", 1.0))
            kept = {name: state[f"begun.{name}"] for name in initial.tensors()}
            initial = initial.changed(None, **kept)
        elif start.sae is not None:
            norm = start.sae.W_enc.to(initial.W_enc).norm()
            factor = (on_raw_rows(initial, normalisation).W_enc.norm() / norm).item()
        return cls(initial, factor, normalisation)

    @property
    def keeps_before(self) -> bool:
        return self.measures.get("kept") == "before"

    def sae(self, dictionary: Dictionary) -> SAE:
        """The SAE on raw rows: of the trained dictionary, or the one before if that is kept."""
        return self._on_raw_rows(self.before if self.keeps_before else dictionary)

    def _on_raw_rows(self, dictionary: Dictionary) -> SAE:
        sae = rescaled(dictionary.sae().without_training_parameters(), 1 / self.factor)
        return on_raw_rows(sae, self.normalisation)

    def saes(self, after: Dictionary) -> list[SAE]:
        """Both on raw rows."""
        return [self._on_raw_rows(self.before), self._on_raw_rows(after)]

    def choose(self, measures: list[dict[str, Any]]) -> None:
        """Keep the SAE of less `loss`, given the measures before and after."""
        before, after = measures
        kept = "after" if after["loss"] <= before["loss"] else "before"
        self.measures = {"before": before, "after": after, "kept": kept}

    def measured(
        self, plan: Plan, after: Dictionary, communicator: Communicator
    ) -> list[dict[str, Any]]:
        """Both SAEs' measures, and their mean `loss` as dictionaries of normalised rows, by one pass over rows kept out
        of training, else over training rows."""
        # Of the penalty, such as the price of excess L0 that training found.
        penalty = self.before.activation.penalty(plan.training.sparsity or "none")
        learned = {name: getattr(after, name) for name in penalty.initial(1)}
        on_normalised_rows = [self.before.changed(None, **learned), after]
        saes = self.saes(after)
        mean = self.normalisation.mean
        sparsity, weight = plan.training.sparsity or "none", plan.training.sparsity_weight or 0.0
        total = torch.zeros(1 + len(saes), dtype=torch.float64, device=mean.device)

        def batches() -> Iterator[Tensor]:
            for raw in raw_batches(plan.kept_out or plan.train_rows, communicator):
                rows = self.normalisation(moved(raw, mean.device).to(mean.dtype))
                batch = Batch.of(rows, saes[0].d_in)
                total[0] += batch.size
                for index, dictionary in enumerate(on_normalised_rows, 1):
                    loss = dictionary.loss(batch, sparsity, weight).value
                    total[index] += batch.size * loss.double()
                yield raw

        measures = reconstructions(saes, batches(), communicator)
        count, *losses = communicator.all_reduce(total).tolist()
        for measured, loss in zip(measures, losses, strict=True):
            measured["loss"] = loss / count
        return measures

    def notes(self) -> list[str]:
        if not self.keeps_before:
            return []
        before, after = (number(self.measures[name]["loss"]) for name in ("before", "after"))
        return [
            f"training did not lower the loss, {before} to {after}: the SAE is kept as it was; train on "
            "more rows, or with a lower --lr"
        ]

    def state(self) -> dict[str, Tensor]:
        tensors = self.before.tensors()
        tensors["factor"] = torch.tensor(self.factor, dtype=torch.float64)
        return {f"begun.{name}": tensor for name, tensor in tensors.items()}
