"""The spline that an SAE is: cells, power diagrams, margins, references and pictures.

Source of all of it: Budd et al., "SplInterp: Improving our Understanding and Training of Sparse
Autoencoders" (2025), arXiv:2505.11836, called "the paper" throughout.
"""
