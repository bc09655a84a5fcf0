"""Places in a model, and names of models: what needs no model, and so not transformers.

The sites of block L, counted from 0:

    resid_pre     the block's input: `hidden_states[L]`, which the paper's code takes
    resid_post    the block's output: Gemma Scope's layer L, SAELens' `blocks.L.hook_resid_post`
    attn_out      attention's addition to the residual stream
    mlp_in        the MLP's input, after its norm
    mlp_out       the MLP's addition to the residual stream
"""

from pathlib import Path
from typing import NamedTuple

TINY_GEMMA2 = "tiny-gemma2"
BUNDLED = {TINY_GEMMA2: Path(__file__).parents[1] / "assets" / TINY_GEMMA2}
MODEL_DTYPES = ("float32", "bfloat16", "float16")
SITES = ("resid_post", "resid_pre", "mlp_in", "mlp_out", "attn_out")


class Place(NamedTuple):
    """A site of a block.

    Args:
        layer: the block, from 0.
        site: one of `SITES`.
    """

    layer: int
    site: str
