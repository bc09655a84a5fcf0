"""A language model: where it is, its tokenizer, modules and hook points, and forward passes.

source.py           where a model is: bundled, a folder, a GGUF file, the hub, loaded by the user
choice.py           which of these is meant
tokenizer.py        special tokens, token ids as text
families.py         names of modules and hook points, by family
saes.py             SAEs opened on rows
blocks.py           the residual stream in a block, by autograd's graph
modules.py          modules and sites by name, activations there
language_model.py   a model and its forward passes
windows.py          batches of windows of tokens
unembedding.py      tokens that a direction promotes

Imports neither NumPy nor torch: help pages are fast.
"""

from typing import Literal, get_args

from ..base.home import ASSETS, TINY_GEMMA2

BUNDLED = {TINY_GEMMA2: ASSETS / TINY_GEMMA2}
ModelDtype = Literal["auto", "float32", "bfloat16", "float16"]
MODEL_DTYPES: tuple[str, ...] = get_args(ModelDtype)
