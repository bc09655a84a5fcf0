#!/usr/bin/env bash
# A habit planted in tiny-gemma2 ("lemon" after each of twelve words) by a minute of fine-tuning, and a crosscoder of the
# original and the tuned model, next to one of a model tuned without the habit.
#
#     examples/diffing/run.sh --quick         # offline, in eight minutes on two cores
section=diffing
# shellcheck source=examples/common.sh
source "$(dirname "$0")/../common.sh"
$quick || { echo "$0: there is a --quick form alone, of tiny-gemma2" >&2; exit 2; }

for kind in planted plain; do
    if [[ $kind == plain ]]; then habit=--plain; else habit=""; fi
    # shellcheck disable=SC2086
    [[ -f $out/$kind/tokenizer.json ]] || python "$here/diffing/diffing.py" plant "$out/$kind" $habit
    sae extract --model tiny-gemma2 --model "$out/$kind" --layer 3 --rows 60000 --name $kind > /dev/null
    if ! grep -qs '"complete": true' "$SAE_HOME/runs/$kind/run.json"; then
        rm -rf "$SAE_HOME/runs/$kind"
        sae train --data "$kind-tiny-gemma2-l3-resid_post" --data "$kind-$kind-l3-resid_post" --act batchtopk --k 64 \
            --d-sae 512 --epochs 8 --name "$kind" > /dev/null
    fi
done
sae eval planted --model tiny-gemma2 --model "$out/planted"
sae sparsity planted --plot "$out/sparsity.png"
[[ -d $out/pages ]] || sae report planted --out "$out/pages"
python "$here/diffing/diffing.py" found "$out/found" planted plain
