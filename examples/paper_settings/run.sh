#!/usr/bin/env bash
# Why the paper's curves look as they do: the peak, small K, and the gap to SGD, each by an experiment.
#
#     examples/paper_settings/run.sh --quick --seeds 3     # tiny-gemma2, offline
#     examples/paper_settings/run.sh --seeds 3             # Gemma-2-2B, layer 12; wants a GPU
#
# The paper's settings are those of `paper_pam` and `paper_sgd` in common.sh. Ways: paper; ridge, which is the same but
# for a ridge that leave-one-out chooses; default, the tool's own.
section=paper_settings
# shellcheck source=examples/common.sh
source "$(dirname "$0")/../common.sh"

if $quick; then
    epochs=15 k=20 ks="1 2 5 10" fractions="0.11 0.23 0.46 1" widths="64 128 256" few="0.23 1"
else
    epochs=50 k=320 ks="15 40 80" fractions="0.05 0.11 0.17 0.23 0.3 0.4 0.46 0.55 0.7 1" widths="1024 2048 4096"
    few="0.11 0.23 0.7 1"
fi
activations $epochs
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
for value in $ks; do
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
