"""SAEs made of SAEs.

refit.py     an SAE with the decoder that is optimal for given rows
export.py    an SAE in the format of another library, in a folder or on the hub
"""
