"""The trainers of one process, as the launcher sees them: the actor's and, for estimators with values, the critic's.

Built once per process; saved, loaded and closed together. The actor is built first and closed last, since it owns the
process group that both use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import CheckpointError
from slime_core.plugins.hooks import Hooks
from slime_core.plugins.signatures import declared
from slime_core.protocols import Args, Trainer

if TYPE_CHECKING:
    from slime_core.config.role_settings import Role

CRITIC = "critic"
"""Folder of a checkpoint in which the critic's trainer saves."""
OF_CRITIC: Mapping[str, Any] = {
    "kl_coef": 0.0,
    "use_kl_loss": False,
    "use_opd": False,
    "keep_old_actor": False,
    "custom_advantage_function_path": None,
}
"""Settings that are fixed for a critic's trainer, which has no reference, no teacher and no advantages."""


def role_args(args: Args, role: Role) -> Any:
    """Return the settings to build a role's trainer with: a copy of `args`, or `args` itself if nothing differs.

    Raises:
        ConfigError: The file of --megatron-config-path cannot be used.
    """
    own: dict[str, Any] = {}
    if args.megatron_config_path:
        from slime_core.config.role_settings import role_overrides

        own = {name: entry.value for name, entry in role_overrides(args).get(role, {}).items()}
    if role == "critic":
        own = {**OF_CRITIC, **own}
        if "lr" in own:
            own["critic_lr"] = None  # the entry says it for this role alone, --critic-lr for every critic
    return args.model_copy(update=own) if own else args


class Trainers:
    """The actor's trainer and, if the estimator needs values, the critic's.

    Args:
        args: The run's settings; each role's trainer gets them with the role's overrides in `--megatron-config-path`.
        make: Trainer class or factory, called as `make(args)` and `make(args, role="critic")`.
        with_critic: Whether the estimator needs values.
        hooks: Hooks of the process, passed to a class that takes the keyword `hooks` because it calls hooks itself.
    """

    def __init__(
        self, args: Args, make: Callable[..., Trainer], *, with_critic: bool, hooks: Hooks | None = None
    ) -> None:
        self.args = args
        offered = {"hooks": hooks} if declared(make, ("hooks",)) else {}
        self.actor = make(role_args(args, "actor"), **offered)
        self.critic: Trainer | None = None
        if with_critic:
            try:
                self.critic = make(role_args(args, "critic"), role=CRITIC, **offered)
            except BaseException:
                self.actor.close()
                raise

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank."""
        return self.actor.broadcast(payload)

    def save(self, directory: Path) -> None:
        """Save the actor into `directory` and the critic into `directory/critic`."""
        self.actor.save(directory)
        if self.critic is not None:
            self.critic.save(directory / CRITIC)

    def load(self, directory: Path) -> None:
        """Load what `save` wrote; `--finetune` from a directory without a critic keeps the critic's initial weights.

        Raises:
            CheckpointError: The checkpoint does not fit, or lacks the critic of the run to resume.
        """
        self.actor.load(directory)
        if self.critic is None:
            return
        folder = directory / CRITIC
        if folder.is_dir():
            self.critic.load(folder)
        elif not self.args.finetune:
            raise CheckpointError(
                f"{directory}: no {CRITIC}/ there: it was saved by a run without a critic; to start from its weights"
                " with a new critic, add --finetune"
            )

    def offload(self) -> None:
        """Release the memory that only training needs (`--offload-train`); return when all processes have."""
        for trainer in self._both():
            trainer.offload()

    def onload(self) -> None:
        """Take the released memory again."""
        for trainer in self._both():
            trainer.onload()

    def _both(self) -> list[Any]:  # only trainers whose traits say so have `offload`
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def close(self) -> None:
        """Leave process groups and free memory; the actor, which joined the groups, closes last."""
        try:
            if self.critic is not None:
                self.critic.close()
        finally:
            self.actor.close()
