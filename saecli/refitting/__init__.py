"""Refitting: an SAE keeps its encoder and gets the exact decoder for given rows; `decoder.py` solves for it, `refit.py`
measures it and saves a run."""
