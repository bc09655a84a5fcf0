"""Names of models and of their dtypes. Imports neither NumPy nor torch: help pages are fast."""

from pathlib import Path
from typing import Literal, get_args

TINY_GEMMA2 = "tiny-gemma2"
BUNDLED = {TINY_GEMMA2: Path(__file__).parents[1] / "assets" / TINY_GEMMA2}
ModelDtype = Literal["auto", "float32", "bfloat16", "float16"]
MODEL_DTYPES: tuple[str, ...] = get_args(ModelDtype)


def at_revision(model: str, revision: str | None) -> str:
    """A model's name with a revision, as `find_model` takes it."""
    return f"{model}@{revision}" if revision else model
