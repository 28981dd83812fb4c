"""Two runs with two threads are equal bit for bit, at widths that torch splits among its threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from slime_embedded.models.decoder import init_weights
from slime_testing_contracts.loop import run_loop
from slime_testing_contracts.tiny import tiny_model, write_rows
from torch.utils._python_dispatch import TorchDispatchMode

from slime_core.models.config import load_model_config, read_hf_config
from slime_core.models.hf_io import copy_assets, write_config, write_weights

WIDTH = 576
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "kl and steps": ({}, {"use_kl_loss": True, "kl_loss_coef": 0.1, "num_steps_per_rollout": 2, "entropy_coef": 0.01}),
    "mixture": (MIXTURE, {"micro_batch_size": 8}),
    "adapter": ({}, {"lora_rank": 8, "lr": 1e-2}),
    "critic": ({}, {"advantage_estimator": "ppo"}),
    "bfloat16": ({}, {"dtype": "bfloat16"}),
}


class NoUnorderedSums(TorchDispatchMode):
    """Raise at an operation whose additions have no fixed order on a CPU with several threads.

    Measured with torch 2.13 on 2 threads, [4000, 576] into [600, 576]: `index_put_(accumulate=True)`, which is also the
    gradient of `x[index]`, gives another result each time; `index_add_`, `scatter_add_`, `scatter_reduce_`,
    `bincount`, `segment_reduce` and the gradients of `embedding`, `gather` and `index_select` give one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "index_put" in func.__name__ and (kwargs.get("accumulate") or (len(args) > 3 and args[3])):
            indices = [index for index in args[1] if index is not None]
            rows = torch.stack(torch.broadcast_tensors(*indices)).flatten(1) if indices[0].dtype != torch.bool else None
            repeated = rows is not None and rows.unique(dim=1).shape[1] < rows.shape[1]
            assert not repeated, f"{func}: rows that repeat are added in no fixed order"
        return func(*args, **kwargs)


def wide_model(directory: Path, changes: dict[str, Any]) -> Path:
    copy_assets(tiny_model(), directory)
    wide = {"hidden_size": WIDTH, "intermediate_size": 768, "num_hidden_layers": 1}
    write_config(directory, read_hf_config(directory) | wide | changes)
    write_weights(directory, init_weights(load_model_config(directory), seed=0).items())
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_with_two_threads_are_equal(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, settings = KINDS[kind]
    model, rows = wide_model(tmp_path / "model", changes), write_rows(tmp_path / "rows.jsonl", 64)
    rows.write_text(rows.read_text().replace("=?", "=?" + " think about it" * 12))
    given = {
        "hf_checkpoint": model,
        "prompt_data": rows,
        "num_threads": 2,
        "n_samples_per_prompt": 8,
        "rollout_max_response_len": 16,
    }
    with NoUnorderedSums():
        runs = [run_loop(tmp_path / name, 1, **given, **settings) for name in ("one", "two")]
    assert runs[0].weight_checksums == runs[1].weight_checksums
    assert [run["train/grad_norm"] for run in runs[0].steps] == [run["train/grad_norm"] for run in runs[1].steps]
    assert "CPU threads: 2; only --num-threads 2 repeats this run bit for bit" in capsys.readouterr().out
