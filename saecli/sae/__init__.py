"""Sparse autoencoders: what they are, how well they do, and how they are stored.

codes.py              Codes: an activation's output, dense or sparse, and every product with it
dictionary.py         Batch; the model: Dictionary, SAE, Coupled; its loss
activations/          relu to matching-pursuit, with parameters, gradients and penalties
metrics.py            FVU, L0 and firing of latents, accumulated over batches
formats/              files of SAEs, this tool's own and other libraries'
hub.py                fetching from and uploading to the Hugging Face hub
registry.py           SAEs by release and id of SAELens
run_documents.py      run.json, as far as it describes an SAE
library.py            the SAE that a user names: a run, a folder, a place on the hub
"""
