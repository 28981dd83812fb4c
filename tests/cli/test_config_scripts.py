"""A launch script written for THUDM/slime: every flag is understood, and what has no effect is said."""

from __future__ import annotations

from slime_core.config import load_settings
from slime_core.config.support import check_component_support

SCRIPT = """
--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
--rotary-base 1000000 --vocab-size 151936 --kv-channels 128 --qk-layernorm
--hf-checkpoint /root/Qwen3-4B --ref-load /root/Qwen3-4B_ref --load /root/Qwen3-4B_slime --save /root/Qwen3-4B_slime
--save-interval 20
--prompt-data /root/dapo.jsonl --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
--rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192
--rollout-temperature 1 --global-batch-size 256 --balance-data
--eval-interval 20 --eval-prompt-data aime /root/aime.jsonl --n-samples-per-eval-prompt 16
--eval-max-response-len 16384 --eval-top-p 1
--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full --recompute-method uniform
--recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
--eps-clip 0.2 --eps-clip-high 0.28
--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-bs 1 2 4 8
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
--attention-backend flash --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate
"""


def test_every_flag_of_a_script_is_understood() -> None:
    s = load_settings(SCRIPT.split(), env={})
    a = s.args
    assert (a.rollout_batch_size, a.n_samples_per_prompt, a.global_batch_size) == (32, 8, 256)
    assert (a.lr, a.lr_decay_style, a.adam_beta2, a.eps_clip_high) == (1e-6, "constant", 0.98, 0.28)
    assert (a.eval_datasets[0].name, a.eval_datasets[0].max_response_len) == ("aime", 16384)
    assert (a.hidden_size, a.swiglu, a.sglang_cuda_graph_bs_decode) == (2560, True, [1, 2, 4, 8])
    (foreign,) = s.warnings
    assert check_component_support(a, s.origins, (), "--rollout-engine embedded") == [
        "without effect with --rollout-engine embedded: --rollout-num-gpus-per-engine 2 (flag), --colocate (flag)"
    ]
    for flag in ("--tensor-model-parallel-size 2", "--swiglu", "--sglang-mem-fraction-static 0.7"):
        assert f"{flag} (flag)" in foreign
