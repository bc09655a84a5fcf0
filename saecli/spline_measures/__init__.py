"""The spline of SAEs measured on rows, for `sae geometry`.

`measures.py` chooses rows and measures, `geometry.py` draws, `tables.py` formats documents as tables.
"""
