"""Images with their mean and deviation over all pixels taken out, as the paper's code has MNIST.

    python examples/mnist/normalise.py digits|hub|FILE OUT.npy

`hub` fetches MNIST from the Hugging Face hub. Prints how many rows `sae train` will train on, all but a tenth, and how
many pixels there are.
"""

import sys
from pathlib import Path

import numpy as np

from saecli.base.errors import HubError, SaeError, one_line
from saecli.base.machine import why_unreachable
from saecli.store.importing import open_array

MEAN, DEVIATION, WHITE = 0.1307, 0.3081, 255  # of MNIST's training images, as fractions of white


def images(source: str) -> np.ndarray:
    """Pixels as they come, (N, pixels) float32."""
    if source == "hub":
        if (why := why_unreachable()) is not None:
            raise HubError(
                f"cannot fetch MNIST: expected the Hugging Face hub, got {why}; give its file by --data"
            )
        from datasets import load_dataset  # takes seconds to import

        return np.stack(
            [
                np.asarray(image, np.float32).ravel()
                for image in load_dataset("ylecun/mnist", split="train")["image"]
            ]
        )
    return np.concatenate([block.copy() for _, block in open_array(source).blocks()])


def main() -> None:
    source, out = sys.argv[1:]
    try:
        x = images(source)
    except (SaeError, OSError) as error:
        sys.exit(one_line(error))
    mean, deviation = (
        (x.mean(), x.std()) if source == "digits" else (MEAN * WHITE, DEVIATION * WHITE)
    )
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    np.save(out, (x - mean) / deviation)
    print(len(x) - len(x) // 10, x.shape[1])


if __name__ == "__main__":
    main()
