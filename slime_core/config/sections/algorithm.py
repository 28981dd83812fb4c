"""Settings of advantages and losses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_core.config.sections.base import FILE, SPEC, Flag, Section


class AlgorithmArgs(Section):
    """Algorithm."""

    advantage_estimator: Annotated[str, SPEC] = "grpo"
    """RL algorithm, by plugin name."""
    custom_advantage_function_path: str | None = None
    """fn(args, rollout_data) that sets advantages and returns; wins over --advantage-estimator."""
    compute_advantages_and_returns: Annotated[bool, Flag(off="--disable-compute-advantages-and-returns")] = True
    """Compute advantages before training; disable for supervised or custom losses."""
    loss_type: Annotated[str, SPEC] = "policy_loss"
    """What is minimised, by plugin name: policy_loss, sft_loss, ... or custom_loss."""
    custom_loss_function_path: str | None = None
    """fn(args, batch, logits, sum_of_sample_mean) for --loss-type custom_loss."""
    custom_pg_loss_reducer_function_path: str | None = None
    """Makes the reducer of the policy loss from lengths and masks."""
    calculate_per_token_loss: bool = False
    """Average the loss over tokens instead of over samples."""
    eps_clip: Annotated[float, Field(ge=0)] = 0.2
    """How far the ratio may fall below 1."""
    eps_clip_high: Annotated[float | None, Field(ge=0)] = None
    """How far the ratio may rise above 1; --eps-clip when not given."""
    eps_clip_c: Annotated[float | None, Field(gt=1)] = None
    """Dual clip: lower bound of the objective for negative advantages."""
    value_clip: Annotated[float, Field(ge=0)] = 0.2
    """How far a value may move from its old one."""
    critic_lr: Annotated[float | None, Field(ge=0)] = None
    """Learning rate of the critic; --lr when not given."""
    critic_load: Annotated[str | None, FILE] = None
    """HF directory the critic starts from, with its head if it has one; --hf-checkpoint when not given."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """KL to the reference as a penalty inside the reward."""
    use_kl_loss: bool = False
    """Add the KL to the reference to the loss."""
    kl_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL in the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Estimator of the KL; k1 for --kl-coef when not given."""
    use_unbiased_kl: bool = False
    """Multiply the KL by the importance ratio."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount per token."""
    lambd: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Decay of generalised advantage estimation."""
    normalize_advantages: bool = False
    """Whiten advantages over the batch."""
    grpo_std_normalization: Annotated[bool, Flag(off="--disable-grpo-std-normalization")] = True
    """Divide the group's rewards by their standard deviation."""
    rewards_normalization: Annotated[bool, Flag(off="--disable-rewards-normalization")] = True
    """Subtract the group's mean from its rewards."""
    use_rollout_entropy: bool = False
    """Compute the entropy in the log-prob pass, as the metric rollout/entropy."""
    use_rollout_logprobs: bool = False
    """Take the engine's log-probs as those of the old policy."""
    get_mismatch_metrics: bool = False
    """Metrics of the distance between engine and trainer."""
    use_tis: bool = False
    """Truncated importance sampling between engine and trainer."""
    tis_clip: Annotated[float, Field(gt=0), Flag(also=("tis-threshold",))] = 2.0
    """Upper bound of the truncated importance weight."""
    tis_clip_low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of the truncated importance weight."""
    custom_tis_function_path: str | None = None
    """Correction that replaces truncated importance sampling: tis, icepop, mis, or a function."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """mis: importance weight of a token, product over the sequence, or its geometric mean."""
    tis_mode: Literal["truncate", "clip", "mask"] = "truncate"
    """mis: weights above the bounds are cut; or those outside are cut; or their tokens are masked."""
    tis_lower_bound: Annotated[float | None, Field(ge=0)] = None
    """mis: lower bound of the weight; 1 / upper bound when not given."""
    tis_upper_bound: Annotated[float | None, Field(gt=0)] = None
    """mis: upper bound of the weight; --tis-clip when not given."""
    tis_batch_normalize: bool = False
    """mis: divide the weights by their mean over the optimizer step."""
    use_rs: bool = False
    """mis: reject (mask) what the importance ratio calls too far off."""
    rs_level: Literal["token", "sequence", "geometric"] = "token"
    """mis: what is rejected: tokens, or sequences by the product or the geometric mean of the ratios."""
    rs_lower_bound: Annotated[float | None, Field(ge=0)] = None
    """mis: ratios below are rejected; the weight's lower bound when not given."""
    rs_upper_bound: Annotated[float | None, Field(gt=0)] = None
    """mis: ratios above are rejected; the weight's upper bound when not given."""
    rs_veto_threshold: Annotated[float | None, Field(gt=0)] = None
    """mis: one token ratio below this rejects its sequence."""
    rs_trust_region: Literal["max", "avg"] | None = None
    """mis: reject sequences by the largest k2 or the mean k3 estimate of their tokens' KL."""
    rs_tr_threshold: Annotated[float | None, Field(ge=0)] = None
    """mis: KL above which --rs-trust-region rejects."""
    proximal_policy: Literal["recompute", "interpolate"] = "recompute"
    """Old log-probs: the trainer's, or a blend of engine and trainer by staleness that saves a forward pass."""
    use_opsm: bool = False
    """Mask off-policy sequences with negative advantage."""
    opsm_delta: float = 1e-4
    """Sequence KL from which a sequence counts as off-policy."""
    use_routing_replay: bool = False
    """Repeat the expert routing of the log-prob pass in training."""
    use_rollout_routing_replay: bool = False
    """Repeat the engine's expert routing in training."""
    keep_old_actor: bool = False
    """Keep the weights that the engines serve, for the old log-probs."""
    num_critic_only_steps: Annotated[int, Field(ge=0)] = 0
    """Rollouts at the start that train only the critic."""
    use_opd: bool = False
    """On-policy distillation."""
    opd_type: Literal["sglang", "megatron", "local"] | None = None
    """Teacher beside the actor (megatron, or local), or log-probs that come with the samples (sglang)."""
    opd_kl_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the KL to the teacher."""
    opd_teacher_load: Annotated[str | None, FILE] = None
    """Model, commit or run directory of the local teacher."""
    opd_teacher_ckpt_step: Annotated[int | None, Field(ge=0)] = None
    """Number of the rollout whose commit --opd-teacher-load takes; the newest when not given."""
