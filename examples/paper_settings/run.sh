#!/usr/bin/env bash
# Why the paper's curves look as they do: the peak, small K, and the gap to SGD, each by an experiment.
#
#     examples/paper_settings/run.sh --quick --seeds 3     # tiny-gemma2, offline
#     examples/paper_settings/run.sh --seeds 3             # Gemma 3 270M, layer 12, from the package registry
#
# The paper's settings are those of `paper_pam` and `paper_sgd` in common.sh. Ways: paper; ridge, which is the same but
# for a ridge that leave-one-out chooses; default, the tool's own.
section=paper_settings models="a model, by its name on the hub or its folder [Gemma 3 270M; with --quick tiny-gemma2]"
# shellcheck source=examples/common.sh
source "$(dirname "$0")/../common.sh"

if $quick; then
    epochs=15 some_k="15 32 80 160" fractions="0.11 0.23 0.46 1" few="0.23 1"
else
    epochs=50 some_k="15 40 80" fractions="0.03 0.06 0.13 0.25 0.46 1" few="0.13 1"
fi
activations $epochs
k=$(latents 320) widths="$((d_sae / 4)) $((d_sae / 2)) $d_sae"
ridge="--alpha auto"
count() {  # rows in a share of them
    per "$rows" "$1" | cut -d. -f1
}

# The peak: test error against rows, for each width, K in proportion.
for width in $widths; do
    for fraction in $fractions; do
        train "peak$width" topk paper "$(count "$fraction")" "--act abs-topk $(paper_pam "$fraction")" \
            "--d-sae $width --k $((k * width / d_sae))"
        train "peak$width" topk ridge "$(count "$fraction")" "--act abs-topk $(paper_pam "$fraction") $ridge" \
            "--d-sae $width --k $((k * width / d_sae))"
    done
done

# Small K: all rows, full width. What it comes from is found out afterwards, by other ridges for the same encoder.
for value in $some_k; do
    value=$(latents "$value")
    train k topk paper "$value" "--act abs-topk --k $value $(paper_pam 1)"
done

# The gap: SGD as the paper has it with its parts replaced one by one; and a fair one, tied or not, at the tool's learning
# rate and schedule. Without the paper's L1 of 0.01 there is one of 1e-5, which does nothing, or none.
for fraction in $few; do
    n=$(count "$fraction") some="--fraction $(per "$share" "$fraction")"
    relu="--act relu $(paper_l1 0.00001)" topk="--act abs-topk --k $k" sgd=$(paper_sgd "$fraction")
    train gap relu sgd "$n" "--act relu $sgd $(paper_l1 0.01)"
    train gap relu tied "$n" "$relu $sgd"
    train gap relu untied "$n" "$relu $sgd --no-tied"
    train gap relu paper "$n" "$relu $(paper_pam "$fraction")"
    train gap topk tied "$n" "$topk $sgd"
    train gap topk untied "$n" "$topk $sgd --no-tied"
    train gap topk paper "$n" "$topk $(paper_pam "$fraction")"
    for act in "topk --act topk --k $k" "relu --act relu --sparsity none"; do
        read -r name act <<< "$act"
        train gap "$name" fairtied "$n" "$act $settings $some --batch-size $batch --solver sgd --tied"
        train gap "$name" fairuntied "$n" "$act $settings $some --batch-size $batch --solver sgd"
        train gap "$name" default "$n" "$act $settings $some"
    done
done
trained
python "$here/paper_settings/figures.py" "$out" --command "examples/paper_settings/run.sh$given"
