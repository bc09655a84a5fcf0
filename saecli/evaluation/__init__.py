"""SAEs measured on rows: reconstruction, sparsity, the effect on a language model, and which of several come
out best, and how far those that differ in seed learn the same latents.

`sae_and_rows.py` brings an SAE and its rows together, `evaluate.py` measures, `comparing.py` tells
which no other beats, and shows the results to people; `matching.py` matches latents one to one, and `stability.py`
measures runs by it.
"""
