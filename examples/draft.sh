#!/usr/bin/env bash
# A draft for a target that has none: made of the target's layers, distilled on its responses, compared at measured costs.
#     bash examples/draft.sh                           the toy target: a minute
#     bash examples/draft.sh TARGET PROMPTS.jsonl      yours (SmolLM2 135M: an hour on two cores, SIZE= for the full size)
set -euo pipefail
mkdir -p outputs/examples
target=${1:-toy/target} prompts=${2:-outputs/examples/questions.jsonl}
size=${SIZE-prompts.limit=150 sampling.max_new_tokens=32}
[ $# -ge 2 ] || python examples/questions.py "$prompts" 400

# shellcheck disable=SC2086  # several words
python -m toolkit.train +experiment=draft "pair.target=$target" "prompts.path=$prompts" $size | tee outputs/examples/draft.log

# What one sees: alpha before and after, the predicted speed-up with its interval, and the command to decode with.
grep -E '^(distill: val/alpha|drafts: |next: )' outputs/examples/draft.log
