"""Settings of advantages and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from slime_core.config.sections.base import Exclusive, File, Flag, NoEffect, Refused, Rule, Section, Spec, Switch
from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_core.config.settings import Settings


class AlgorithmArgs(Section):
    """Algorithm."""

    advantage_estimator: Spec = "grpo"
    """RL algorithm, by plugin name."""
    custom_advantage_function_path: str | None = None
    """fn(args, rollout_data) that sets advantages and returns; wins over --advantage-estimator."""
    compute_advantages_and_returns: Switch = True
    """Compute advantages before training; disable for supervised or custom losses."""
    loss_type: Spec = "policy_loss"
    """What is minimised, by plugin name: policy_loss, sft_loss, ... or custom_loss."""
    custom_loss_function_path: str | None = None
    """fn(args, batch, logits, sum_of_sample_mean) for --loss-type custom_loss."""
    custom_pg_loss_reducer_function_path: str | None = None
    """Makes the reducer of the policy loss from lengths and masks."""
    calculate_per_token_loss: bool = False
    """Average the loss over tokens instead of over samples."""
    eps_clip: NonNegativeFloat = 0.2
    """How far the ratio may fall below 1."""
    eps_clip_high: NonNegativeFloat | None = None
    """How far the ratio may rise above 1; --eps-clip when not given."""
    eps_clip_c: Annotated[float | None, Field(gt=1)] = None
    """Dual clip: lower bound of the objective for negative advantages."""
    value_clip: NonNegativeFloat = 0.2
    """How far a value may move from its old one."""
    critic_lr: NonNegativeFloat | None = None
    """Learning rate of the critic; --lr when not given."""
    critic_load: File = None
    """HF directory the critic starts from, with its head if it has one; --hf-checkpoint when not given."""
    kl_coef: NonNegativeFloat = 0.0
    """KL to the reference as a penalty inside the reward."""
    use_kl_loss: bool = False
    """Add the KL to the reference to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.0
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
    grpo_std_normalization: Switch = True
    """Divide the group's rewards by their standard deviation."""
    rewards_normalization: Switch = True
    """Subtract the group's mean from its rewards."""
    use_rollout_entropy: bool = False
    """Compute the entropy in the log-prob pass: the metric rollout/entropy, and token by token in kept samples."""
    use_rollout_logprobs: bool = False
    """Take the engine's log-probs as those of the old policy."""
    get_mismatch_metrics: bool = False
    """Metrics of the distance between engine and trainer."""
    use_tis: bool = False
    """Truncated importance sampling between engine and trainer."""
    tis_clip: Annotated[float, Field(gt=0), Flag(also=("tis-threshold",))] = 2.0
    """Upper bound of the truncated importance weight."""
    tis_clip_low: NonNegativeFloat = 0.0
    """Lower bound of the truncated importance weight."""
    custom_tis_function_path: str | None = None
    """Correction that replaces truncated importance sampling: tis, icepop, mis, or a function."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """mis: importance weight of a token, product over the sequence, or its geometric mean."""
    tis_mode: Literal["truncate", "clip", "mask"] = "truncate"
    """mis: weights above the bounds are cut; or those outside are cut; or their tokens are masked."""
    tis_lower_bound: NonNegativeFloat | None = None
    """mis: lower bound of the weight; 1 / upper bound when not given."""
    tis_upper_bound: PositiveFloat | None = None
    """mis: upper bound of the weight; --tis-clip when not given."""
    tis_batch_normalize: bool = False
    """mis: divide the weights by their mean over the optimizer step."""
    use_rs: bool = False
    """mis: reject (mask) what the importance ratio calls too far off."""
    rs_level: Literal["token", "sequence", "geometric"] = "token"
    """mis: what is rejected: tokens, or sequences by the product or the geometric mean of the ratios."""
    rs_lower_bound: NonNegativeFloat | None = None
    """mis: ratios below are rejected; the weight's lower bound when not given."""
    rs_upper_bound: PositiveFloat | None = None
    """mis: ratios above are rejected; the weight's upper bound when not given."""
    rs_veto_threshold: PositiveFloat | None = None
    """mis: one token ratio below this rejects its sequence."""
    rs_trust_region: Literal["max", "avg"] | None = None
    """mis: reject sequences by the largest k2 or the mean k3 estimate of their tokens' KL."""
    rs_tr_threshold: NonNegativeFloat | None = None
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
    use_sampling_mask: bool = False
    """Train the distribution that is sampled from: log-probs are over the tokens that top-p, top-k or min-p left."""
    keep_old_actor: bool = False
    """Keep the weights that the engines serve, for the old log-probs."""
    num_critic_only_steps: NonNegativeInt = 0
    """Rollouts at the start that train only the critic."""
    use_opd: bool = False
    """On-policy distillation."""
    opd_type: Literal["sglang", "megatron", "local", "self"] | None = None
    """Teacher beside the actor (megatron, or local), the actor itself with a prompt that says more (self), or log-probs
    that come with the samples (sglang)."""
    opd_kl_coef: NonNegativeFloat = 1.0
    """Weight of the KL to the teacher."""
    opd_teacher_load: File = None
    """Model, commit or run directory of the local teacher."""
    opd_teacher_ckpt_step: NonNegativeInt | None = None
    """Commit of --opd-teacher-load by the number in its directory's name; the newest when not given."""


