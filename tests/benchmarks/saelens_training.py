"""SAELens' side of benchmarks that train it on a store's rows, `saelens_saes.py`: run by the Python of an environment
that has sae-lens.

    python saelens_training.py FOLDER CASE D_SAE STEPS BATCH RATE ... [--threads 1] [--l1 1] [--seed 0] [--decay 0.2]

FOLDER/train.npy and FOLDER/test.npy hold normalised rows; a case is "relu", "topk-K", "batchtopk-K" or "matryoshka-K",
which has levels of `PARTS` of D_SAE. For each learning rate, trains from memory, saves the SAE as FOLDER/RATE, and
prints as JSON the seconds of its training alone, on the clock and of the processor, the fraction of latents that it
counts as dead, and L0 and FVU on the test rows. Schedules are those of SAELens' own tutorial: the rate falls to zero
over the last fifth of steps (--decay), the L1 coefficient rises over the first twentieth; all else is its default.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from sae_lens.config import SAETrainerConfig
from sae_lens.saes import (
    SAE,
    BatchTopKTrainingSAE,
    BatchTopKTrainingSAEConfig,
    MatryoshkaBatchTopKTrainingSAE,
    MatryoshkaBatchTopKTrainingSAEConfig,
    StandardTrainingSAE,
    StandardTrainingSAEConfig,
    TopKTrainingSAE,
    TopKTrainingSAEConfig,
)
from sae_lens.saes.sae import TrainingSAE
from sae_lens.training.sae_trainer import SAETrainer

PARTS = (16, 4, 2, 1)  # a level of a Matryoshka SAE has one in so many of its latents


def new_sae(case: str, d_in: int, d_sae: int, steps: int, l1: float) -> TrainingSAE:
    """An SAE as SAELens begins it by default, but for its size and its sparsity."""
    shape = {"d_in": d_in, "d_sae": d_sae}
    kind, _, k = case.partition("-")
    if kind == "relu":
        return StandardTrainingSAE(StandardTrainingSAEConfig(
            **shape, l1_coefficient=l1, l1_warm_up_steps=steps // 20))
    if kind == "topk":
        return TopKTrainingSAE(TopKTrainingSAEConfig(**shape, k=int(k)))
    if kind == "batchtopk":
        return BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(**shape, k=float(k)))
    return MatryoshkaBatchTopKTrainingSAE(MatryoshkaBatchTopKTrainingSAEConfig(
        **shape, k=float(k), matryoshka_widths=[d_sae // part for part in PARTS]))


def shuffled(rows: torch.Tensor, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Whole batches of rows, every epoch in another order, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for chosen in order[:len(rows) // batch * batch].split(batch):
            yield rows[chosen]


@torch.no_grad()
def measures(sae: SAE, rows: torch.Tensor) -> dict[str, float]:
    """L0 and FVU on rows, by SAELens' own encoding and decoding."""
    codes = sae.encode(rows)
    error = (sae.decode(codes).double() - rows.double()).square().sum()
    variance = (rows.double() - rows.double().mean(0)).square().sum()
    return {"l0": (codes != 0).sum(1).double().mean().item(), "fvu": (error / variance).item()}


def main() -> None:
    """Train at each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("case")
    for name in ("d_sae", "steps", "batch"):
        parser.add_argument(name, type=int)
    parser.add_argument("rates", nargs="+")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--l1", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decay", type=float, default=0.2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    train, test = (torch.from_numpy(np.load(chosen.folder / f"{name}.npy")) for name in ("train", "test"))
    found = []
    for rate in chosen.rates:
        torch.manual_seed(chosen.seed)
        sae = new_sae(chosen.case, train.shape[1], chosen.d_sae, chosen.steps, chosen.l1)
        config = SAETrainerConfig(total_training_samples=chosen.steps * chosen.batch,
                                  train_batch_size_samples=chosen.batch, lr=float(rate), lr_end=float(rate) / 10,
                                  lr_decay_steps=int(chosen.decay * chosen.steps))
        trainer = SAETrainer(config, sae, shuffled(train, chosen.batch, chosen.seed))
        started, processor = time.perf_counter(), time.process_time()
        trainer.fit()
        spent = {"seconds": time.perf_counter() - started, "processor": time.process_time() - processor}
        sae.save_inference_model(chosen.folder / rate)
        dead = {"dead": trainer.dead_neurons.double().mean().item()}
        found.append({"rate": rate} | spent | dead | measures(SAE.load_from_disk(chosen.folder / rate), test))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
