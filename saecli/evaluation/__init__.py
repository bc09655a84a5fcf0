"""SAEs measured on rows: reconstruction, sparsity, the effect on a language model, a comparison of several, and how far
those that differ in seed learn the same latents.

`sae_and_rows.py` opens an SAE and its rows, `placing.py` an SAE and its places in a language model; `evaluate.py`
measures, `comparing.py` marks the SAEs that no other beats and formats the results; `matching.py` matches latents one
to one, and `stability.py` measures runs by it.
"""
