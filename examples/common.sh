# Sourced by the scripts of this folder: their options, and parallel training runs. Needs bash, and `sae` on the PATH.
#
# A script sets `section` first. Runs are called GROUP-ACT-WAY-VALUE-SEED, by which `measured.py` finds them. Finished
# runs are not trained again, so that an interrupted script goes on where it stopped.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
quick=false out=results/$section seeds=1 data="" model="" jobs="" first=""
given=""  # what decides the results, for the report

usage() {
    cat <<TEXT
usage: $0 [--quick] [--out DIR] [--seeds N] [--jobs N] [--first N]${takes:+ [--data FILE]}${models:+ [--model MODEL]}

  --quick     offline, in minutes on two cores
  --out DIR   folder of stores, runs, tables (CSV, JSON) and figures [results/$section]
  --seeds N   seeds of every run [1]
  --jobs N    runs at a time [one a core]
  --first N   train the first N runs, and draw what is there [all]${takes:+
  --data FILE $takes}${models:+
  --model MODEL $models}
TEXT
}

while (($#)); do
    case $1 in
        --quick) quick=true given+=" --quick" ;;
        --out | --seeds | --jobs | --first | --data | --model)
            (($# > 1)) || { echo "$0: $1 needs a value; see $0 --help" >&2; exit 2; }
            [[ $1 != --data || -n ${takes:-} ]] && [[ $1 != --model || -n ${models:-} ]] ||
                { echo "$0: $1 does nothing here; leave it out" >&2; exit 2; }
            [[ $1 == --out || $1 == --jobs ]] || given+=" $1 $2"
            printf -v "${1#--}" %s "$2"; shift ;;
        -h | --help) usage; exit ;;
        *) echo "$0: there is no option $1; see $0 --help" >&2; exit 2 ;;
    esac
    shift
done
[[ $seeds =~ ^[1-9][0-9]*$ ]] || { echo "$0: --seeds must be a whole number above 0, got $seeds" >&2; exit 2; }
for name in jobs first; do
    [[ ${!name} =~ ^([1-9][0-9]*)?$ ]] ||
        { echo "$0: --$name must be a whole number above 0, got ${!name}" >&2; exit 2; }
done
for needed in sae python; do
    command -v "$needed" > /dev/null || { echo "$0: expected $needed on the PATH, got none; install saecli" >&2; exit 2; }
done

cores=$(getconf _NPROCESSORS_ONLN)
jobs=${jobs:-$cores}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} # for what loads torch before saecli sets it
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + jobs - 1) / jobs))}
mkdir -p "$out"
out=$(cd "$out" && pwd)
if $quick; then form=quick; else form=full; fi
form+=${data:+ form of $data}${model:+ form of $model}
if [[ -f $out/form && $(< "$out/form") != "$form" ]]; then
    echo "$0: $out holds runs of another form, $(< "$out/form"), and not $form; give another --out" >&2
    exit 2
fi
echo "$form" > "$out/form"
export SAE_HOME=$out/home
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}  # for `measured.py`
todo=$out/todo
: > "$todo"

# per FACTOR...: their product, such as a weight in a mean over rows and dimensions times N and d_in.
per() {
    awk 'BEGIN { product = 1; for (i = 1; i < ARGC; i++) product *= ARGV[i]; printf "%.9g", product }' "$@"
}

# share_of COUNT ROWS: the fraction, at most 1.
share_of() {
    awk -v count="$1" -v rows="$2" 'BEGIN { printf "%.9g", count < rows ? count / rows : 1 }'
}

# settled OPTION...: the same, of an option that is given twice only the last, but of --data all.
settled() {
    awk 'BEGIN {
        for (i = 1; i < ARGC; i++) {
            if (ARGV[i] !~ /^--/) { values[name] = values[name] " " ARGV[i]; continue }
            name = ARGV[i] (ARGV[i] == "--data" ? SUBSEP i : "")
            if (!(name in values)) names[++count] = name
            values[name] = ""
        }
        for (i = 1; i <= count; i++) {
            split(names[i], word, SUBSEP)
            printf "%s%s%s", (i > 1 ? " " : ""), word[1], values[names[i]]
        }
        print ""
    }' "$@"
}

# train GROUP ACT WAY VALUE OPTION...: put a run on the list, with every seed.
train() {
    local seed name run
    for ((seed = 0; seed < seeds; seed++)); do
        name=$1-$2-$3-$4-$seed
        run=$SAE_HOME/runs/$name/run.json
        if [[ ! -f $run ]]; then
            # shellcheck disable=SC2068
            settled --name "$name" --seed $seed ${@:5} >> "$todo"
        elif ! grep -q '"complete": true' "$run"; then
            echo "--resume --name $name" >> "$todo"
        fi
    done
}

# decays SGD PAM: TopK at each of $decays; Adam's weight decay, which the paper's code uses, is half of this term's
# gradient. SGD and PAM are the options of either way.
decays() {
    local decay weight
    for decay in $decays; do
        weight=$(per 0.5 "$decay" "$d_in" "$rows")
        train decay topk sgd "$decay" "$1 --weight-decay $weight"
        train decay topk paper "$decay" "$2 --weight-decay $weight"
    done
}

