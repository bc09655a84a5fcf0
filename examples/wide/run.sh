#!/usr/bin/env bash
# The paper's own width: 4,096 latents on all of 9,000 rows, with its K, 320 and 640, and with relu.
#
#     examples/wide/run.sh --quick --seeds 3    # tiny-gemma2, offline, sizes scaled down together
#     examples/wide/run.sh --seeds 3            # Gemma 3 270M, layer 12: an hour and a quarter of a core a seed
#
# Ways are those of ../gemma/run.sh, whose 1,138 latents keep the paper's proportion to d_in instead.
section=wide models="a model, by its name on the hub or its folder [Gemma 3 270M; with --quick tiny-gemma2]"
# shellcheck source=examples/common.sh
source "$(dirname "$0")/../common.sh"

if $quick; then
    activations 30
else
    activations 100
    d_sae=4096 settings+=" --d-sae 4096"
fi
k=$(latents 320)
at base 1 1 "$k"
relu_at base 1 1
twice=$(latents 640)
at k "$twice" 1 "$twice"
train signed topk default "$twice" "--act abs-topk --k $twice $settings --fraction $share"
trained
geometry base-topk-default-1-0 "$k"
python "$here/wide/figures.py" "$out" --command "examples/wide/run.sh$given"
