"""A language model run with latents of an SAE changed: `steering.py` is the hook, `generation.py` compares texts."""
