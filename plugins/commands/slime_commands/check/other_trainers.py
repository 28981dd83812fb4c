"""Names of other trainers' settings -> slime's flags, for the errors that name an unknown flag or key.

The names are from TRL's and transformers' configurations, OpenRLHF, verl, prime-rl, vLLM and THUDM/slime's neighbours,
in kebab-case. No value is translated. The same word may count different things (a batch of prompts, of samples, of one
device), so the error names slime's flag and the user decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from slime_core.config.spec import flag_specs

_OURS: Mapping[str, str] = {
    # model and data
    "--hf-checkpoint": "model.path model.name model-name-or-path model-path pretrain base-model model-id"
    " tokenizer-path actor-model-path",
    "--ref-load": "ref-model ref-model-path reference-model ref-pretrain",
    "--prompt-data": "dataset dataset-name dataset-path data-path train-file train-files train-data train-dataset",
    "--eval-prompt-data": "eval-dataset eval-data eval-file val-file val-files val-data validation-data eval-datasets",
    "--input-key": "prompt-key prompt-column input-column question-key dataset-text-field",
    "--label-key": "label-column answer-key answer-column",
    "--apply-chat-template": "chat-template use-chat-template",
    # rollout
    "--rollout-max-response-len": "max-new-tokens max-completion-length max-response-length generate-max-len max-tokens"
    " response-length max-gen-length",
    "--rollout-max-prompt-len": "max-prompt-length prompt-max-len",
    "--rollout-max-context-len": "max-model-len seq-len max-seq-length max-length context-length",
    "--rollout-temperature": "temperature sampling-temperature",
    "--rollout-top-p": "top-p",
    "--rollout-top-k": "top-k",
    "--n-samples-per-prompt": "num-generations group-size rollouts-per-example rollouts-per-prompt num-return-sequences"
    " n-samples num-samples n",
    "--num-rollout": "max-steps num-steps total-steps total-training-steps num-train-steps",
    "--num-epoch": "num-epochs num-train-epochs epochs total-epochs max-epochs num-episodes",
    # reward and algorithm
    "--rm-type NAME or --custom-rm-path FILE.py": "reward-funcs reward-fn reward-func reward-function reward-model"
    " reward-model-path reward-pretrain custom-reward-function",
    "--rm-url": "remote-rm-url reward-url",
    "--advantage-estimator": "adv-estimator algorithm algo algo-name",
    "--use-kl-loss --kl-loss-coef X (a loss term) or --kl-coef X (in the reward)": "beta init-kl-coef"
    " kl-beta kl-loss-weight",
    "--eps-clip": "epsilon clip-ratio cliprange clip-range clip-eps eps-clip-low clip-ratio-low epsilon-low",
    "--eps-clip-high": "epsilon-high clip-ratio-high clip-eps-high",
    "--gamma": "discount",
    "--lambd": "lam gae-lambda",
    # optimizer
    "--lr": "learning-rate actor-learning-rate actor-lr",
    "--critic-lr": "critic-learning-rate",
    "--lr-decay-style": "lr-scheduler-type lr-scheduler lr-schedule scheduler",
    "--lr-warmup-iters": "warmup-steps lr-warmup-steps num-warmup-steps",
    "--lr-warmup-fraction": "warmup-ratio lr-warmup-ratio lr-warmup-steps-ratio",
    "--clip-grad": "max-grad-norm max-norm grad-clip grad-clip-norm",
    "--rollout-batch-size N (prompts per rollout) or --global-batch-size N (samples per optimizer step)": "batch-size"
    " train-batch-size examples-per-step",
    "--global-batch-size": "mini-batch-size ppo-mini-batch-size gradient-accumulation-steps num-mini-batches"
    " per-step-batch-size",
    "--micro-batch-size N or --use-dynamic-batch-size --max-tokens-per-gpu N": "per-device-train-batch-size"
    " micro-train-batch-size ppo-micro-batch-size ppo-micro-batch-size-per-gpu micro-batch-size-per-gpu",
    "--num-steps-per-rollout": "num-iterations steps-per-generation",
    "--use-dynamic-batch-size --max-tokens-per-gpu N": "packing-samples use-dynamic-bsz packing",
    "--grpo-std-normalization or --disable-grpo-std-normalization": "scale-rewards norm-adv-by-std-in-grpo",
    "--max-tokens-per-gpu": "ppo-max-token-len-per-gpu max-token-len-per-gpu",
    "--lora-rank": "lora-r use-peft peft lora-dim",
    "--recompute-granularity full": "gradient-checkpointing enable-gradient-checkpointing activation-checkpointing",
    "--dtype": "torch-dtype mixed-precision precision",
    # machines
    "--colocate": "colocate-all-models colocate-actor-ref hybrid-engine",
    "--rollout-num-gpus": "vllm-num-engines num-inference-gpus num-infer-gpus",
    "--rollout-num-gpus-per-engine": "vllm-tensor-parallel-size gen-tp rollout-tp",
    "--actor-num-gpus-per-node": "n-gpus-per-node num-gpus gpus num-trainer-gpus nproc-per-node",
    "--actor-num-nodes": "nnodes num-nodes",
    "--sglang-mem-fraction-static": "gpu-memory-utilization vllm-gpu-memory-utilization",
    "--rollout-engine": "use-vllm inference-backend vllm-mode generation-backend",
    "--train-backend": "training-backend trainer-backend",
    "--max-staleness": "max-async-level max-off-policy-steps async-level",
    # output
    "--save": "output-dir output-path save-path ckpt-path default-local-dir checkpoint-dir",
    "--load": "resume-from-checkpoint resume-from resume-path load-checkpoint",
    "--save-interval": "save-steps save-freq checkpoint-interval ckpt-interval",
    "--eval-interval": "eval-steps test-freq eval-freq",
    "--run-dir": "run-name experiment-name exp-name logging-dir log-dir",
    "--use-tensorboard": "report-to logger loggers",
}
"""slime's flag -> names in other trainers."""

_THEIRS: Mapping[str, str] = {name: ours for ours, names in _OURS.items() for name in names.split()}


def renamed(word: str) -> str:
    """Return a hint that names slime's flag, or an empty string if no other trainer has the name.

    Args:
        word: A flag, a key, or a word of the form `data.train_batch_size=8` or `--trainer.optim.lr`.
    """
    name = re.sub(r"^[-+]+", "", word.partition("=")[0]).replace("_", "-")
    last = name.rpartition(".")[2]
    for form in (name, ".".join(name.split(".")[-2:]), last):
        if form in _THEIRS:
            return f"slime's is {_THEIRS[form]}"
    ours = {spec.flag for spec in flag_specs().values()} if last != name else ()
    return f"slime's is --{last}" if f"--{last}" in ours else ""
