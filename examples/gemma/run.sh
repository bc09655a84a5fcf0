#!/usr/bin/env bash
# The paper's experiments on a language model: PAM-SGD and tied SGD on 5% to 100% of 9,000 rows, relu and TopK.
#
#     examples/gemma/run.sh --quick      # tiny-gemma2, offline, sizes scaled down together
#     examples/gemma/run.sh              # Gemma-2-2B, layer 12; wants a GPU and the model's licence
#
# Settings of the paper's code: the last token's activation of each text, standardised; d_sae 4096, Adam at 1e-3 on
# batches of 256, 100 epochs; with relu an L1 of 0.01 for SGD and of 1e-5 for PAM-SGD. See `activations` and what
# follows it in common.sh. Way `default`: the tool's defaults, with the same epochs.
section=gemma
# shellcheck source=examples/common.sh
source "$(dirname "$0")/../common.sh"

if $quick; then  # K are the paper's 320, and 15, 80 and 640, of 4096
    epochs=30 k=20 ks="1 5" fractions="0.05 0.25 0.45 0.7" relu_fractions="0.25" decays="0.01" proximals="0 0.1"
else
    epochs=100 k=320 ks="15 20 40 80 160 640 1280" fractions="0.05 0.1 0.25 0.35 0.4 0.45 0.5 0.7 0.85" relu_fractions=$fractions
    decays="0.00001 0.0001 0.001 0.01" proximals="0 0.0001 0.01 0.1"
fi
activations $epochs
topk="--act abs-topk --k"

# at GROUP FRACTION: train each way with TopK on that fraction of the rows.
at() {
    train "$1" topk sgd "$2" "$topk $k $(paper_sgd "$2")"
    train "$1" topk paper "$2" "$topk $k $(paper_pam "$2")"
    train "$1" topk default "$2" "--act topk --k $k $settings --fraction $(per "$share" "$2")"
}
relu_at() {
    train "$1" relu sgd "$2" "--act relu $(paper_sgd "$2") $(paper_l1 0.01)"
    train "$1" relu paper "$2" "--act relu $(paper_pam "$2") $(paper_l1 0.00001)"
    train "$1" relu default "$2" "--act relu $settings --fraction $(per "$share" "$2")"
}
at base 1
relu_at base 1
for fraction in $fractions; do at size "$fraction"; done
for fraction in $relu_fractions; do relu_at size "$fraction"; done
for value in $ks; do
    train k topk sgd "$value" "$topk $value $(paper_sgd 1)"
    train k topk paper "$value" "$topk $value $(paper_pam 1)"
    train k topk default "$value" "--act topk --k $value $settings --fraction $share"
done
for decay in $decays; do  # Adam's, which the paper's code uses, is half of this term's gradient
    weight=$(per 0.5 "$decay" "$d_in" "$rows")
    train decay topk sgd "$decay" "$topk $k $(paper_sgd 1) --weight-decay $weight"
    train decay topk paper "$decay" "$topk $k $(paper_pam 1) --weight-decay $weight"
done
for mu in $proximals; do
    train proximal topk sgd "$mu" "$topk $k $(paper_sgd 1 "$mu")"
    train proximal topk paper "$mu" "$topk $k $(paper_pam 1 "$mu")"
done
trained
python "$here/gemma/figures.py" "$out" --command "examples/gemma/run.sh$given"
