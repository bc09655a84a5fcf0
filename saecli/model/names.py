"""Names of models and of their dtypes. Imports neither NumPy nor torch: help pages are fast."""

from pathlib import Path
from typing import Literal, get_args

TINY_GEMMA2 = "tiny-gemma2"
BUNDLED = {TINY_GEMMA2: Path(__file__).parents[1] / "assets" / TINY_GEMMA2}
ModelDtype = Literal["auto", "float32", "bfloat16", "float16"]
MODEL_DTYPES: tuple[str, ...] = get_args(ModelDtype)
