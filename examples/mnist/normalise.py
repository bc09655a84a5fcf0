"""Images with the mean and deviation of MNIST's pixels taken out, as the paper's code has them.

    python examples/mnist/normalise.py digits|hub|FILE OUT.npy

`hub` fetches MNIST from the Hugging Face hub. Pixels may be fractions of white or whole numbers up to 255; `digits` has
its own mean and deviation. Prints the number of rows that `sae train` will train on, all but a tenth, and of pixels.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from saecli.base.errors import ConfigError, HubError, SaeError, one_line
from saecli.base.machine import why_unreachable
from saecli.store.importing import open_array

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training images, as fractions of white
WHITE = 255.0


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
    return np.concatenate([block["rows"] for _, block in open_array(source).blocks()])


def white_of(x: np.ndarray) -> float:
    """The value of a white pixel: 1 or 255, by the range of the pixels."""
    low, high = float(x.min()), float(x.max())
    if low < 0 or not 0.5 < high <= WHITE or 1 < high < 128:
        raise ConfigError(
            f"cannot tell the scale of pixels from {low:g} to {high:g}: expected black at 0, and white at 1 or 255; "
            "divide by the value of white"
        )
    return 1.0 if high <= 1 else WHITE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="digits|hub|FILE")
    parser.add_argument("out", type=Path, metavar="OUT.npy")
    given = parser.parse_args()
    try:
        x = images(given.source)
        if given.source == "digits":
            mean, deviation = x.mean(), x.std()
        else:
            mean, deviation = np.array([MEAN, DEVIATION], np.float32) * white_of(x)
    except (SaeError, OSError) as error:
        sys.exit(one_line(error))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    np.save(given.out, (x - mean) / deviation)
    print(len(x) - len(x) // 10, x.shape[1])


if __name__ == "__main__":
    main()
