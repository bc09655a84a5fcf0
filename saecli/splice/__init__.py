"""SAEs within a language model's forward pass.

hooked.py        where an SAE acts in a model, and which model that is
passes.py        forward passes in parts; CE and KL with an SAE in place of the activations
together.py      several SAEs in one forward pass
spliced.py       saecli.spliced: SAEs in the forward passes of a loaded model; their codes, edited
generation.py    continuations of a prompt
"""
