"""Rules of the policy loss: clip range, off-policy corrections, group statistics, KL to a reference, distillation."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError


def clipping(s: Settings) -> None:
    """The clip range is symmetric unless told otherwise."""
    if s.args.eps_clip_high is None:
        s.derive("eps_clip_high", s.args.eps_clip, "eps_clip")


def routing_replay(s: Settings) -> None:
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


def off_policy(s: Settings) -> None:
    """One source of old log-probs, and corrections that are switched on."""
    a = s.args
    _truncated_sampling(s)
    if a.use_rollout_logprobs and a.use_tis:
        raise ConfigError(
            f"{s.cite('use_rollout_logprobs')} and {s.cite('use_tis')} are both set; use one: either the old policy is"
            " the engine's, or the loss is corrected for its distance from the trainer's."
        )
    if a.proximal_policy == "interpolate" and a.use_rollout_logprobs:
        raise ConfigError(
            f"{s.cite('proximal_policy')} and {s.cite('use_rollout_logprobs')} both name the old policy; use one."
        )
    for other in ("use_rollout_logprobs", "proximal_policy"):
        if a.keep_old_actor and getattr(a, other) not in (False, "recompute"):
            raise ConfigError(f"{s.cite('keep_old_actor')} and {s.cite(other)} both name the old policy; use one.")
    if a.use_rs and not a.use_tis:
        raise ConfigError(f"{s.cite('use_rs')} needs --use-tis.")
    if s.is_given("opsm_delta") and not a.use_opsm:
        s.warnings.append(f"{s.cite('opsm_delta')} has no effect without --use-opsm.")
    starts_at_old = not a.use_rollout_logprobs and a.proximal_policy == "recompute"
    if a.use_opsm and a.num_steps_per_rollout == 1 and starts_at_old:
        s.warnings.append(
            f"{s.cite('use_opsm')} has no effect with {s.cite('num_steps_per_rollout')}: the only step starts at its"
            " old policy; take more steps, or take the engine's for old with --use-rollout-logprobs."
        )
    if a.use_tis:
        _rejection(s)


def _truncated_sampling(s: Settings) -> None:
    """The trainer's log-probs are of the whole vocabulary; a truncated sampler draws from another distribution."""
    cut = [s.cite(n) for n, off in (("rollout_top_p", 1.0), ("rollout_top_k", -1)) if getattr(s.args, n) != off]
    if cut and s.command == "train":
        s.warnings.append(
            f"{', '.join(cut)}: tokens are drawn from a part of the vocabulary and trained as if drawn from all of it,"
            " which no metric shows; --eval-top-p and --eval-temperature shape evaluations alone."
        )


def _rejection(s: Settings) -> None:
    """Settings of MIS that another one keeps from acting."""
    a = s.args
    if not a.use_rs:
        _without_effect(s, ("rs_level", "rs_lower_bound", "rs_upper_bound"), "without --use-rs")
        if a.tis_mode == "truncate":
            _without_effect(s, ("tis_lower_bound",), f"on the weights with {s.cite('tis_mode')}")
    if a.rs_trust_region is None:
        _without_effect(s, ("rs_tr_threshold",), "without --rs-trust-region")


def _without_effect(s: Settings, names: Sequence[str], why: str) -> None:
    given = [s.cite(name) for name in names if s.is_given(name) and getattr(s.args, name) is not None]
    if given:
        s.warnings.append(f"{', '.join(given)}: no effect {why}.")


def group_statistics(s: Settings) -> None:
    """A group of one has no standard deviation."""
    name = "grpo_std_normalization"
    if s.args.n_samples_per_prompt == 1 and s.args.grpo_std_normalization and not s.is_given(name):
        s.derive(name, False, "n_samples_per_prompt 1")


def kl_to_reference(s: Settings) -> None:
    """Reward penalty or loss term, and where the reference comes from."""
    a = s.args
    if a.kl_coef and a.kl_loss_coef:
        raise ConfigError(
            f"{s.cite('kl_coef')} and {s.cite('kl_loss_coef')} are both set; use one: reward penalty or loss term."
        )
    if a.kl_loss_coef and not a.use_kl_loss:
        s.warnings.append(f"{s.cite('kl_loss_coef')} has no effect without --use-kl-loss.")
    if not a.use_kl_loss:
        _without_effect(s, ("use_unbiased_kl",), "without --use-kl-loss")
    uses_reference = bool(a.kl_coef or a.use_kl_loss)
    if not uses_reference:
        _without_effect(s, ("kl_loss_type",), "without --kl-coef or --use-kl-loss")
    _estimator_of_kl(s)
    if uses_reference and a.ref_load is None and a.hf_checkpoint is not None:
        s.derive("ref_load", a.hf_checkpoint, "hf_checkpoint")
    if a.ref_update_interval is not None and not uses_reference:
        s.warnings.append(f"{s.cite('ref_update_interval')} has no effect without --kl-coef or --use-kl-loss.")


def _estimator_of_kl(s: Settings) -> None:
    """As a loss each estimator pulls to another optimum (docs/concepts/kl.md); in the reward only k1 fits."""
    a = s.args
    if a.kl_coef and not s.is_given("kl_loss_type"):
        s.derive("kl_loss_type", "k1", "kl_coef")
    elif a.kl_coef and a.kl_loss_type != "k1":
        s.warnings.append(
            f"{s.cite('kl_loss_type')} with {s.cite('kl_coef')}: in the reward only k1 has the KL's gradient on average"
            " (docs/concepts/kl.md)."
        )
    if not a.use_kl_loss or not a.kl_loss_coef:
        return
    if a.kl_loss_type == "k1" and not a.use_unbiased_kl:
        raise ConfigError(
            f"{s.cite('kl_loss_type')} as a loss has a gradient of zero on average: nothing would pull the policy to"
            " its reference. Add --use-unbiased-kl, or take --kl-loss-type low_var_kl."
        )
    if a.kl_loss_type == "k2" and a.use_unbiased_kl:
        raise ConfigError(
            f"{s.cite('use_unbiased_kl')} with {s.cite('kl_loss_type')}: k2's gradient is the KL's already, and the"
            " ratio makes it another. Remove one of them."
        )


_IN_TRAINER = {"megatron": True, "sglang": False}
"""Value of --opd-type -> the teacher is beside the actor, in the trainer, and not served elsewhere."""


def distillation(s: Settings) -> None:
    """A local teacher has a checkpoint; a remote one's log-probs come with the samples."""
    a = s.args
    if a.opd_type == "local":
        s.derive("opd_type", "megatron", "opd_type local")
    if not a.use_opd:
        if a.opd_teacher_load:
            raise ConfigError(f"{s.cite('opd_teacher_load')} needs --use-opd.")
        for name in ("opd_type", "opd_kl_coef"):
            if s.is_given(name):
                s.warnings.append(f"{s.cite(name)} has no effect without --use-opd.")
        return
    if a.opd_type is None:
        raise ConfigError(
            f"{s.cite('use_opd')} needs --opd-type local (a teacher beside the actor; also called megatron) or"
            " --opd-type sglang (its log-probs come with the samples)."
        )
    if _IN_TRAINER[a.opd_type] and not a.opd_teacher_load:
        raise ConfigError(f"{s.cite('opd_type')} needs --opd-teacher-load DIR, an HF-layout model.")
    if a.opd_teacher_load and not _IN_TRAINER[a.opd_type]:
        raise ConfigError(
            f"{s.cite('opd_teacher_load')} is for --opd-type local; with sglang the teacher is served elsewhere."
        )
