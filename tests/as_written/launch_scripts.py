"""THUDM/slime's own launch scripts, and what becomes of each here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from tests.as_written.verdict import Verdict


def launch_scripts() -> dict[str, list[str]]:
    """Name -> the flags of `slime train`; `train_async.py` is `--async`."""
    found = {}
    for line in (Path(__file__).parent / "launch_scripts.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, entry, words = line.split("\t")
            found[name] = [*(["--async"] if entry == "train_async.py" else []), *shlex.split(words)]
    return found


_WANDB = Verdict("differs", "`--use-wandb` has no effect: metrics go to metrics.jsonl, TensorBoard and hook plugins")

EXCEPTIONS: Mapping[str, Verdict] = {
    "examples_eval_multi_task_multi_task.sh": _WANDB,
    "examples_retool_retool_qwen3_4b_rl.sh": _WANDB,
    "examples_retool_retool_qwen3_4b_sft.sh": _WANDB,
    "examples_strands_sglang_strands_qwen3_8b.sh": _WANDB,
    "examples_train_infer_mismatch_helper_run-qwen3-4b-mis.sh": _WANDB,
    "scripts_run-qwen2.5-0.5B-reproducibility.sh": _WANDB,
    "scripts_run-glm4.7-30B-A3B.sh": Verdict(
        "refused",
        "`--enable-mtp-training`: layers for multi-token prediction are not trained; without it the script runs",
    ),
    "scripts_run-glm5.2-744B-A40B.sh": Verdict(
        "differs", "`--allgather-cp` has no effect: sequences are cut over ranks in Megatron's way"
    ),
    "scripts_run-minimax-m2.sh": Verdict(
        "differs", "`--model-name` has no effect: the model family follows from config.json"
    ),
    "slime_plugins_rollout_buffer_rollout_buffer_example.sh": Verdict(
        "refused",
        "`--ref-micro-batch-size` is no flag, there as here, and `--rollout-buffer-url` has no server to ask: a data"
        " source or rollout function takes its place",
    ),
}
"""The scripts that do not simply have their flags accepted."""


def verdicts() -> dict[str, Verdict]:
    """Every script."""
    return {name: EXCEPTIONS.get(name, Verdict("works")) for name in launch_scripts()}
