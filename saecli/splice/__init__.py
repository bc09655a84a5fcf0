"""SAEs within a language model's forward pass.

placement.py     where an SAE acts, and in which model
passes.py        forward passes in parts, with activations replaced
copies.py        changes at single tokens, many in one forward pass
effects.py       CE and KL with SAEs in place of activations
spliced.py       saecli.spliced: SAEs in a loaded model, their codes edited
"""