def _defaults(s: Settings) -> None:
    """The clip range is symmetric, and a group of one has no standard deviation."""
    a = s.args
    if a.eps_clip_high is None:
        s.derive("eps_clip_high", a.eps_clip, "eps_clip")
    if a.n_samples_per_prompt == 1 and a.grpo_std_normalization and not s.is_given("grpo_std_normalization"):
        s.derive("grpo_std_normalization", False, "n_samples_per_prompt 1")


def _truncated_sampling(s: Settings) -> None:
    """The trainer's log-probs are of the whole vocabulary; a truncated sampler draws from another distribution."""
    cut = [s.cite(n) for n, off in (("rollout_top_p", 1.0), ("rollout_top_k", -1)) if getattr(s.args, n) != off]
    if cut and s.command == "train" and not s.args.use_sampling_mask:
        s.warnings.append(
            f"{', '.join(cut)}: tokens are drawn from a part of the vocabulary and trained as if drawn from all of it,"
            " which no metric shows; --use-sampling-mask trains them as they are drawn, and --eval-top-p and"
            " --eval-temperature shape evaluations alone."
        )


def _off_policy(s: Settings) -> None:
    """OPSM acts only if a step may start away from its old policy."""
    a = s.args
    starts_at_old = not a.use_rollout_logprobs and a.proximal_policy == "recompute"
    if a.use_opsm and a.num_steps_per_rollout == 1 and starts_at_old:
        s.warnings.append(
            f"{s.cite('use_opsm')} has no effect with {s.cite('num_steps_per_rollout')}: the only step starts at its"
            " old policy; take more steps, or take the engine's for old with --use-rollout-logprobs."
        )


def _routing_replay(s: Settings) -> None:
    """The engine's routing is replayed by the same means as the trainer's own."""
    a = s.args
    if a.use_rollout_routing_replay:
        if s.is_given("use_routing_replay") and not a.use_routing_replay:
            raise ConfigError(f"{s.cite('use_rollout_routing_replay')} contradicts {s.cite('use_routing_replay')}.")
        s.derive("use_routing_replay", True, "use_rollout_routing_replay")
    elif a.use_routing_replay and a.proximal_policy == "interpolate":
        raise ConfigError(
            f"{s.cite('use_routing_replay')} records the routing of the log-prob pass, which"
            f" {s.cite('proximal_policy')} does without; replay the engine's with --use-rollout-routing-replay, or"
            " remove one."
        )


def _reference(s: Settings) -> None:
    """The reference is the initial model by default. In the reward only k1 fits; see docs/concepts/kl.md."""
    a = s.args
    if a.kl_coef and not s.is_given("kl_loss_type"):
        s.derive("kl_loss_type", "k1", "kl_coef")
    elif a.kl_coef and a.kl_loss_type != "k1":
        s.warnings.append(
            f"{s.cite('kl_loss_type')} with {s.cite('kl_coef')}: in the reward only k1 has the KL's gradient on average"
            " (docs/concepts/kl.md)."
        )
    if (a.kl_coef or a.use_kl_loss) and a.ref_load is None and a.hf_checkpoint is not None:
        s.derive("ref_load", a.hf_checkpoint, "hf_checkpoint")


_IN_TRAINER = {"megatron": True, "sglang": False, "self": False, None: False}
"""Value of --opd-type -> whether the trainer loads a model for the teacher."""


def _distillation(s: Settings) -> None:
    """A local teacher has a checkpoint; a remote one's log-probs come with the samples."""
    if s.args.opd_type == "local":
        s.derive("opd_type", "megatron", "opd_type local")


