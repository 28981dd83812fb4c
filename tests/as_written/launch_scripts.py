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


_QWEN = Verdict("refused", "`--spec`: there is no Megatron plugin of the family `qwen3_5_moe`")

EXCEPTIONS: Mapping[str, Verdict] = {
    "examples_coding_agent_rl_run_qwen36_35b_a3b_swe_8nodes.sh": _QWEN,
    "examples_geo3k_vlm_run_geo3k_qwen35.sh": _QWEN,
    "scripts_run-qwen3.5-35B-A3B-sft.sh": _QWEN,
    "examples_delta_weight_sync_run-glm4.7-30B-A3B-delta.sh": Verdict(
        "refused",
        "47 layers do not divide into 2 pipeline stages, in Megatron as well; with"
        " --decoder-last-pipeline-num-layers 23 the script runs",
    ),
    "scripts_run-glm4.7-30B-A3B.sh": Verdict(
        "refused",
        "`--enable-mtp-training`: layers for multi-token prediction are not trained. Besides, 8 GPUs cannot hold"
        " experts over 8 ranks in 2 pipeline stages, in Megatron as well",
    ),
    "scripts_run-glm5.2-744B-A40B.sh": Verdict(
        "refused", "`--spec`: there is no Megatron plugin of the family `glm_moe_dsa`"
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


MODELS: Mapping[str, str] = {
    "examples_coding_agent_rl_run_qwen36_35b_a3b_swe_8nodes.sh": "qwen3.5-35B-A3B",
    "examples_delta_weight_sync_run-glm4.7-30B-A3B-delta.sh": "glm4.7-30B-A3B",
    "examples_eval_multi_task_multi_task.sh": "qwen3-4B",
    "examples_fully_async_run-qwen2.5-0.5B-fully_async.sh": "qwen2.5-0.5B",
    "examples_geo3k_vlm_run_geo3k_qwen35.sh": "qwen3.5-35B-A3B-vl",
    "examples_multi_agent_run-qwen3-30B-A3B-multi-agent.sh": "qwen3-30B-A3B",
    "examples_on_policy_distillation_run-qwen3-8B-opd-megatron.sh": "qwen3-8B",
    "examples_on_policy_distillation_run-qwen3-8B-opd.sh": "qwen3-8B",
    "examples_retool_retool_qwen3_4b_rl.sh": "qwen3-4B-Instruct-2507",
    "examples_retool_retool_qwen3_4b_sft.sh": "qwen3-4B-Instruct-2507",
    "examples_strands_sglang_strands_qwen3_8b.sh": "qwen3-8B",
    "examples_train_infer_mismatch_helper_run-qwen3-4b-mis.sh": "qwen3-4B",
    "scripts_low_precision_run-kimi-k2-Thinking-int4.sh": "kimi-k2-thinking",
    "scripts_low_precision_run-qwen3-235B-A22B-int4.sh": "qwen3-235B-A22B",
    "scripts_low_precision_run-qwen3-30B-A3B-int4.sh": "qwen3-30B-A3B",
    "scripts_low_precision_run-qwen3-30b-a3b-fp8.sh": "qwen3-30B-A3B",
    "scripts_run-deepseek-r1.sh": "deepseek-r1",
    "scripts_run-glm4-9B.sh": "glm4-9B",
    "scripts_run-glm4.7-30B-A3B.sh": "glm4.7-30B-A3B",
    "scripts_run-glm4.7-355B-A32B.sh": "glm4.7-355B-A32B",
    "scripts_run-glm5.2-744B-A40B.sh": "glm5.2-744B-A40B",
    "scripts_run-kimi-k2-Thinking.sh": "kimi-k2-thinking",
    "scripts_run-minimax-m2.sh": "minimax-m2",
    "scripts_run-moonlight-16B-A3B.sh": "moonlight",
    "scripts_run-qwen2.5-0.5B-gb10-smoke.sh": "qwen2.5-0.5B",
    "scripts_run-qwen2.5-0.5B-reproducibility.sh": "qwen2.5-0.5B",
    "scripts_run-qwen3-235B-A22B-sft.sh": "qwen3-235B-A22B",
    "scripts_run-qwen3-235B-A22B.sh": "qwen3-235B-A22B",
    "scripts_run-qwen3-30B-A3B.sh": "qwen3-30B-A3B",
    "scripts_run-qwen3-4B-amd.sh": "qwen3-4B",
    "scripts_run-qwen3-4B-base-sft.sh": "qwen3-4B",
    "scripts_run-qwen3-4B.sh": "qwen3-4B",
    "scripts_run-qwen3.5-35B-A3B-sft.sh": "qwen3.5-35B-A3B",
}
"""Script -> the preset with the config.json of its checkpoint; the missing one's is no model of a preset."""

WHEN_STARTED: Mapping[str, str] = {
    "examples_coding_agent_rl_run_qwen36_35b_a3b_swe_8nodes.sh": "no megatron_models plugin 'qwen3_5_moe'",
    "examples_delta_weight_sync_run-glm4.7-30B-A3B-delta.sh": "47 of the model's 47 layers cannot be spread evenly",
    "examples_geo3k_vlm_run_geo3k_qwen35.sh": "no megatron_models plugin 'qwen3_5_moe'",
    "scripts_run-glm4.7-30B-A3B.sh": "8 ranks cannot hold whole copies of experts over 16 ranks",
    "scripts_run-glm5.2-744B-A40B.sh": "no megatron_models plugin 'glm_moe_dsa'",
    "scripts_run-qwen3.5-35B-A3B-sft.sh": "no megatron_models plugin 'qwen3_5_moe'",
}
"""Script whose flags are accepted -> what is said of flags and model together, before anything starts."""

_NO_FAMILY = "no megatron_models plugin"
NOT_REHEARSED: Mapping[str, tuple[str, str]] = {
    "examples_coding_agent_rl_run_qwen36_35b_a3b_swe_8nodes.sh": ("settings", _NO_FAMILY),
    "examples_delta_weight_sync_run-glm4.7-30B-A3B-delta.sh": ("layout", "cannot be spread evenly"),
    "examples_geo3k_vlm_run_geo3k_qwen35.sh": ("settings", _NO_FAMILY),
    "scripts_run-glm4.7-30B-A3B.sh": ("settings", "--enable-mtp-training"),
    "scripts_run-glm5.2-744B-A40B.sh": ("settings", _NO_FAMILY),
    "scripts_run-qwen3.5-35B-A3B-sft.sh": ("settings", _NO_FAMILY),
    "slime_plugins_rollout_buffer_rollout_buffer_example.sh": ("settings", "--ref-micro-batch-size"),
}  # fmt: skip
"""Script that `slime rehearse` stops at -> the stage, and words of the error."""
