"""SAEs made of SAEs.

functions.py the public functions: their arguments, which are the commands' options
refit.py     an SAE with the decoder that is optimal for given rows
export.py    an SAE in the format of another library, in a folder or on the hub
"""