# trained: train what is on the list; `--config` names a file of presets/.
trained() {
    if [[ -n $first ]]; then
        head -n "$first" "$todo" > "$todo.first"
        mv "$todo.first" "$todo"
    fi
    echo "$(wc -l < "$todo") runs to train, $jobs at a time" >&2
    if [[ -s $todo ]]; then
        (cd "$here/presets" && xargs -P "$jobs" -L 1 sae train < "$todo" > /dev/null)
    fi
    rm "$todo"
}

# geometry RUN K: what `sae geometry` says of a run with TopK on all rows, into topK.json, if the run is there.
geometry() {
    [[ -f $SAE_HOME/runs/$1/run.json ]] || return 0
    sae geometry "$1" --split all --json > "$out/geometry.part"
    mv "$out/geometry.part" "$out/top$2.json"
}

# real NAME...: fetch real models, texts or images by real/models.py into real/ beside the output folder.
real() {
    real=$(dirname "$out")/real
    python "$here/real/models.py" "$real" --only "$@" >&2
}

# activations EPOCHS: 10,000 rows of layer 12, each the last token of a text, of Gemma 3 270M or of --model, extracted
# once for all sections; with --quick rows of tiny-gemma2. d_sae is the paper's 4096 latents for 2304 dimensions, in
# proportion (with --quick 2.2 rows per latent). Sets d_in, d_sae, rows (an experiment's training rows), share (rows as
# a fraction of the store's), batch, and settings: the options of all runs, which later ones override.
activations() {
    local epochs=$1 stores=$SAE_HOME
    share=1 batch=256 rows=9000
    if $quick; then
        d_in=128 d_sae=256 rows=562 share=0.416 batch=32
        set -- --model tiny-gemma2 --rows 1500 --context 128
    elif [[ -n $model ]]; then
        d_in=2304 d_sae=4096
        set -- --model "$model" --layer 12 --rows 10000 --context 128
    else
        d_in=640 d_sae=1138
        real gemma3 text
        stores=$real/gemma3
        set -- --model "$real/gemma-3-270m-q4_k_m.gguf" --layer 12 --rows 10000 --context 64
        for text in news code reviews; do set -- "$@" --dataset "$real/$text.jsonl"; done
        mkdir -p "$SAE_HOME/activations"
        ln -sfn "$stores/activations/activations" "$SAE_HOME/activations/activations"
    fi
    SAE_HOME=$stores sae extract "$@" --site resid_pre --positions last --dtype float32 --name activations > /dev/null
    settings="--data activations --d-sae $d_sae --normalize standardize --epochs $epochs"
}

# latents K: K of the paper's 4096 latents, as many of d_sae.
latents() {
    echo $((($1 * d_sae + 2048) / 4096))
}

# paper_pam FRACTION [MU], paper_sgd FRACTION [MU], paper_l1 LAMBDA: options of the paper's code for language models, on
# a fraction of the rows: a preset, and the weights that depend on the rows. Its loss is a mean over rows and dimensions:
# its weights are multiplied by d_in, and by N next to a sum over rows.
paper_pam() {
    local mu
    mu=$(per "${2:-0.001}" "$d_in" "$rows" "$1")
    echo "--config gemma-pam-sgd.toml $(paper_rows "$1") --clip-norm $d_in --mu-enc $mu --nu-enc $mu"
}
paper_sgd() {
    local mu
    mu=$(per "${2:-0.001}" "$d_in" "$rows" "$1")
    echo "--config gemma-sgd.toml $(paper_rows "$1") --mu-enc $mu --nu-enc $mu"
}
paper_rows() {
    echo "$settings --fraction $(per "$share" "$1") --batch-size $batch"
}
paper_l1() {
    echo "--sparsity l1-codes --sparsity-weight $(per "$1" "$d_in") --sparsity-warm-up 0"
}

# at GROUP VALUE FRACTION K, relu_at GROUP VALUE FRACTION: train each way on that fraction of the rows, with TopK or relu.
at() {
    train "$1" topk sgd "$2" "--act abs-topk --k $4 $(paper_sgd "$3")"
    train "$1" topk paper "$2" "--act abs-topk --k $4 $(paper_pam "$3")"
    tools "$1" topk "$2" "$3" "--act topk --k $4"
}
relu_at() {
    train "$1" relu sgd "$2" "--act relu $(paper_sgd "$3") $(paper_l1 0.01)"
    train "$1" relu paper "$2" "--act relu $(paper_pam "$3") $(paper_l1 0.00001)"
    tools "$1" relu "$2" "$3" "--act relu"
}
tools() {
    local some
    some="$settings --fraction $(per "$share" "$4")"
    train "$1" "$2" default "$3" "$5 $some"
    train "$1" "$2" fair "$3" "$5 $some --solver sgd"
}
