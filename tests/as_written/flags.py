"""THUDM/slime's flags, and what becomes of each here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slime_core.config.spec import flag_specs, switched_off
from slime_core.config.support import UNSUPPORTED, WHY, Lack
from tests.as_written.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]

DIFFERENCES: Mapping[str, str] = {
    "--advantage-estimator": "any installed [estimator](plugins/estimators.md), all of THUDM/slime's included;"
    " REINFORCE++ brings `--normalize-advantages` along",
    "--colocate": "as there, on CPUs too; the trainer keeps its parameters"
    " ([what is given up](how-to/cluster.md#share-devices---colocate-and---offload)); a critic does not force"
    " `--offload-train`",
    "--custom-rm-path": "one mechanism with `--rm-type`: either takes any name or path; if both are given, this one"
    " wins, with a warning",
    "--deterministic-mode": "on; `--no-deterministic-mode` turns it off",
    "--eval-prompt-data": "a path alone is called as its file, not `aime`",
    "--get-mismatch-metrics": "needs no `--custom-tis-function-path`",
    "--hf-checkpoint": "weights, architecture and tokenizer; no `--num-layers` and the like, no conversion",
    "--load": "slime's own commits, which are model directories, Hugging Face's, and those of `slime convert`",
    "--loss-mask-type": "`auto`; they say what the masks, which follow from the chat template, must agree with"
    " ([how-to](how-to/sft.md))",
    "--only-train-params-name-list": "patterns for HF names (`self_attn.q_proj`) with every trainer; with Megatron one"
    " that is in no HF name is for Megatron's (`linear_qkv`), so `mlp` means the feed-forward blocks without the norm"
    " before them; a list that is found in no name is an error. So is `--freeze-params-name-list`",
    "--prompt-data": "read in place, not loaded; also parquet, and slices `path@[a:b]`",
    "--ref-load": "a model directory; `--hf-checkpoint` without it",
    "--rollout-engine": "new: `auto`, which SGLang's flags and GPUs for inference make `sglang`",
    "--rollout-top-p": "what top-p kept is replayed with `--use-sampling-mask`, top-k and min-p too, entropy included;"
    " without it engine and trainer both take log-probs of the whole distribution, which is warned of",
    "--save": "slime's own commits, which are model directories",
    "--save-debug-rollout-data": "JSON lines instead of a pickle; THUDM/slime's `.pt` files are read",
    "--save-debug-train-data": "JSON lines instead of a pickle, one file for all ranks",
    "--train-backend": "`auto`, which Megatron's flags and GPUs for training make `megatron`",
    "--update-weight-transport": "`auto`; `nccl` is `tensor` with `--colocate`, else `distributed`; the engine's best"
    " where it lacks that",
    "--use-tensorboard": "writes below the run directory unless `TENSORBOARD_DIR` is set",
    "--use-tis": "old log-probs are recomputed for all samples; other corrections by name: `icepop`, `mis`"
    " ([off-policy data](concepts/off-policy.md))",
}
"""Flag -> what is otherwise."""

_QUEUE = "there is no queue of rollouts on disk; open groups are in every [commit](concepts/checkpoints.md)"

NEWER: Mapping[str, str] = {
    "--buffer-sort-by-staleness": "a buffer of that order is `--buffer-filter-path priority` or one of your own"
    " ([buffers](plugins/buffers.md))",
    "--flush-cache-interval": "[`--async-mode full`](concepts/async.md) keeps requests across weight updates; what"
    " becomes of their cache is `--update-weight-pause-mode`",
    "--force-fp8-ue8m0-scale": "weights go to engines in bfloat16 or float32",
    "--pg-loss-type": "the loss is the [estimator's](plugins/estimators.md)",
    "--rollout-cleanup-timeout": "every wait has a deadline of its own ([reliability](reliability.md))",
    "--rollout-data-dir": _QUEUE,
    "--rollout-io-concurrency": _QUEUE,
    "--rollout-queue-lease-seconds": _QUEUE,
    "--rollout-queue-online-gc": _QUEUE,
    "--rollout-queue-run-id": _QUEUE,
    "--rollout-queue-segment-mib": _QUEUE,
    "--rollout-session-id": "servers belong to one run",
    "--rollout-storage-declaration": _QUEUE,
    "--rollout-storage-profile": _QUEUE,
    "--routing-replay-prefetch-microbatches": "routed experts are in memory",
    "--score-centering-top-k": "an estimator of your own can compute it ([estimators](plugins/estimators.md))",
    "--use-score-centering": "an estimator of your own can compute it ([estimators](plugins/estimators.md))",
}
"""Flags that came after 0.3.1 -> why they are unknown here, and what does as much."""


def thudm_flags() -> list[str]:
    """Every flag of THUDM/slime's own, and Megatron's that its code sets."""
    table = ROOT / "tests" / "unit" / "config" / "thudm_flags.tsv"
    lines = table.read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[0] for line in lines if not line.startswith("#")]


def verdicts() -> dict[str, Verdict]:
    """Flag -> what becomes of it."""
    found = {}
    for flag in sorted({*thudm_flags(), *DIFFERENCES}):
        name = flag[2:].replace("-", "_")
        name = name if name in flag_specs() else switched_off().get(name, name)
        if name in UNSUPPORTED:
            refused = UNSUPPORTED[name] is Lack.REFUSED
            why = WHY[name] if refused else f"no effect, with a warning: {WHY[name]}"
            found[flag] = Verdict("refused" if refused else "differs", why)
        elif flag in DIFFERENCES:
            found[flag] = Verdict("differs", DIFFERENCES[flag])
        else:
            found[flag] = Verdict("works")
    return found
