"""What SAELens makes of worlds: run with its Python by `test_worlds_saelens.py`.

    saelens_synthetic.py score TRUTH.npz SAE ...  prints the scores of each SAE, a JSON line each
    saelens_synthetic.py save FOLDER KIND ROWS    saves a world in FOLDER, and samples of its codes in FOLDER/codes.npz
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from sae_lens import SAE
from sae_lens.synthetic import (
    ExponentialMagnitudeConfig,
    FeatureDictionary,
    FoldedNormalMagnitudeConfig,
    HierarchyConfig,
    LinearMagnitudeConfig,
    LowRankCorrelationConfig,
    SyntheticModel,
    SyntheticModelConfig,
    ZipfianFiringProbabilityConfig,
    eval_sae_on_synthetic_data,
)

BATCH = 500
HIERARCHIES = {
    "flat": None,
    "tree": HierarchyConfig(4, 3, 2, compensate_probabilities=True),
    "exclusive": HierarchyConfig(4, 3, 2, 1.0, compensate_probabilities=True, scale_children_by_parent=True),
}
MEANS = {"flat": LinearMagnitudeConfig(1.0, 2.0), "tree": 1.0, "exclusive": ExponentialMagnitudeConfig(1.0, 2.0)}


class Replay:
    """Stands for a generator: gives codes that are there already, (R, G), batch by batch."""

    def __init__(self, codes: torch.Tensor) -> None:
        self._codes, self._at = codes, 0

    def sample(self, rows: int) -> torch.Tensor:
        self._at += rows
        return self._codes[self._at - rows : self._at]


def score(truth: str, *saes: str) -> None:
    arrays = {name: torch.from_numpy(array) for name, array in np.load(truth).items()}
    features, d_in = arrays["directions"].shape
    world = FeatureDictionary(features, d_in, bias=True, initializer=None)
    world.feature_vectors.data, world.bias.data = arrays["directions"], arrays["bias"]
    for folder in saes:
        found = eval_sae_on_synthetic_data(SAE.load_from_disk(folder), world, Replay(arrays["codes"]),
                                           len(arrays["codes"]), BATCH)
        print(json.dumps(found.to_dict()))


def save(folder: str, kind: str, rows: str) -> None:
    config = SyntheticModelConfig(
        num_features=60, hidden_dim=12, firing_probability=ZipfianFiringProbabilityConfig(0.5, 0.4, 0.02),
        hierarchy=HIERARCHIES[kind], correlation=LowRankCorrelationConfig(rank=5, correlation_scale=0.3),
        std_firing_magnitudes=FoldedNormalMagnitudeConfig(0.3, 0.2), mean_firing_magnitudes=MEANS[kind], bias=2.0,
        seed=3)
    model = SyntheticModel(config)
    model.save(folder)
    torch.manual_seed(0)
    x, codes = SyntheticModel.load_from_disk(folder).sample_with_features(int(rows))
    np.savez(Path(folder) / "codes.npz", codes=codes.numpy(), x=x.numpy())


if __name__ == "__main__":
    {"score": score, "save": save}[sys.argv[1]](*sys.argv[2:])
