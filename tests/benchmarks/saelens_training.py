"""SAELens' side of `time_to_quality.py`: run by the Python of an environment that has sae-lens.

    python saelens_training.py FOLDER CASE D_SAE STEPS BATCH THREADS L1 RATE ...

FOLDER/train.npy and FOLDER/test.npy hold normalised rows; a case is "relu" or "topk-K". For each learning rate, trains
from memory, saves the SAE as FOLDER/RATE, and prints as JSON the seconds of its training alone, and L0 and FVU on the
test rows. Schedules are those of SAELens' own tutorial: the rate falls over the last fifth of steps, the L1 coefficient
rises over the first twentieth.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from sae_lens.config import SAETrainerConfig
from sae_lens.saes import StandardTrainingSAE, StandardTrainingSAEConfig, TopKTrainingSAE, TopKTrainingSAEConfig
from sae_lens.saes.sae import TrainingSAE
from sae_lens.training.sae_trainer import SAETrainer


def new_sae(case: str, d_in: int, d_sae: int, steps: int, l1: float) -> TrainingSAE:
    """An SAE as SAELens begins it by default, but for its size and its sparsity."""
    if case == "relu":
        return StandardTrainingSAE(StandardTrainingSAEConfig(
            d_in=d_in, d_sae=d_sae, l1_coefficient=l1, l1_warm_up_steps=steps // 20))
    return TopKTrainingSAE(TopKTrainingSAEConfig(d_in=d_in, d_sae=d_sae, k=int(case.removeprefix("topk-"))))


def shuffled(rows: torch.Tensor, batch: int) -> Iterator[torch.Tensor]:
    """Whole batches of rows, every epoch in another order, without end."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for chosen in order[:len(rows) // batch * batch].split(batch):
            yield rows[chosen]


@torch.no_grad()
def measures(sae: TrainingSAE, rows: torch.Tensor) -> dict[str, float]:
    """L0 and FVU on rows, by SAELens' own encoding and decoding."""
    codes = sae.encode(rows)
    error = (sae.decode(codes).double() - rows.double()).square().sum()
    variance = (rows.double() - rows.double().mean(0)).square().sum()
    return {"l0": (codes != 0).sum(1).double().mean().item(), "fvu": (error / variance).item()}


def main() -> None:
    """Train at each rate."""
    folder, case = Path(sys.argv[1]), sys.argv[2]
    d_sae, steps, batch, threads = map(int, sys.argv[3:7])
    torch.set_num_threads(threads)
    train, test = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("train", "test"))
    found = []
    for rate in sys.argv[8:]:
        torch.manual_seed(0)
        sae = new_sae(case, train.shape[1], d_sae, steps, float(sys.argv[7]))
        config = SAETrainerConfig(total_training_samples=steps * batch, train_batch_size_samples=batch, lr=float(rate),
                                  lr_end=float(rate) / 10, lr_decay_steps=steps // 5)
        trainer = SAETrainer(config, sae, shuffled(train, batch))
        started = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - started
        sae.save_inference_model(folder / rate)
        found.append({"rate": rate, "seconds": seconds, **measures(sae.eval(), test)})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
