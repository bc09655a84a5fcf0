"""SAEs within a language model's forward pass.

placement.py     where an SAE acts in a model, and which model that is
passes.py        forward passes in parts, with activations replaced, and their losses
effects.py       CE and KL with SAEs in place of the activations, one at a time or together
spliced.py       saecli.spliced: SAEs in the forward passes of a loaded model; their codes, edited
"""
