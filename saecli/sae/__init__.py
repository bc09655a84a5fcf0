"""Sparse autoencoders: the model, its measures and its files.

codes.py              Codes: an activation's output, dense or sparse, and every product with it
dictionary.py         Batch, Normalisation; Dictionary, SAE, Coupled; the loss
activations/          relu to matching-pursuit, with parameters, gradients and penalties
metrics.py            FVU, L0 and firing of latents, accumulated over batches
formats/              files of SAEs, this tool's own and other libraries'
hub.py                fetching from and uploading to the Hugging Face hub
run_documents.py      run.json, as far as it describes an SAE
library.py            the SAE that a user names: a run, a folder, on the hub, in SAELens' registry
"""
