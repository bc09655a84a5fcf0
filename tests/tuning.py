"""The text of the tests of fine-tuning and of sets: its training windows make one step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import random_letters

from saecli.store.split import Split
from saecli.train.options import TRAINED

LENGTH, WINDOWS = 15, 205  # windows that make one step, without those held out


def written_texts(path: Path) -> dict[str, Any]:
    """The options of an extraction from a file of texts of a window each, `WINDOWS` of which are trained on."""
    draw, texts, training = np.random.default_rng(0), [], 0
    while training < WINDOWS:
        training += Split("train", TRAINED, seed=0).keeps(np.array([len(texts)]))[0]
        texts.append(random_letters(draw, LENGTH))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"dataset": str(path), "context": LENGTH + 1, "dtype": "float32"}
