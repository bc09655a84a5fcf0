"""FVU, L0, KL in the model, features found, stability, probes, controls."""
