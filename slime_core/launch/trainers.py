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
"""Folder of a checkpoint that holds what the critic's trainer saves."""
OF_CRITIC: Mapping[str, Any] = {
    "kl_coef": 0.0,
    "use_kl_loss": False,
    "use_opd": False,
    "keep_old_actor": False,
    "custom_advantage_function_path": None,
}
"""What a critic's trainer sees whatever the run's settings are: it has no reference, no teacher and no advantages."""


def role_args(args: Args, role: Role) -> Any:
    """The settings that a role's trainer is built with: a copy of `args`, or `args` itself where nothing differs.

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
    """One or two trainers.

    Args:
        args: The run's settings; each role's trainer gets them with its own of `--megatron-config-path`.
        make: Trainer class or factory, called as `make(args)` and `make(args, role="critic")`.
        with_critic: Whether the estimator needs values.
        hooks: Those of the process, for a class that takes the keyword `hooks`, since it has hooks of its own.
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
        """Rank 0's bytes on every rank."""
        return self.actor.broadcast(payload)

    def save(self, directory: Path) -> None:
        """The actor into `directory`, the critic into `directory/critic`."""
        self.actor.save(directory)
        if self.critic is not None:
            self.critic.save(directory / CRITIC)

    def load(self, directory: Path) -> None:
        """Inverse of `save`; `--finetune` from a directory without a critic leaves the critic as it started.

        Raises:
            CheckpointError: The checkpoint does not fit, or lacks the critic that the run goes on with.
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
        """Give up what only training needs, under `--offload-train`; returns when all processes have."""
        for trainer in self._both():
            trainer.offload()

    def onload(self) -> None:
        """Take it again."""
        for trainer in self._both():
            trainer.onload()

    def _both(self) -> list[Any]:  # `offload` is of those whose traits say so
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def close(self) -> None:
        """Leave process groups and free memory; the actor, which joined them, last."""
        try:
            if self.critic is not None:
                self.critic.close()
        finally:
            self.actor.close()
