#!/usr/bin/env bash
# The paper's experiments on a language model: PAM-SGD and tied SGD on 5% to 100% of 9,000 rows, relu and TopK.
#
#     examples/gemma/run.sh --quick                                  # tiny-gemma2, offline, sizes scaled down together
#     examples/gemma/run.sh --seeds 3                                # Gemma 3 270M, layer 12, from the package registry
#     examples/gemma/run.sh --model google/gemma-2-2b --jobs 1       # the paper's; wants a GPU and the model's licence
#
# Settings of the paper's code: the last token's activation of each text, standardised; Adam at 1e-3 on batches of 256,
# 100 epochs; K is 320 of 4096 latents; with relu an L1 of 0.01 for SGD and of 1e-5 for PAM-SGD. See `activations` and
# what follows it in common.sh. Ways `default` and `fair` are the tool's pam-sgd and sgd by default, as many epochs.
section=gemma models="a model, by its name on the hub or its folder [Gemma 3 270M; with --quick tiny-gemma2]"
# shellcheck source=examples/common.sh
source "$(dirname "$0")/../common.sh"

if $quick; then  # K are the paper's 320, and 15, 80 and 640, of 4096
    epochs=30 some_k="15 80" fractions="0.05 0.25 0.45 0.7" relu_fractions="0.25" decays="0.01" proximals="0 0.1"
else
    epochs=100 some_k="15 40 80 640" fractions="0.05 0.13 0.25 0.45 0.7" relu_fractions="0.13 0.45"
    decays="0.0001 0.01" proximals="0 0.01"
fi
activations $epochs
k=$(latents 320)

at base 1 1 "$k"
relu_at base 1 1
for fraction in $fractions; do at size "$fraction" "$fraction" "$k"; done
for fraction in $relu_fractions; do relu_at size "$fraction" "$fraction"; done
for value in $some_k; do at k "$(latents "$value")" 1 "$(latents "$value")"; done
decays "--act abs-topk --k $k $(paper_sgd 1)" "--act abs-topk --k $k $(paper_pam 1)"
for mu in $proximals; do
    train proximal topk sgd "$mu" "--act abs-topk --k $k $(paper_sgd 1 "$mu")"
    train proximal topk paper "$mu" "--act abs-topk --k $k $(paper_pam 1 "$mu")"
done
trained
geometry base-topk-default-1-0 "$k"
python "$here/gemma/figures.py" "$out" --command "examples/gemma/run.sh$given"
