"""SAEs measured on rows: reconstruction, sparsity, the effect on a language model, and which of several come out best.

`sae_and_rows.py` brings an SAE and its rows together, `evaluate.py` measures, `comparing.py` tells
which no other beats, and shows the results to people.
"""
