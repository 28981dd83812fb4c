"""`GRPOTrainer`: TRL's constructor over `slime_core.Trainer`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from slime_python import Run, Trainer

from slime_core.errors import ConfigError
from slime_trl.config import GRPOConfig

_OTHERS = {
    "reward_processing_classes": "reward models are not loaded; write a function that asks a server",
    "callbacks": "write a hook plugin (`slime plugins new hooks NAME`), or loop over `trainer.trainer`",
    "optimizers": "the optimizer is AdamW; type learning_rate, adam_beta1, ... in GRPOConfig",
    "quantization_config": "weights are trained in full, or by LoRA with peft_config",
    "rollout_func": "type slime={'rollout_function_path': FILE.py} in GRPOConfig",
    "environment_factory": "type slime={'environment_path': FILE.py} in GRPOConfig",
}
"""Arguments of TRL's constructor without counterpart -> what to do instead."""


class GRPOTrainer:
    """Train with GRPO from TRL's arguments.

    Args:
        model: Directory, or a transformers model.
        reward_funcs: A function or a list of functions; a name of a reward of slime, too.
        args: The settings; all defaults without them.
        train_dataset: Rows with a column `prompt`, of text or chat messages.
        eval_dataset: Rows likewise, scored every `eval_steps` with `eval_strategy="steps"`.
        processing_class: Tokenizer of a model that is an object.
        peft_config: A `LoraConfig`, of which `r`, `lora_alpha`, `lora_dropout` and `target_modules` are read.
        tools: Functions that the model may call.
        others: Arguments that are refused by name.

    Raises:
        ConfigError: An argument or a field has no counterpart, or a setting is wrong.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if name not in _OTHERS:
                raise ConfigError(f"GRPOTrainer({name}=...): no such argument in TRL 1.16")
            if value is not None and value != (None, None):
                raise ConfigError(f"GRPOTrainer({name}=...): not in slime; {_OTHERS[name]}")
        self.args = args or GRPOConfig()
        settings = {**_lora(peft_config), **self.args.settings()}
        if eval_dataset is not None and self.args.eval_strategy != "steps":
            settings.setdefault("eval_interval", None)
        self.trainer = Trainer(
            model,
            data=train_dataset,
            reward=_rewards(reward_funcs, self.args.reward_weights),
            eval_data=eval_dataset,
            tokenizer=processing_class,
            tools=tools,
            **settings,
        )
        """The `slime_core.Trainer`: steps, samples, evaluation, records."""

    def train(self) -> Run:
        """Train to the end and return the records. Raises SlimeError if the run fails."""
        return self.trainer.train()

    def evaluate(self, eval_dataset: Any = None) -> dict[str, Any]:
        """Return the report of `slime eval` on the newest weights. Raises ConfigError without data."""
        return self.trainer.evaluate(eval_dataset)

    def save_model(self, output_dir: str | Path) -> Path:
        """Write the newest weights and the tokenizer into a new directory. Raises ConfigError if it exists."""
        return self.trainer.save(output_dir)


def _rewards(given: Any, weights: Any) -> Any:
    """Return the argument `reward` of slime's Trainer. Raises ConfigError for reward models and missing weights."""
    rewards = list(given) if isinstance(given, (list, tuple)) else [given]
    for reward in rewards:
        if reward is None or (isinstance(reward, str) and "/" in reward and ".py" not in reward) or _is_module(reward):
            raise ConfigError(
                f"GRPOTrainer(reward_funcs={reward!r:.60}): expected functions; a reward model is asked on a server:"
                " the reward `remote` with slime={'rm_url': ...}, or a function of yours"
            )
    if weights is None:
        return rewards if isinstance(given, (list, tuple)) else given
    if len(weights) != len(rewards):
        raise ConfigError(f"GRPOConfig(reward_weights={weights!r}): expected {len(rewards)}, one a reward function")
    return list(zip(rewards, weights))


def _is_module(reward: Any) -> bool:
    return any(base.__module__.startswith("torch.nn") for base in inspect.getmro(type(reward)))


def _lora(config: Any) -> dict[str, Any]:
    """Return the settings of a `LoraConfig`. Raises ConfigError for another kind of adapter."""
    if config is None:
        return {}
    if not hasattr(config, "r") or not hasattr(config, "lora_alpha"):
        raise ConfigError(f"GRPOTrainer(peft_config={type(config).__name__}): slime has LoRA; give a LoraConfig")
    modules = config.target_modules
    found = {"lora_rank": config.r, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
    if modules is not None:
        found["lora_target_modules"] = [modules] if isinstance(modules, str) else sorted(modules)
    return found
