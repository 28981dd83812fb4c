"""Inputs for whole runs that take a second: a tiny random model, rows of sums, and a reward that can be learned.

Used by the contract suites and by `run_loop`. The model is made once per process and removed at its end; a test that
changes the files copies them first.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from slime_core.protocols import Args, RewardTraits, declares
from slime_core.sample import Sample

_KEPT: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""


@functools.cache
def tiny_model() -> Path:
    """A HF-layout directory with tokenizer, chat template and 330k random parameters; the same ones every time."""
    from slime_commands.init.tiny_model import write_random_model

    kept = tempfile.TemporaryDirectory(prefix="slime-tiny-model-")
    _KEPT.append(kept)
    directory = Path(kept.name) / "model"
    write_random_model(directory, seed=0)
    return directory


@functools.cache
def tiny_moe_model(*, dense_layer: bool = True) -> Path:
    """Like `tiny_model`, with 8 experts of which each token takes 2 in the first and the last of three layers.

    `dense_layer=False`: in all three, as SGLang takes Qwen3-MoE to be whatever `config.json` says.
    """
    from slime_embedded.models.decoder import init_weights

    from slime_core.models.config import load_model_config, read_hf_config
    from slime_core.models.hf_io import copy_assets, write_config, write_weights

    kept = tempfile.TemporaryDirectory(prefix="slime-tiny-moe-")
    _KEPT.append(kept)
    directory = Path(kept.name) / "model"
    copy_assets(tiny_model(), directory)
    changes = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 3,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [1] if dense_layer else [], "tie_word_embeddings": False,
    }  # fmt: skip
    write_config(directory, read_hf_config(directory) | changes)
    write_weights(directory, init_weights(load_model_config(directory), seed=0).items())
    return directory


def write_rows(path: Path, count: int) -> Path:
    """`count` rows of a question under `input` and its answer under `label`; the path."""
    problems = random.Random(0).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], count)
    rows = [{"input": f"{a}+{b}=?", "label": str(a + b)} for a, b in problems]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@declares(RewardTraits(execution="inline"))
def digits(args: Args, sample: Sample) -> float:
    """Share of digits in the response: a random model learns it within a few steps."""
    return sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)


async def answer(args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: Any) -> Sample:
    """A generate function of one engine call."""
    prompt = sample.tokens or context.tokenizer.encode(str(sample.prompt))
    sample.tokens = list(prompt)
    output = await context.engine.generate(sample.tokens, sampling_params, session_id=sample.session_id)
    sample.append_response_tokens(args, output.token_ids, output.log_probs, True, output.meta_info, output.text)
    return sample
