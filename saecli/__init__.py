"""saecli: sparse autoencoders from a language model's activations, trained, evaluated and understood."""

__version__ = "0.1.0"
