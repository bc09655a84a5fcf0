"""SAEs measured on rows: reconstruction, sparsity, the effect on a language model, and a comparison of several.

`sae_and_rows.py` opens an SAE and its rows, `evaluate.py` measures, `comparing.py` marks the SAEs that no other beats
and formats the results.
"""