RULES: tuple[Rule, ...] = (
    _defaults,
    _truncated_sampling,
    Exclusive(
        "use_rollout_logprobs",
        "use_tis",
        "are both set; use one: either the old policy is the engine's, or the loss is corrected for its distance from"
        " the trainer's",
    ),
    Refused(
        lambda a: a.proximal_policy == "interpolate" and a.use_rollout_logprobs,
        "{proximal_policy} and {use_rollout_logprobs} both name the old policy; use one.",
    ),
    Exclusive("keep_old_actor", "use_rollout_logprobs", "both name the old policy; use one"),
    Refused(
        lambda a: a.keep_old_actor and a.proximal_policy != "recompute",
        "{keep_old_actor} and {proximal_policy} both name the old policy; use one.",
    ),
    Refused(lambda a: a.use_rs and not a.use_tis, "{use_rs} needs --use-tis."),
    Refused(
        lambda a: a.use_rs and a.normalize_advantages and a.proximal_policy == "interpolate",
        "{use_rs} with {normalize_advantages} and {proximal_policy}: what is rejected is known only in the step, after"
        " the advantages are normalised; remove one.",
    ),
    NoEffect(
        "tis_clip tis_clip_low tis_level tis_mode tis_lower_bound tis_upper_bound tis_batch_normalize rs_level"
        " rs_lower_bound rs_upper_bound rs_veto_threshold rs_trust_region rs_tr_threshold custom_tis_function_path",
        lambda a: not (a.use_tis or a.get_mismatch_metrics),
        "since neither --use-tis nor --get-mismatch-metrics is set",
    ),
    NoEffect("opsm_delta", lambda a: not a.use_opsm, "without --use-opsm"),
    _off_policy,
    NoEffect("rs_level rs_lower_bound rs_upper_bound", lambda a: a.use_tis and not a.use_rs, "without --use-rs"),
    NoEffect(
        "tis_lower_bound",
        lambda a: a.use_tis and not a.use_rs and a.tis_mode == "truncate",
        "on the weights with {tis_mode}",
    ),
    NoEffect("rs_tr_threshold", lambda a: a.use_tis and a.rs_trust_region is None, "without --rs-trust-region"),
    _routing_replay,
    NoEffect(
        "use_sampling_mask",
        lambda a: (a.rollout_top_p, a.rollout_top_k, a.custom_generate_function_path) == (1.0, -1, None),
        "without --rollout-top-p or --rollout-top-k",
    ),
    Exclusive("kl_coef", "kl_loss_coef", "are both set; use one: reward penalty or loss term"),
    NoEffect("kl_loss_coef use_unbiased_kl", lambda a: not a.use_kl_loss, "without --use-kl-loss"),
    NoEffect(
        "kl_loss_type ref_update_interval",
        lambda a: not (a.kl_coef or a.use_kl_loss),
        "without --kl-coef or --use-kl-loss",
    ),
    _reference,
    Refused(
        lambda a: a.use_kl_loss and a.kl_loss_coef and a.kl_loss_type == "k1" and not a.use_unbiased_kl,
        "{kl_loss_type} as a loss has a gradient of zero on average: nothing would pull the policy to its reference."
        " Add --use-unbiased-kl, or take --kl-loss-type low_var_kl.",
    ),
    Refused(
        lambda a: a.use_kl_loss and a.kl_loss_coef and a.kl_loss_type == "k2" and a.use_unbiased_kl,
        "{use_unbiased_kl} with {kl_loss_type}: k2's gradient is the KL's already, and the ratio makes it another."
        " Remove one of them.",
    ),
    _distillation,
    Refused(lambda a: a.opd_teacher_load and not a.use_opd, "{opd_teacher_load} needs --use-opd."),
    NoEffect("opd_type opd_kl_coef", lambda a: not a.use_opd, "without --use-opd"),
    Refused(
        lambda a: a.use_opd and a.opd_type is None,
        "{use_opd} needs --opd-type local (a teacher beside the actor; also called megatron), self (the actor with a"
        " prompt that says more) or sglang (log-probs that come with the samples).",
    ),
    Refused(
        lambda a: a.use_opd and _IN_TRAINER[a.opd_type] and not a.opd_teacher_load,
        "{opd_type} needs --opd-teacher-load DIR, an HF-layout model.",
    ),
    Refused(
        lambda a: a.use_opd and not _IN_TRAINER[a.opd_type] and a.opd_teacher_load,
        "{opd_teacher_load} is for --opd-type local; with sglang the teacher is served elsewhere, with self it is the"
        " actor.",
    ),
)
