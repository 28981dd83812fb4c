"""TRL's constructor and configuration over slime's Trainer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slime_testing_contracts.tiny import tiny_model
from slime_trl import GRPOConfig, GRPOTrainer
from slime_trl.fields import FIELDS, IDLE, REFUSED
from slime_trl.rewards import accuracy_reward, think_format_reward

from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError

ROWS = [{"prompt": f"{a}+{b}=?", "solution": str(a + b)} for a in range(10, 18) for b in range(10, 12)]
SMALL: dict[str, Any] = {
    "per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 6, "max_steps": 1,
    "learning_rate": 1e-3, "slime": {"num_threads": 1, "preflight": False},
}  # fmt: skip


def length_reward(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
    """A function as TRL's documentation writes it."""
    return [len(completion) / 10 + len(right) for completion, right in zip(completions, solution)]


def test_every_field_has_one_counterpart_that_exists() -> None:
    assert len({*FIELDS, *IDLE, *REFUSED}) == len(FIELDS) + len(IDLE) + len(REFUSED)
    settings = {name for field in FIELDS.values() for name in field.setting.split(", ")}
    assert {name for name in settings if name.split(".")[0] not in {*flag_specs(), "plugins"}} == set()
    for same, instead in REFUSED.values():
        del same
        named = re.findall(r"'(\w+)': ", instead)
        assert [name for name in named if name not in flag_specs()] == []


def test_defaults_are_those_of_trl() -> None:
    settings = GRPOConfig().settings()
    expected = {
        "lr": 1e-6, "lr_decay_style": "linear", "weight_decay": 0.0, "num_epoch": 3, "global_batch_size": 8,
        "rollout_batch_size": 1, "n_samples_per_prompt": 8, "num_steps_per_rollout": 1, "eps_clip": 0.2,
        "rollout_max_response_len": 512, "calculate_per_token_loss": True, "save_interval": 500, "rollout_top_k": -1,
    }  # fmt: skip
    assert {name: settings[name] for name in expected} == expected
    assert "use_kl_loss" not in settings


def test_fields_become_settings() -> None:
    config = GRPOConfig(
        "out", per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=4, max_steps=10,
        num_generations=8, beta=0.04, loss_type="dr_grpo", scale_rewards=False, epsilon_high=0.28, save_steps=4,
        importance_sampling_level="sequence", eval_strategy="steps", eval_steps=6, report_to=["tensorboard"],
        slime={"rollout_engine": "sglang"},
    )  # fmt: skip
    expected = {
        "save": "out", "global_batch_size": 8, "rollout_batch_size": 2, "num_steps_per_rollout": 2, "num_rollout": 5,
        "use_kl_loss": True, "kl_loss_coef": 0.04, "custom_pg_loss_reducer_function_path": "constant",
        "grpo_std_normalization": False, "eps_clip_high": 0.28, "advantage_estimator": "gspo", "save_interval": 2,
        "eval_interval": 3, "use_tensorboard": True, "rollout_engine": "sglang",
    }  # fmt: skip
    settings = config.settings()
    assert {name: settings[name] for name in expected} == expected
    assert config.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_iterations": 2}, ("num_iterations=2", "steps_per_generation")),
        ({"use_vllm": True}, ("use_vllm=True", "rollout_engine")),
        ({"scale_rewards": "batch"}, ("scale_rewards='batch'", "'group'")),
        ({"num_train_epochs": 0.5}, ("num_train_epochs=0.5", "max_steps")),
        ({"report_to": "mlflow"}, ("report_to='mlflow'", "wandb")),
        ({"fp16": True}, ("fp16=True", "bf16=True")),
        ({"learning_rat": 1.0}, ("learning_rat", "learning_rate")),
        ({"loss_type": "sapo"}, ("loss_type='sapo'", "'dapo'")),
        ({"num_generations": 3}, ("num_generations 3", "per_device_train_batch_size")),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, ("multiple", "gradient_accumulation_steps")),
    ],
)
def test_a_field_without_counterpart_is_refused_with_what_to_do(fields: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        GRPOConfig(**fields).settings()
    assert [word for word in named if word not in str(refused.value)] == []


def test_fields_without_effect_are_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    GRPOConfig(logging_steps=1, log_completions=True, use_vllm=False)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["logging_steps, log_completions"]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GRPOTrainer]:
    monkeypatch.chdir(tmp_path)

    def trainer(reward: Any = length_reward, **changes: Any) -> GRPOTrainer:
        fields = {**SMALL, **changes.pop("fields", {})}
        return GRPOTrainer(str(tiny_model()), reward, GRPOConfig("run", **fields), ROWS, **changes)

    return trainer


@pytest.mark.parametrize(
    ("reward", "changes", "named"),
    [
        ("org/reward-model", {}, ("reward_funcs", "remote")),
        ([length_reward], {"fields": {"reward_weights": [1.0, 2.0]}}, ("reward_weights", "expected 1")),
        (length_reward, {"callbacks": [print]}, ("callbacks", "hook")),
        (length_reward, {"peft_config": object()}, ("peft_config=object", "LoraConfig")),
        (length_reward, {"colour": 1}, ("colour", "TRL 1.16")),
    ],
)
def test_an_argument_without_counterpart_is_refused(
    make: Callable[..., GRPOTrainer], reward: Any, changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        make(reward, **changes)
    assert [word for word in named if word not in str(refused.value)] == []


def test_weights_and_adapters_become_settings(make: Callable[..., GRPOTrainer]) -> None:
    adapter = SimpleNamespace(r=4, lora_alpha=8, lora_dropout=0.0, target_modules={"v_proj", "q_proj"})
    trainer = make([length_reward, accuracy_reward], fields={"reward_weights": [1.0, 0.5]}, peft_config=adapter)
    args = trainer.trainer.settings.args
    terms = args.plugins["weighted_sum"]["terms"]
    assert [term["weight"] for term in terms] == [1.0, 0.5]
    assert (args.lora_rank, args.lora_alpha, args.lora_target_modules) == (4, 8, ["q_proj", "v_proj"])


def test_it_trains_with_functions_that_read_columns(make: Callable[..., GRPOTrainer], tmp_path: Path) -> None:
    run = make([length_reward, lambda completions, **kwargs: [0.0] * len(completions)]).train()
    assert run.state() == "ended"
    (line,) = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["rollout/raw_reward"] >= 2.0


def test_rewards_of_trl_score_alike() -> None:
    chat = [
        [{"role": "assistant", "content": rf"It is \boxed{{{answer}}}."}] for answer in (r"\frac{1}{3}", "1/2", "7")
    ]
    assert accuracy_reward(chat, [r"\frac{1}{3}", r"\frac{1}{3}", ""]) == [1.0, 0.0, None]
    texts = ["<think>\na\n</think>\nb", "<think>\na\nb", "a <think>b</think>"]
    assert think_format_reward(texts) == [1.0, 0.0, 0.0]
