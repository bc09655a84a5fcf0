"""SAELens' side of `features.py` and `training_speed.py`: run by the Python of an environment that has sae-lens.

    python saelens_training.py FOLDER CASE D_SAE STEPS BATCH RATE [--seed 0] [--decay 0.2] [--threads 1]
    python saelens_training.py steps D_IN D_SAE BATCH STEPS THREADS DEVICE CASE ...

A case is "relu", "topk-K", "batchtopk-K", "matryoshka-K", which has levels of `PARTS` of D_SAE, or "jumprelu-L0", with
SAELens' quadratic penalty about a target L0; "-whitened" after it is SAELens' own whitening of the rows. The first
trains on FOLDER/train.npy, normalised rows in memory, saves the SAE as FOLDER/RATE, and prints as JSON the seconds of
processor time of its training alone, the fraction of latents that it counts as dead, and L0 and FVU on FOLDER/test.npy.
The schedule is that of SAELens' own tutorial: the rate falls to zero over the last steps (--decay); all else is its
default. The second prints as JSON the least seconds of a full training step of each case, after two others; a case may
end in "-bf16" for SAELens' own autocast to bfloat16.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sae_lens.config import SAETrainerConfig
from sae_lens.saes import (
    SAE,
    BatchTopKTrainingSAE,
    BatchTopKTrainingSAEConfig,
    JumpReLUTrainingSAE,
    JumpReLUTrainingSAEConfig,
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


def new_sae(case: str, d_in: int, d_sae: int, **topk: Any) -> TrainingSAE:
    """An SAE as SAELens begins it by default, but for its size, its sparsity, and what is given for topk."""
    shape: dict[str, Any] = {"d_in": d_in, "d_sae": d_sae}
    if case.endswith("-whitened"):
        shape["normalize_activations"] = "covariance_whitening"
    kind, _, k = case.removesuffix("-whitened").partition("-")
    if kind == "relu":
        return StandardTrainingSAE(StandardTrainingSAEConfig(**shape, l1_coefficient=1.0))
    if kind == "topk":
        return TopKTrainingSAE(TopKTrainingSAEConfig(**shape, k=int(k), **topk))
    if kind == "jumprelu":
        target = {"jumprelu_sparsity_loss_mode": "quadratic", "target_l0": float(k)}
        return JumpReLUTrainingSAE(JumpReLUTrainingSAEConfig(**shape, **target))
    if kind == "batchtopk":
        return BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(**shape, k=float(k)))
    return MatryoshkaBatchTopKTrainingSAE(
        MatryoshkaBatchTopKTrainingSAEConfig(
            **shape, k=float(k), matryoshka_widths=[d_sae // part for part in PARTS]
        )
    )


def least_step(case: str, d_in: int, d_sae: int, batch: int, steps: int, device: str) -> float:
    """The least seconds of a step of a case."""
    # Without topk's loss on dead latents and its rescaling by norms, which the other side has not either.
    sae = new_sae(
        case.removesuffix("-bf16"),
        d_in,
        d_sae,
        aux_loss_coefficient=0.0,
        rescale_acts_by_decoder_norm=False,
    ).to(device)
    rows = torch.randn(batch, d_in, generator=torch.Generator().manual_seed(0)).to(device)
    config = SAETrainerConfig(
        total_training_samples=10**9,
        train_batch_size_samples=batch,
        lr=1e-3,
        lr_end=1e-4,
        autocast=case.endswith("-bf16"),
        device=device,
    )
    trainer = SAETrainer(config, sae, repeat(rows))
    taken = []
    for _ in range(steps + 2):
        started = time.perf_counter()
        trainer.step(rows)
        trainer.n_training_steps += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return min(taken[2:])


def shuffled(rows: torch.Tensor, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Whole batches of rows, every epoch in another order, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for chosen in order[: len(rows) // batch * batch].split(batch):
            yield rows[chosen]


@torch.no_grad()
def measures(sae: SAE, rows: torch.Tensor) -> dict[str, float]:
    """L0 and FVU on rows, by SAELens' own encoding and decoding."""
    codes = sae.encode(rows)
    error = (sae.decode(codes).double() - rows.double()).square().sum()
    variance = (rows.double() - rows.double().mean(0)).square().sum()
    return {"l0": (codes != 0).sum(1).double().mean().item(), "fvu": (error / variance).item()}


def main() -> None:
    """Train, or time steps."""
    if sys.argv[1] == "steps":
        d_in, d_sae, batch, steps, threads = map(int, sys.argv[2:7])
        device, *cases = sys.argv[7:]
        torch.set_num_threads(threads)
        found = {case: least_step(case, d_in, d_sae, batch, steps, device) for case in cases}
        print(json.dumps(found))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("case")
    for name in ("d_sae", "steps", "batch"):
        parser.add_argument(name, type=int)
    parser.add_argument("rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decay", type=float, default=0.2)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    train, test = (
        torch.from_numpy(np.load(chosen.folder / f"{name}.npy")) for name in ("train", "test")
    )
    torch.manual_seed(chosen.seed)
    sae = new_sae(chosen.case, train.shape[1], chosen.d_sae)
    rate = float(chosen.rate)
    config = SAETrainerConfig(
        total_training_samples=chosen.steps * chosen.batch,
        lr=rate,
        lr_end=rate / 10,
        train_batch_size_samples=chosen.batch,
        lr_decay_steps=int(chosen.decay * chosen.steps),
    )
    trainer = SAETrainer(config, sae, shuffled(train, chosen.batch, chosen.seed))
    started = time.process_time()
    trainer.fit()
    spent = time.process_time() - started
    sae.save_inference_model(chosen.folder / chosen.rate)
    print(
        json.dumps(
            {"processor": spent, "dead": trainer.dead_neurons.double().mean().item()}
            | measures(SAE.load_from_disk(chosen.folder / chosen.rate), test)
        )
    )


if __name__ == "__main__":
    main()
