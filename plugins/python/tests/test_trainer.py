"""`slime_core.Trainer`: arguments, steps, resume, and the same bytes as the command."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slime_testing_contracts.tiny import digits as tiny_digits
from slime_testing_contracts.tiny import tiny_model

from slime_core import Trainer
from slime_core.errors import ConfigError, SlimeError
from slime_core.models.hf_io import read_weights
from slime_core.weights.checksum import tensor_checksum

ROWS = [{"input": f"{a}+{b}=?", "label": str(a + b)} for a in range(10, 18) for b in range(10, 14)]
SMALL: dict[str, Any] = {
    "num_rollout": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "rollout_max_response_len": 8, "lr": 3e-3,
    "apply_chat_template": True, "num_steps_per_rollout": 1, "num_threads": 1, "lr_decay_style": "constant",
    "preflight": False,
}  # fmt: skip


def digits(args: Any, sample: Any) -> float:
    return sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    monkeypatch.chdir(tmp_path)

    def trainer(**changes: Any) -> Trainer:
        return Trainer(tiny_model(), **{"data": ROWS, "reward": tiny_digits, **SMALL, **changes})

    return trainer


def checksums(commit: Path | None) -> dict[str, str]:
    assert commit is not None
    return {name: tensor_checksum(tensor) for name, tensor in read_weights(commit)}


def test_steps_train_and_a_loop_that_is_left_is_resumed(make: Callable[..., Trainer]) -> None:
    whole = make()
    assert [step.number for step in whole] == [1, 2]
    trainer = make()
    for step in trainer:
        assert len(step.samples) == 16
        assert step.reward == pytest.approx(sum(sample.reward for sample in step.samples) / 16)
        break
    assert trainer.run.state() == "drained"
    run = trainer.train()
    assert [line["step"] for line in run.metrics()] == [1, 2]
    assert checksums(run.checkpoint) == checksums(whole.run.checkpoint)
    assert trainer.run.path.name == "python-2"
    assert run.frame().index.tolist() == [1, 2] if _has("pandas") else True


def _has(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


@pytest.mark.slow
def test_the_command_gives_the_same_bytes_and_a_running_event_loop_is_no_obstacle(
    make: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer = make(reward=lambda args, sample: digits(args, sample) + 0.0)

    async def cell() -> Any:  # as a notebook's kernel calls it
        return trainer.train()

    run = asyncio.run(cell())
    trainer.to_yaml("run.yaml")
    command = [sys.executable, "-m", "slime_core", "train", "--config", "run.yaml", "--save", "again"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert checksums(tmp_path / "again" / "checkpoints" / "rollout_0000001") == checksums(run.checkpoint)
    assert Trainer.from_yaml("run.yaml", save="third", lr=1e-4).settings.args.lr == 1e-4


def test_evaluates_generates_and_saves(make: Callable[..., Trainer]) -> None:
    trainer = make(num_rollout=1, eval_data={"sums": ROWS[:4]}, skip_eval_before_train=True)
    with pytest.raises(ConfigError, match="nothing has been committed yet"):
        trainer.save("model")
    trainer.train()
    report = trainer.evaluate()
    assert report["datasets"]["sums"]["prompts"] == 4
    assert trainer.evaluate(ROWS[:2])["datasets"]["eval"]["prompts"] == 2
    answers = trainer.generate(["1+1=?", [{"role": "user", "content": "2+2=?"}]], max_new_tokens=4, temperature=0.0)
    assert [isinstance(answer, str) for answer in answers] == [True, True]
    assert (trainer.save("model") / "config.json").is_file()
    with pytest.raises(ConfigError, match="the directory exists"):
        trainer.save("model")


class Graded:
    """A reward with a state."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.lock: Any = None

    def __call__(self, args: Any, sample: Any) -> float:
        return self.scale * digits(args, sample)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("several", marks=pytest.mark.slow),
        pytest.param("object", marks=pytest.mark.slow),
        "unpicklable",
        "async",
    ],
)
def test_rewards_of_every_form(make: Callable[..., Trainer], form: str, caplog: pytest.LogCaptureFixture) -> None:
    graded = Graded(2.0)

    async def later(args: Any, sample: Any) -> float:
        await asyncio.sleep(0)
        return digits(args, sample)

    if form == "unpicklable":
        graded.lock = threading.Lock()
    reward = {"several": [digits, (lambda args, sample: 1.0, 0.5)], "async": later}.get(form, graded)
    trainer = make(num_rollout=1, reward=reward)
    (step,) = trainer
    for sample in step.samples:
        found = digits(None, sample)
        expected = {"several": found + 0.5, "async": found}.get(form, 2 * found)
        reward = sample.reward["score"] if isinstance(sample.reward, dict) else sample.reward
        assert reward == pytest.approx(expected)
    assert ("cannot be ended when it hangs" in caplog.text) == (form == "unpicklable")
    if form == "unpicklable":
        with pytest.raises(ConfigError, match="custom_rm_path was given as an object that cannot be pickled"):
            trainer.to_yaml("run.yaml")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lrr": 1e-5}, r"argument lrr=1e-05: no such setting\. Did you mean lr\?"),
    ({"lr": "fast"}, r"--lr 'fast' \(argument lr\)"),
    ({"lr": -1.0}, r"--lr -1.0 \(argument lr\)"),
    ({"rollout_batch_size": 2.5}, r"\(argument rollout_batch_size\)"),
    ({"num_rollout": "many"}, r"\(argument num_rollout\)"),
    ({"n_samples_per_prompt": True}, r"\(argument n_samples_per_prompt\): must be a number"),
    ({"data": []}, r"argument data: no rows"),
    ({"data": 7}, r"argument data 7: expected a path"),
    ({"data": {"input": "x"}}, r"argument data: one mapping; expected a list of rows"),
    ({"data": [("a", "b")]}, r"argument data: row 0 is tuple"),
    ({"data": [{"input": object()}]}, r"argument data: row 0 cannot be written as JSON"),
    ({"eval_data": []}, r"argument eval: no rows"),
    ({"reward": 3}, r"argument reward 3: expected a name, a path, or a function"),
    ({"reward": [4]}, r"argument reward 4"),
    ({"generate": 1.5}, r"argument generate 1.5"),
    ({"tokenizer": object()}, r"argument tokenizer: the model is a directory"),
    ({"train_backend": "embeded"}, r"embedded"),
    ({"estimator": "grop"}, r"grpo"),
    ({"loss": "polcy_loss"}, r"policy_loss"),
    ({"no_such": None, "kl_coef": 0.1, "kl_loss_coef": 0.1, "use_kl_loss": True}, r"kl"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[" ".join(changes) for changes, _ in WRONG])
