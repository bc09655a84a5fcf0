"""The spline of SAEs measured on rows: what `sae geometry` finds out, draws and shows.

`rows.py` chooses rows, `measures.py` measures, `picture.py` draws one SAE, `tables.py` shows documents to people.
"""
