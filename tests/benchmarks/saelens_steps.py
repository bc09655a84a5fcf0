"""SAELens' side of `training_speed.py`: run by the Python of an environment that has sae-lens.

    python saelens_steps.py D_IN D_SAE BATCH STEPS THREADS CASE ...

A case is "relu" or "topk-K", with "-bf16" behind it for SAELens' own autocast to bfloat16. Prints, as JSON, the least
seconds of a full training step of each, after two others.
"""

import json
import sys
import time
from collections.abc import Iterator

import torch
from sae_lens.config import SAETrainerConfig
from sae_lens.saes import StandardTrainingSAE, StandardTrainingSAEConfig, TopKTrainingSAE, TopKTrainingSAEConfig
from sae_lens.training.sae_trainer import SAETrainer


def least_step(case: str, d_in: int, d_sae: int, batch: int, steps: int) -> float:
    """The least seconds of a step of a case."""
    shape, autocast = {"d_in": d_in, "d_sae": d_sae}, case.endswith("-bf16")
    case = case.removesuffix("-bf16")
    if case == "relu":
        sae = StandardTrainingSAE(StandardTrainingSAEConfig(**shape, l1_coefficient=1.0))
    else:
        k = int(case.removeprefix("topk-"))
        # Without its loss on dead latents and its rescaling by norms, which the other side has not either.
        sae = TopKTrainingSAE(TopKTrainingSAEConfig(**shape, k=k, aux_loss_coefficient=0.0,
                                                    rescale_acts_by_decoder_norm=False))
    rows = torch.randn(batch, d_in, generator=torch.Generator().manual_seed(0))

    def provider() -> Iterator[torch.Tensor]:
        while True:
            yield rows

    config = SAETrainerConfig(total_training_samples=10**9, train_batch_size_samples=batch, lr=1e-3, lr_end=1e-4,
                              autocast=autocast)
    trainer = SAETrainer(config, sae, provider())
    taken = []
    for _ in range(steps + 2):
        started = time.perf_counter()
        trainer.step(rows)
        trainer.n_training_steps += 1
        taken.append(time.perf_counter() - started)
    return min(taken[2:])


def main() -> None:
    """Print the JSON."""
    d_in, d_sae, batch, steps, threads = map(int, sys.argv[1:6])
    torch.set_num_threads(threads)
    print(json.dumps({case: least_step(case, d_in, d_sae, batch, steps) for case in sys.argv[6:]}))


if __name__ == "__main__":
    main()
