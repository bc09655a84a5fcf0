"""SAEs made of SAEs.

functions.py the public functions, whose arguments are the commands' options
refit.py     the optimal decoder for given rows
export.py    an SAE in another library's format, in a folder or on the hub
"""
