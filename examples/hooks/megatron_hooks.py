"""Reach into Megatron: build the model of a pipeline stage, and be told when passes and steps begin.

    slime train --config demo.yaml --train-backend megatron \
        --custom-megatron-init-path examples/hooks/megatron_hooks.py \
        --custom-megatron-before-log-prob-hook-path examples/hooks/megatron_hooks.py \
        --custom-megatron-before-train-step-hook-path examples/hooks/megatron_hooks.py
"""

import json
from pathlib import Path

_given = {}


def megatron_init(args):
    """Megatron's process groups are there, its model is not: the place for patches and global settings."""
    _given["args"] = args
    _note(args, "init")


def before_log_prob(args, model, store_prefix):
    """`model` is a list of this rank's chunks; `store_prefix` is "" for the actor, "ref_" for the reference, ..."""
    _note(args, "log_probs", store_prefix=store_prefix, chunks=len(model))


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    """Gradients are cleared; here the learning rate of this step is noted."""
    lr = opt_param_scheduler.get_lr(optimizer.param_groups[0])
    _note(args, "step", rollout_id=rollout_id, step_id=step_id, lr=lr)


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    """For --custom-model-provider-path, with the first hook: the GPTModel of one pipeline stage."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from slime_trainer_megatron.arguments.config import padded_vocab_size, transformer_config
    from slime_trainer_megatron.families import load_megatron_model
    from slime_trainer_megatron.layout import Layout
    from slime_trainer_megatron.model.specs import block_spec

    args = _given["args"]
    family = load_megatron_model(args.hf_checkpoint)
    model, device = family.architecture, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layout = Layout.from_args(args, model.num_layers)
    config = transformer_config(args, model, layout, device=device)
    return GPTModel(
        config,
        block_spec(config, family, device=device, vp_stage=vp_stage),  # or a ModuleSpec of one's own
        vocab_size=padded_vocab_size(args, model.vocab_size, layout),
        max_sequence_length=model.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        vp_stage=vp_stage,
    )


def _note(args, event, **facts):
    with (Path(args.run_dir) / "megatron.jsonl").open("a") as out:
        out.write(json.dumps({"event": event, **facts}) + "\n")
