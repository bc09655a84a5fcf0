"""Controls: the training of a run without the part, or the structure, that its result is credited to; `rows.py` makes
the rows of those that need other ones, `controls.py` trains and measures all."""
