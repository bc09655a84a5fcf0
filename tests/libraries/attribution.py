"""A set of transcoders in circuit-tracer: run by the Python of an environment that has it, with nnsight before 0.7.

    python attribution.py FOLDER MODEL PROMPT

Reads FOLDER/set, which saecli wrote; codes of the prompt at all layers, and the attribution graph's features,
activations and edges go to FOLDER/graph.npz.
"""

import sys
from pathlib import Path

sys.path.pop(0)  # this file's folder, where the library's name would be another file's

import numpy as np
from circuit_tracer import ReplacementModel, attribute
from circuit_tracer.utils.caching import load_transcoders_from_cache

folder, model_name, prompt = Path(sys.argv[1]), *sys.argv[2:]
transcoders, _ = load_transcoders_from_cache("set", cache_dir=folder, lazy_decoder=False)
model = ReplacementModel.from_pretrained_and_transcoders(model_name, transcoders, backend="nnsight")
_, codes = model.get_activations(prompt)
graph = attribute(prompt, model, max_n_logits=3, batch_size=64)
np.savez(
    folder / "graph.npz",
    codes=codes.detach().to_dense().numpy(),
    features=graph.active_features.numpy(),
    activations=graph.activation_values.detach().numpy(),
    edges=graph.adjacency_matrix.detach().numpy(),
    tokens=graph.input_tokens.numpy(),
)
