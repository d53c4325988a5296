#!/usr/bin/env bash
# A head for your pair, from prompts alone: trained, compared with fixed lengths and thresholds, decoded with.
#     bash examples/head.sh                                the embedded toy pair: a minute
#     bash examples/head.sh TARGET DRAFT PROMPTS.jsonl     yours: folders, hub names or GGUF files; {"id": ..., "prompt": ...}
set -euo pipefail
mkdir -p outputs/examples
target=${1:-toy/target} draft=${2:-toy/draft} prompts=${3:-outputs/examples/questions.jsonl}
[ $# -ge 3 ] || python examples/questions.py "$prompts" 400

# The target answers the training part; two heads learn; dev chooses their settings, test reports them. An interrupted line
# goes on where it ended. The last lines name the report (one HTML file) and the command of the best method.
python -m toolkit.train +experiment=heads "pair.target=$target" "pair.draft=$draft" "prompts.path=$prompts" \
    sampling.max_new_tokens=48 | tee outputs/examples/head.log

# What one sees: a table of methods at their best settings on prompts that chose nothing, and the command to decode with.
grep -E '^(report|next): ' outputs/examples/head.log
