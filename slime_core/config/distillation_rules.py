"""Rules of on-policy distillation: where the teacher is, and that it is used."""

from __future__ import annotations

from slime_core.config.settings import Settings
from slime_core.errors import ConfigError

_BESIDE = {"megatron": True, "sglang": False}
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
    if _BESIDE[a.opd_type] and not a.opd_teacher_load:
        raise ConfigError(f"{s.cite('opd_type')} needs --opd-teacher-load DIR, an HF-layout model.")
    if a.opd_teacher_load and not _BESIDE[a.opd_type]:
        raise ConfigError(
            f"{s.cite('opd_teacher_load')} is for --opd-type local; with sglang the teacher is served elsewhere."
        )
