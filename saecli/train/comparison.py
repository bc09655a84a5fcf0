"""With `--init`: the SAE that training begins with against the one that it ends with; the better one is kept."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ..base.devices import moved
from ..base.processes import Communicator
from ..base.words import number
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
    scale: Tensor | None  # of the metric of the SAE before
    measures: dict[str, Any] = field(default_factory=dict)  # before, after, and which is kept

    @classmethod
    def of(
        cls, start: Start, initial: SAE, normalisation: Normalisation, state: Mapping[str, Tensor]
    ) -> Self:
        """A comparison with `initial`, or, on resuming, with the checkpoint's SAE from before training."""
        factor, scale = 1.0, None if start.sae is None else start.sae.scale
        if state:
            scale = state.get("start.scale")
            factor = float(state.get("start.factor", 1.0))
            tensors = initial.tensors().items()
            kept = {name: state[f"start.{name}"].to(own) for name, own in tensors}
            initial = initial.changed(None, **kept)
        elif start.sae is not None:
            norm = start.sae.W_enc.to(initial.W_enc).norm()
            factor = (on_raw_rows(initial, normalisation).W_enc.norm() / norm).item()
        return cls(initial, factor, normalisation, scale)

    def choose(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Keep the SAE of less `loss`, given the measures of both."""
        kept = "after" if after["loss"] <= before["loss"] else "before"
        self.measures = {"before": before, "after": after, "kept": kept}

    def notes(self) -> list[str]:
        if not self.keeps_before:
            return []
        before, after = (number(self.measures[name]["loss"]) for name in ("before", "after"))
        return [
            f"training did not lower the loss, {before} to {after}: the SAE's weights are kept as they were; train "
            "on more rows, or with a lower --lr"
        ]

    @property
    def keeps_before(self) -> bool:
        return self.measures.get("kept") == "before"

    def sae(self, dictionary: Dictionary) -> SAE:
        """The SAE on raw rows: of the trained dictionary, or the one before if that is kept."""
        if not self.keeps_before:
            return self._on_raw_rows(dictionary)
        before = self._on_raw_rows(self.before)
        before.scale = self.scale
        return before

    def _on_raw_rows(self, dictionary: Dictionary) -> SAE:
        sae = rescaled(dictionary.sae().without_training_parameters(), 1 / self.factor)
        return on_raw_rows(sae, self.normalisation)

    def saes(self, after: Dictionary) -> list[SAE]:
        """Both on raw rows, with the metric of this training."""
        return [self._on_raw_rows(self.before), self._on_raw_rows(after)]

    def measured(
        self, plan: Plan, after: Dictionary, communicator: Communicator
    ) -> list[dict[str, Any]]:
        """Both SAEs' measures, and their mean `loss` as dictionaries of normalised rows, by one pass over rows kept out
        of training, else over training rows."""
        sparsity, weight = plan.training.sparsity or "none", plan.training.sparsity_weight or 0.0
        # Of the penalty, such as the price of excess L0 that training found.
        penalty = self.before.activation.penalty(sparsity)
        learned = {name: getattr(after, name) for name in penalty.initial(1)}
        on_normalised_rows = [self.before.changed(None, **learned), after]
        saes, mean = self.saes(after), self.normalisation.mean
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

    def state(self) -> dict[str, Tensor]:
        tensors = self.before.tensors()
        tensors["factor"] = torch.tensor(self.factor, dtype=torch.float64)
        if self.scale is not None:
            tensors["scale"] = self.scale
        return {f"start.{name}": tensor for name, tensor in tensors.items()}
