"""`GRPOConfig`: TRL's fields, and the settings of slime that they become."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from slime_core.errors import ConfigError, did_you_mean
from slime_trl.fields import FIELDS, IDLE, REFUSED

logger = logging.getLogger(__name__)

_LOSSES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "dapo": {"calculate_per_token_loss": True},
    "bnpo": {"calculate_per_token_loss": True},
    "dr_grpo": {"custom_pg_loss_reducer_function_path": "constant"},
}
"""`loss_type` -> settings: what the loss of a token is divided by (TRL's documentation of GRPOConfig)."""
_SCALES = {True: "group", False: "none"}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_TRACKERS = {"wandb": "use_wandb", "tensorboard": "use_tensorboard"}


class GRPOConfig:
    """Fields of TRL's `GRPOConfig`, as attributes.

    Args:
        output_dir: Directory of the run; a new one below outputs/ without it.
        slime: Settings of `slime train` that have no field here; they win.
        fields: Fields of TRL.

    Raises:
        ConfigError: A field has no counterpart, is unknown, or has a value that slime does not have.
    """

    def __init__(self, output_dir: str | None = None, *, slime: Mapping[str, Any] | None = None, **fields: Any) -> None:
        self.given = {**({} if output_dir is None else {"output_dir": output_dir}), **fields}
        self.slime = dict(slime or {})
        for name, value in self.given.items():
            self._check(name, value)
        if idle := [name for name in self.given if name in IDLE]:
            logger.warning("GRPOConfig: without effect in slime: %s", ", ".join(idle))
        for name, field in FIELDS.items():
            setattr(self, name, self.given.get(name, field.default))
        scales: Any = self.given.get("scale_rewards", FIELDS["scale_rewards"].default)
        self.scale_rewards: str = _SCALES.get(scales, scales)
        self._one_of("loss_type", _LOSSES)
        self._one_of("scale_rewards", ("group", "none"))
        self._one_of("lr_scheduler_type", _SCHEDULES)
        self._one_of("importance_sampling_level", ("token", "sequence"))
        if self.given.get("generation_batch_size") and self.given.get("steps_per_generation"):
            raise ConfigError(
                "GRPOConfig: generation_batch_size and steps_per_generation say the same; type one of them"
            )
        if self.answers % self.num_generations:
            raise ConfigError(
                f"GRPOConfig: {self.answers} answers a rollout (generation_batch_size, or per_device_train_batch_size"
                f" x steps_per_generation) are no multiple of num_generations {self.num_generations}"
            )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"GRPOConfig has no field {name!r} here")

    def _check(self, name: str, value: Any) -> None:
        """Raise ConfigError for a field that slime cannot obey."""
        if name in FIELDS or name in IDLE:
            return
        if name not in REFUSED:
            meant = did_you_mean(name, [*FIELDS, *IDLE, *REFUSED])
            raise ConfigError(
                f"GRPOConfig({name}={value!r}): no counterpart in slime.{meant} Remove it, or type"
                " slime={SETTING: VALUE} (`slime train --help-all` lists the settings)"
            )
        same, instead = REFUSED[name]
        if value != same:
            raise ConfigError(f"GRPOConfig({name}={value!r}): not in slime, which is as with {same!r}; {instead}")

    def _one_of(self, name: str, allowed: Any) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(f"GRPOConfig({name}={value!r}): slime has {', '.join(map(repr, allowed))}")

    @property
    def _batch(self) -> int:
        """Answers of an optimizer step."""
        return int(self.per_device_train_batch_size * self.gradient_accumulation_steps)

    @property
    def answers(self) -> int:
        """Answers of a rollout."""
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        return int(self.generation_batch_size or self.per_device_train_batch_size * steps)

    @property
    def steps(self) -> int:
        """Optimizer steps of a rollout. Raises ConfigError if they are no whole number."""
        if self.answers % self._batch:
            raise ConfigError(
                f"GRPOConfig: {self.answers} answers a rollout are no multiple of an optimizer step's {self._batch}"
                " (per_device_train_batch_size x gradient_accumulation_steps)"
            )
        return self.answers // self._batch

    def settings(self) -> dict[str, Any]:
        """Return the settings of slime. Raises ConfigError for values that slime cannot have."""
        found: dict[str, Any] = {
            "save": self.output_dir,
            "lr": self.learning_rate,
            "lr_decay_style": _SCHEDULES[self.lr_scheduler_type],
            "weight_decay": self.weight_decay,
            "adam_beta1": self.adam_beta1,
            "adam_beta2": self.adam_beta2,
            "adam_eps": self.adam_epsilon,
            "clip_grad": self.max_grad_norm,
            "global_batch_size": self._batch,
            "rollout_batch_size": self.answers // self.num_generations,
            "num_steps_per_rollout": self.steps,
            "n_samples_per_prompt": self.num_generations,
            "rollout_max_response_len": self.max_completion_length,
            "rollout_temperature": self.temperature,
            "rollout_top_p": self.top_p,
            "rollout_top_k": self.top_k or -1,
            "rollout_shuffle": self.shuffle_dataset,
            "eps_clip": self.epsilon,
            "eps_clip_high": self.epsilon_high,
            "eps_clip_c": self.delta,
            "entropy_coef": self.entropy_coef,
            "grpo_std_normalization": self.scale_rewards == "group",
            "seed": self.seed,
            "rollout_seed": self.seed,
            "input_key": "prompt",
            **_LOSSES[self.loss_type],
            **self._length(),
            **self._intervals(),
        }
        if self.beta:
            found |= {"use_kl_loss": True, "kl_loss_coef": self.beta}
        if self.importance_sampling_level == "sequence":
            found["advantage_estimator"] = "gspo"
        if self.given.get("gradient_checkpointing"):
            found["recompute_activations"] = True
        if self.bf16:
            found["bf16"] = True
        if self.chat_template_kwargs:
            found["apply_chat_template_kwargs"] = self.chat_template_kwargs
        return {name: value for name, value in {**found, **self._trackers(), **self.slime}.items() if value is not None}

    def _length(self) -> dict[str, Any]:
        """Return the settings of the run's length and of the warm-up."""
        warmup = {"lr_warmup_iters": self.warmup_steps or None, "lr_warmup_fraction": self.warmup_ratio or None}
        if self.max_steps > 0:
            return {"num_rollout": math.ceil(self.max_steps / self.steps), **warmup}
        if self.num_train_epochs != int(self.num_train_epochs):
            raise ConfigError(
                f"GRPOConfig(num_train_epochs={self.num_train_epochs!r}): a whole number, or type max_steps"
            )
        return {"num_epoch": int(self.num_train_epochs), **warmup}

    def _intervals(self) -> dict[str, Any]:
        """Return the rollouts between commits and between evaluations."""
        every = {}
        if self.save_strategy == "steps":
            every["save_interval"] = max(1, int(self.save_steps) // self.steps)
        if self.eval_strategy == "steps":
            every["eval_interval"] = max(1, int(self.eval_steps or 10) // self.steps)
            every["n_samples_per_eval_prompt"] = self.num_generations_eval
        return every

    def _trackers(self) -> dict[str, Any]:
        names = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ())
        unknown = [name for name in names if name not in (*_TRACKERS, "none", "all")]
        if unknown:
            raise ConfigError(f"GRPOConfig(report_to={self.report_to!r}): slime has {', '.join(_TRACKERS)} and 'none'")
        return {setting: True for name, setting in _TRACKERS.items() if name in names}
