#!/usr/bin/env bash
# Do I need a trained head? What predicts acceptance on your own texts, beside a head that is trained on them.
#     bash examples/need_a_head.sh                                the embedded toy pair: a minute
#     bash examples/need_a_head.sh TARGET DRAFT PROMPTS.jsonl     yours: folders, hub names or GGUF files; {"id": ..., "prompt": ...}
set -euo pipefail
mkdir -p outputs/examples
target=${1:-toy/target} draft=${2:-toy/draft} prompts=${3:-outputs/examples/questions.jsonl}
[ $# -ge 3 ] || python examples/questions.py "$prompts" 400
pair=("pair.target=$target" "pair.draft=$draft")
log=outputs/examples/need_a_head.log
: >"$log"

stage() { # runs a command and prints its output folder
    python -m "$@" | tee -a "$log" | sed -n 's/^output: //p'
}

recorded() { # the target's answers to a part of the file, and the draft's probabilities and states along them
    local answers
    answers=$(stage data_gen.responses "${pair[@]}" prompts=jsonl "prompts.path=$prompts" "prompts.split=$1" sampling.max_new_tokens=48)
    stage data_gen.traces "${pair[@]}" "responses=$answers" hidden=true upper_bound=true max_drafted=8 'heads={}'
}

train=$(recorded train)
dev=$(recorded dev)
test=$(recorded test)
head=$(stage toolkit.train "${pair[@]}" model=preread_head data=traced "data.path=$train")

# Every row has one setting, chosen on dev; test reports. "statistics" are four numbers of q, fitted in seconds.
table=$(stage analysis.heads "${pair[@]}" "statistics=[$train]" "tuning={mine: $dev}" "tests={mine: $test}" "heads=[$head]" max_drafted=8)

# What one sees: the share of the way from the best fixed length (0 %) to the upper bound (100 %), with its interval. A head that
# is not above "statistics" by more than the intervals is not needed. docs/heads.md has the same for three domains.
sed '/^## /,$d' "$table/predictors.md"
