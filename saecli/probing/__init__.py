"""Sparse probing: how well labels of texts are read from an SAE's latents, and from the activations themselves.

`sets.py` reads the labelled texts, `rows.py` runs the model over them, `probes.py` fits and measures, `probe.py` puts
these together for `sae probe`.
"""
