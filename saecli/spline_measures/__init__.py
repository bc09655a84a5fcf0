"""The spline of SAEs measured on rows: what `sae geometry` finds out, draws and shows.

`measures.py` chooses rows and measures, `geometry.py` draws, `tables.py` shows documents to people.
"""
