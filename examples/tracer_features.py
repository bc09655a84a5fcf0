"""The example texts that circuit-tracer's interface shows, of a set of transcoders.

    sae export 't-*' --to circuit-tracer --out set
    python examples/tracer_features.py 't-*' set --model google/gemma-3-270m

Each run is surveyed on all rows of its store, as by `sae report`. Into the set's folder go

    features/index.json.gz    of each layer: its file, and the offset of each latent in it and of the end
    features/layer_L.bin      of each latent: 4 bytes, the length of what follows, little-endian; JSON, by zlib

which circuit-tracer's interface (0.5.0) reads from the hub, next to config.yaml (`hf upload someone/saes set/features
set/features`). From disk it reads no such file: with --local GRAPHS, the folder that `circuit-tracer attribute
--graph_file_dir ./GRAPHS --slug NAME` fills, each latent is also GRAPHS/features/N.json, N its layer and number paired,
and config.yaml says so by `scan`. The JSON is that of `frontend/feature_models.py` there.
"""

import argparse
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from saecli.base.console import Silent
from saecli.base.home import Home
from saecli.measure.latents import Examples, at_random, bin_edges, row_blocks, survey_latents
from saecli.measure.measured import ChosenRows, Measured
from saecli.model.language_model import LanguageModel
from saecli.model.source import find_model
from saecli.model.tokenizer import TokenTexts
from saecli.model.unembedding import Unembedding

LOCAL = "./graph_data/features"  # where the interface's server has GRAPHS/features
BARS, TOKENS = 40, 10  # of a histogram; tokens that a latent raises and lowers most


def paired(layer: int, latent: int) -> int:
    """Cantor's pairing, by which circuit-tracer numbers latents of all layers."""
    return (layer + latent) * (layer + latent + 1) // 2 + latent


def features(run: Measured, model: LanguageModel, count: int) -> Iterator[dict[str, Any]]:
    """The document of each latent."""
    sae, rows, texts = run.sae, run.of_store, TokenTexts(model.tokenizer)
    best, samples = (
        Examples(range(sae.d_sae), sae.d_sae, count, True, *ranking)
        for ranking in ((), (at_random,))
    )
    result = survey_latents(
        sae, row_blocks(run.inputs(Silent()), rows, run.batch_rows), rows.rows, best, samples
    )
    outputs = Unembedding(model).output_tokens(sae.W_dec, TOKENS, lambda done: None)
    middles, histograms = bin_edges()[:-1], result.magnitudes.histograms
    for latent in range(sae.d_sae):
        largest = float(result.magnitudes.largest[latent])
        bars, _ = np.histogram(
            middles, BARS, range=(0, largest or 1.0), weights=histograms[latent].astype(float)
        )
        yield {
            "transcoder_id": run.subject.name,
            "index": latent,
            "examples_quantiles": [
                {"quantile_name": name, "examples": [*_texts(examples, latent, texts)]}
                for name, examples in (("Top activations", best), ("Random activations", samples))
            ],
            "top_logits": [texts[token] for token in outputs.promoted[latent].tolist()],
            "bottom_logits": [texts[token] for token in outputs.suppressed[latent].tolist()],
            "act_min": 0.0,
            "act_max": largest,
            "quantile_values": [],
            "histogram": bars.tolist(),
            "activation_frequency": float(result.firing.frequency[latent]),
        }


def _texts(examples: Examples, latent: int, texts: TokenTexts) -> Iterator[dict[str, Any]]:
    own = {name: values[0] for name, values in examples.of([latent]).items()}
    for number in np.flatnonzero(own["rank"]):
        tokens = own["token"][number]
        kept = tokens >= 0
        yield {
            "tokens_acts_list": own["code"][number][kept].tolist(),
            "train_token_ind": int(own["peak"][number]),
            "is_repeated_datapoint": False,
            "tokens": [texts[int(token)] for token in tokens[kept]],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--local", type=Path, metavar="GRAPHS")
    parser.add_argument("--examples", type=int, default=10)
    parser.add_argument("--home", help="default: $SAE_HOME, else ./sae-data")
    options = parser.parse_args()
    home, out = Home.at(options.home), options.folder / "features"
    out.mkdir()
    if options.local:
        (options.local / "features").mkdir(parents=True)
        with (options.folder / "config.yaml").open("a") as config:
            config.write(f"scan: {LOCAL}\n")
    chosen_rows = ChosenRows(home, None, "all", "auto", Silent())
    model, index = None, {}
    for name in home.runs.matching(options.runs):
        run = chosen_rows.with_sae(name)
        model = model or LanguageModel(find_model(options.model), run.sae.W_enc.device, head=True)
        layer, offsets = run.saved.origin.read[0].layer, [0]
        with (out / f"layer_{layer}.bin").open("wb") as file:
            for latent, document in enumerate(features(run, model, options.examples)):
                text = json.dumps(document)
                blob = zlib.compress(text.encode())
                file.write(len(blob).to_bytes(4, "little") + blob)
                offsets.append(file.tell())
                if options.local:
                    path = options.local / "features" / f"{paired(layer, latent)}.json"
                    path.write_text(text)
        index[str(layer)] = {"filename": f"layer_{layer}.bin", "offsets": offsets}
        print(f"{name}: {len(offsets) - 1} latents")
    (out / "index.json.gz").write_bytes(gzip.compress(json.dumps(index).encode()))


if __name__ == "__main__":
    main()
