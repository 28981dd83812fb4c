"""Wrong calls of the Trainer: one exception each, whose last line says what to type; no secret, no process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slime_python.html import run_html
from slime_testing_contracts.tiny import tiny_model

from slime_core import Trainer
from slime_core.errors import SlimeError
from tests.sweeps import sweep

ROWS = [{"input": f"{a}+1=?", "label": str(a + 1)} for a in range(8)]
SETTINGS: dict[str, Any] = {
    "num_rollout": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "num_steps_per_rollout": 1,
    "apply_chat_template": True, "preflight": False, "num_threads": 1, "rollout_max_response_len": 8,
}  # fmt: skip
SECRET = "sk-of-the-test-0123456789abcdef"


def digits(args: Any, sample: Any) -> float:
    return sum(character.isdigit() for character in sample.response) / 8


async def keep(args: Any, samples: Any, **others: Any) -> bool:
    return True


class Locked:
    """A reward that no other process can have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, args: Any, sample: Any) -> float:
        return 0.0


def slime_step_ended(rollout_id: int, metrics: Any) -> None:
    """A function with no hook's name."""


MADE: list[tuple[dict[str, Any], str]] = [
    ({"lrr": 1e-5}, "argument lrr=1e-05: no such setting. Did you mean lr?"),
    ({"lr": "fast"}, "(argument lr): must be a number"),
    ({"lr": -1.0}, "(argument lr): must be greater than or equal to 0"),
    ({"lr": [1e-5]}, "(argument lr): must be a valid number"),
    ({"lr": float("nan")}, "(argument lr): must be greater than or equal to 0"),
    ({"lr": lambda step: 1e-5}, "takes a value, no function; functions are taken by reward"),
    ({"rollout_batch_size": 2.5}, "(argument rollout_batch_size): must be a valid integer"),
    ({"rollout_batch_size": 0}, "(argument rollout_batch_size): must be greater than 0"),
    ({"n_samples_per_prompt": True}, "(argument n_samples_per_prompt): must be a number"),
    ({"apply_chat_template": "perhaps"}, "(argument apply_chat_template): must be a valid boolean"),
    ({"num_rollout": "many"}, "(argument num_rollout): must be a whole number"),
    ({"num_rollout": None}, "--num-rollout N or --num-epoch N is required"),
    ({"rollout_temperature": -1}, "(argument rollout_temperature): must be greater than 0"),
    ({"global_batch_size": 5}, "drop one of the last two, or make the products equal"),
    ({"kl_coef": 0.1, "kl_loss_coef": 0.1, "use_kl_loss": True}, "use one: reward penalty or loss term"),
    ({"data": None}, "In Python: data=[...]"),
    ({"data": []}, "argument data: no rows; give a path, a list of dicts"),
    ({"data": 7}, "argument data 7: expected a path, a list of dicts"),
    ({"data": {"input": "x"}}, "one mapping; expected a list of rows"),
    ({"data": [("a", "b")]}, "row 0 is tuple; expected a mapping of columns"),
    ({"data": [{"input": object()}]}, "argument data: row 0 cannot be written as JSON"),
    ({"prompt_data": "x.jsonl"}, "arguments data and prompt_data are the same setting; remove one"),
    ({"eval_data": []}, "argument eval_data eval: no rows; give a path"),
    ({"reward": None}, "In Python: reward=FUNCTION"),
    ({"reward": 3}, "argument reward 3: expected a name, a path, or a function, class or object"),
    ({"reward": [4]}, "argument reward 4: expected a name, a path, or a function, class or object"),
    ({"reward": []}, "type [REWARD, ...] or [(REWARD, WEIGHT), ...]"),
    ({"reward": [(digits, "heavy")]}, "type [REWARD, ...] or [(REWARD, WEIGHT), ...]"),
    ({"reward": [(digits, 1, 2)]}, "type [REWARD, ...] or [(REWARD, WEIGHT), ...]"),
    ({"rm_type": "math"}, "arguments reward and rm_type are the same setting; remove one"),
    ({"generate": 1.5}, "argument generate 1.5: expected a name, a path, or a function, class or object"),
    ({"dynamic_filter": "a", "dynamic_sampling_filter_path": "b"}, "are the same setting; remove one"),
    ({"estimator": "grop"}, "(argument estimator): no estimators plugin 'grop'. Did you mean 'grpo'?"),
    ({"loss": 3}, "argument loss 3: expected a name, a path, or a function, class or object"),
    ({"tools": [3]}, "argument tools 3: expected a name, a path, or a function, class or object"),
    ({"hooks": [object()]}, "Hooks: slime_register_components"),
    ({"hooks": slime_step_ended}, "Did you mean slime_step_end?"),
    ({"model": None}, "argument model None: expected a directory in Hugging Face layout"),
    ({"model": 5}, "argument model 5: expected a directory in Hugging Face layout"),
    ({"model": type("Model", (), {"save_pretrained": print})()}, "needs its tokenizer; add tokenizer=..."),
    ({"tokenizer": object()}, "the model is a directory, which has its own; leave tokenizer out"),
    ({"save": "a_file"}, "argument save 'a_file': a file; name a directory"),
    ({"resume": True}, "name the run to resume: Trainer(..., save=DIR, resume=True)"),
    ({"wandb_key": SECRET, "lr": "fast"}, "(argument lr): must be a number"),
    ({"wandb_key": SECRET, "lrr": 1.0}, "Did you mean lr?"),
]
"""Arguments -> end of the message: of the constructor, before anything is loaded."""
TRAINED: list[tuple[dict[str, Any], str]] = [
    ({"data": "no/such.jsonl"}, "no such file"),
    ({"data": [{"foo": "1"}]}, "no column 'input' (--input-key), nor one that is recognised; the row has: foo"),
    ({"reward": "maht"}, "(argument reward): no rewards plugin 'maht'. Did you mean 'math'?"),
    ({"reward": lambda: 1.0}, "expected (args, sample[, evaluation], **kwargs) -> float"),
    ({"generate": lambda args, sample, sampling_params: sample}, "Make it `async def`"),
    ({"environment": digits, "generate": "multi_turn"}, "expected a class with reset(self, sample[, seed])"),
    ({"dynamic_filter": keep}, "Make it a plain `def`"),
    ({"loss": "polcy_loss"}, "Did you mean 'policy_loss'?"),
    ({"train_backend": "embeded"}, "Did you mean 'embedded'?"),
    ({"rollout_engine": "sglnag"}, "Did you mean 'sglang'?"),
    ({"launcher": "rai"}, "Did you mean 'ray'?"),
    ({"model": "a_directory"}, "no HF-layout model there (no config.json)"),
    ({"save": "taken"}, "In Python: overwrite=True"),
]
"""Arguments -> end of the message of `train`, which comes before a process, an engine or a model."""
CALLED: list[tuple[Callable[[Trainer], Any], str]] = [
    (lambda t: Trainer(str(tiny_model()), ROWS), "name it, as in Trainer(model, data=...)"),
    (lambda t: t.update(None), "type batch = trainer.rollout()"),
    (lambda t: t.sync(), "type batch = trainer.rollout()"),
    (lambda t: t.change(rollout_batch_size=8), "These may: lr, "),
    (lambda t: t.change(lrr=8), "Did you mean lr?"),
    (lambda t: t.change(lr="fast"), "(argument lr): must be a number"),
    (lambda t: t.change(plugins={"stratified": {"look_ahead": 3}}), "stratified.shares may"),
    (lambda t: setattr(t, "lr", 1e-3), "type trainer.change(lr=0.001)"),
    (lambda t: t.save("model"), "nothing has been committed yet; train first"),
    (lambda t: t.save("taken"), "the directory exists; name a new one"),
    (lambda t: t.evaluate(), "type evaluate(data), or give the Trainer eval_data"),
    (lambda t: t.evaluate(ROWS, lrr=3), "Did you mean lr?"),
    (lambda t: t.generate("1+1"), "type generate([prompt])"),
    (lambda t: t.generate(["1+1"], temprature=0.0), "Did you mean 'temperature'?"),
    (lambda t: t.run, "type trainer.train()"),
    (lambda t: run_html(t.run), "type trainer.train()"),
    (lambda t: Trainer.from_yaml("bad.yaml"), "not valid YAML"),
    (lambda t: Trainer.from_yaml("none.yaml"), "no such file"),
    (lambda t: Trainer.from_yaml("typo.yaml"), "add it, or type Trainer.from_yaml(path, model=...)"),
    (lambda t: Trainer.from_yaml("typo.yaml", model=str(tiny_model())), "Did you mean lr?"),
    (lambda t: Trainer(str(tiny_model()), data=ROWS, reward=Locked(), **SETTINGS).to_yaml("a.yaml"), "reward Locked"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (tmp_path / "a_file").write_text("x")
    (tmp_path / "bad.yaml").write_text("lr: [1\n")
    (tmp_path / "typo.yaml").write_text("lrr: 1.0\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "a_directory").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").write_text("{}\n")
    return tmp_path


def made(**changes: Any) -> Trainer:
    return Trainer(**{"model": str(tiny_model()), "data": ROWS, "reward": digits, **SETTINGS, **changes})


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def check(call: Callable[[], Any], end: str) -> None:
    before, threads = children(), threading.enumerate()
    with pytest.raises(SlimeError) as raised:
        call()
    last = str(raised.value).splitlines()[-1]
    assert end in last
    assert SECRET not in str(raised.value)
    started = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert not [name for name in started if name.startswith("slime-")]
    assert children() <= before


@sweep("arguments, end", MADE)
def test_wrong_arguments(folder: Path, arguments: dict[str, Any], end: str) -> None:
    check(lambda: made(**arguments), end)
    assert not [*folder.glob("outputs/*")]


@sweep("arguments, end", TRAINED)
def test_wrong_components(folder: Path, arguments: dict[str, Any], end: str) -> None:
    check(lambda: made(**arguments).train(), end)


@sweep("call, end", CALLED)
def test_wrong_calls(folder: Path, call: Callable[[Trainer], Any], end: str) -> None:
    trainer = made()
    check(lambda: call(trainer), end)


def test_there_are_enough() -> None:
    assert len(MADE) + len(TRAINED) + len(CALLED) >= 60
