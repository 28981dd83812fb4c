#!/bin/sh
# Two rounds of rejection sampling: generate, keep right answers, train on them. Flags go to slime rollout and slime eval.
set -eu
here=$(dirname "$0")
out=$here/../../outputs/rejection_sampling
model=$out/inputs/model

slime eval --config "$here/rollout.yaml" --run-dir "$out/before" "$@"
for round in 1 2; do
    dir=$out/round-$round
    slime rollout --config "$here/rollout.yaml" --hf-checkpoint $model --rollout-seed $round --run-dir $dir "$@"
    slime samples filter $dir --hf-checkpoint $model --min-reward 1 --best-of-group 2 --dedupe -o $dir/kept.jsonl
    slime sft --config "$here/sft.yaml" --hf-checkpoint $model --prompt-data $dir/kept.jsonl --save $dir/sft
    model=$(ls -d $dir/sft/checkpoints/rollout_* | tail -n 1)
    slime eval --config "$here/rollout.yaml" --hf-checkpoint "$model" --run-dir "$dir/after" "$@"
done