def test_a_wrong_argument_is_one_clear_error(
    make: Callable[..., Trainer], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SlimeError, match=message):
        make(**changes).train()
    assert not any(thread.name == "slime-training" for thread in threading.enumerate())


def test_an_error_when_made_leaves_nothing(make: Callable[..., Trainer]) -> None:
    with pytest.raises(ConfigError):
        make(lrr=1.0)
    assert list(Path("outputs").iterdir()) == []
    with pytest.raises(ConfigError, match="expected a directory in Hugging Face layout or a transformers model"):
        Trainer(5, data=ROWS, reward=digits)
    with pytest.raises(ConfigError, match=re.escape("needs its tokenizer; add tokenizer=...")):
        Trainer(type("Model", (), {"save_pretrained": print})(), data=ROWS, reward=digits)


def test_a_run_of_others_is_not_taken_over(make: Callable[..., Trainer]) -> None:
    first = make(num_rollout=1)
    first.train()
    with pytest.raises(ConfigError, match="already holds a run"):
        make(save=first.run.path).train()
    assert [line["step"] for line in make(save=first.run.path, resume=True).train().metrics()] == [1, 2]
    (Path("mine") / "inputs" / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match="exists already; name another save"):
        Trainer(type("Model", (), {"save_pretrained": print})(), tokenizer=object(), save="mine", data=ROWS)


def test_one_training_at_a_time(make: Callable[..., Trainer]) -> None:
    first, second = make(), make()
    loop = iter(first)
    next(loop)
    with pytest.raises(ConfigError, match="another Trainer is training in this process"):
        second.train()
    loop.close()
    assert second.train().state() == "ended"


def test_a_reward_that_always_raises_ends_the_loop_with_its_error(make: Callable[..., Trainer]) -> None:
    def broken(args: Any, sample: Any) -> float:
        raise ValueError("no such column")

    with pytest.raises(SlimeError, match="no such column"):
        make(reward=broken).train()


@pytest.mark.slow
def test_in_a_script_without_a_main_guard(make: Callable[..., Trainer], tmp_path: Path) -> None:
    script = f"""
from slime_core import Trainer
print("script runs")
def reward(args, sample):
    return float(len(sample.response))
small = {SMALL!r} | {{"num_rollout": 1, "preflight": True}}
run = Trainer({str(tiny_model())!r}, data={ROWS!r}, reward=reward, **small).train()
print("state", run.state())
"""
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("script runs") == 1
    assert "state ended" in done.stdout
