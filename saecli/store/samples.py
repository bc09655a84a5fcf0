"""Arrays that come with scikit-learn."""

from collections.abc import Callable

import numpy as np

from ..base.errors import FormatError
from .arrays import ArraySource

SQUARE, PATCH, PATCHES_PER_SQUARE = 32, 16, 8  # pixels, pixels, patches


def _digits() -> ArraySource:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels, with their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return ArraySource(images.shape, "float32", images.__getitem__, labels.astype(np.int64))


def _patches() -> ArraySource:
    """Patches of scikit-learn's two photographs, in grey, each less its mean.

    Every square of a photograph's grid is a document of 8 patches, at positions drawn with a fixed seed, so that no
    pixel is both in training patches and in held-out ones. Norms of rows vary 200-fold.
    """
    from sklearn.datasets import load_sample_images

    try:
        photographs = load_sample_images().images
    except ImportError as error:
        raise FormatError("reading the photographs that patches are cut from needs Pillow, which is not installed; "
                          "install it with `pip install pillow`") from error
    random, offsets = np.random.default_rng(0), SQUARE - PATCH + 1
    rows: list[np.ndarray] = []
    for grey in (photograph.mean(-1) for photograph in photographs):
        windows = np.lib.stride_tricks.sliding_window_view(grey, (PATCH, PATCH))
        for top in range(0, grey.shape[0] - SQUARE + 1, SQUARE):
            for left in range(0, grey.shape[1] - SQUARE + 1, SQUARE):
                chosen = random.choice(offsets**2, PATCHES_PER_SQUARE, replace=False)
                rows.extend(windows[top + chosen // offsets, left + chosen % offsets])
    patches = np.stack(rows).reshape(len(rows), -1)
    centred = (patches - patches.mean(1, keepdims=True)).astype(np.float32)
    documents = np.arange(len(rows), dtype=np.int64) // PATCHES_PER_SQUARE
    return ArraySource(centred.shape, "float32", centred.__getitem__, documents=documents)


SAMPLES: dict[str, Callable[[], ArraySource]] = {"digits": _digits, "patches": _patches}
