"""`slime_core.Trainer`: arguments, steps, resume, and the same bytes as the command."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slime_testing_contracts.tiny import digits as tiny_digits
from slime_testing_contracts.tiny import tiny_model

from slime_core import Trainer
from slime_core.errors import ConfigError, SlimeError
from slime_core.models.hf_io import read_weights
from slime_core.weights.sync import tensor_checksum

ROWS = [{"input": f"{a}+{b}=?", "label": str(a + b)} for a in range(10, 18) for b in range(10, 14)]
SMALL: dict[str, Any] = {
    "num_rollout": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "rollout_max_response_len": 8, "lr": 3e-3,
    "apply_chat_template": True, "num_steps_per_rollout": 1, "num_threads": 1, "lr_decay_style": "constant",
    "preflight": False,
}  # fmt: skip


def digits(args: Any, sample: Any) -> float:
    return sum(character.isdigit() for character in sample.response) / max(len(sample.response), 1)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trainer]]:
    monkeypatch.chdir(tmp_path)
    made: list[Trainer] = []

    def trainer(**changes: Any) -> Trainer:
        made.append(Trainer(tiny_model(), **{"data": ROWS, "reward": tiny_digits, **SMALL, **changes}))
        return made[-1]

    yield trainer
    for one in made:
        one.close()


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


@pytest.mark.parametrize("form", [pytest.param("several", marks=pytest.mark.slow), "unpicklable", "async"])
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
        with pytest.raises(ConfigError, match=r"reward .* cannot be pickled, so no file can hold it"):
            trainer.to_yaml("run.yaml")


def test_a_run_of_others_is_not_taken_over(make: Callable[..., Trainer]) -> None:
    first = make(num_rollout=1)
    first.train()
    with pytest.raises(ConfigError, match="already holds a run"):
        make(save=first.run.path).train()
    assert [line["step"] for line in make(save=first.run.path, resume=True).train().metrics()] == [1, 2]
    (Path("mine") / "inputs" / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match="exists already; name another save"):
        Trainer(type("Model", (), {"save_pretrained": print})(), tokenizer=object(), save="mine", data=ROWS)


def test_the_built_in_loop_written_by_the_user_gives_the_same_bytes(make: Callable[..., Trainer]) -> None:
    whole = make().train()
    trainer = make()
    for _ in range(2):
        batch = trainer.rollout()
        trainer.update(batch)
        trainer.sync()
    assert checksums(trainer.run.checkpoint) == checksums(whole.checkpoint)
    assert [line.keys() for line in trainer.run.metrics()] == [line.keys() for line in whole.metrics()]
    assert trainer.run.state() == "ended"
    with pytest.raises(ConfigError, match="all 2 rollouts are done; type Trainer"):
        trainer.rollout()


def test_calls_commit_and_resume(make: Callable[..., Trainer], caplog: pytest.LogCaptureFixture) -> None:
    """A rollout that is not trained on is refused a successor; a batch may be trained on twice, and edited."""
    whole = make().train()
    with make() as trainer:
        batch = trainer.rollout()
        assert (batch.number, batch.id, len(batch.samples)) == (1, 0, 16)
        with pytest.raises(ConfigError, match=r"batch 1 is not trained on; type trainer\.update\(batch\)"):
            trainer.rollout()
        trainer.update(batch)
        with pytest.raises(ConfigError, match=r"inside `for step in trainer`|training already; type trainer\.close"):
            trainer.train()
        assert (trainer.save("model") / "config.json").is_file()  # commits the first rollout
    assert trainer.run.state() == "drained"
    assert checksums(trainer.train().checkpoint) == checksums(whole.checkpoint)
    other = make()
    batch = other.rollout()
    one, two = other.update(batch), other.update(batch)
    assert one["train/grad_norm"] != two["train/grad_norm"]
    assert "came apart" not in caplog.text
    other.sync()
    batch = other.rollout()
    batch.data.rewards[:] = [0.0] * 16
    other.close()
    assert [line["step"] for line in other.run.metrics()] == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 1e-4, "rollout_temperature": 0.7, "plugins": {"stratified": {"shares": {"a": 3.0}}}},
        pytest.param({"kl_loss_coef": 0.5}, marks=pytest.mark.slow),  # needs a reference model, so the run resumes
    ],
    ids=str,
)
def test_a_change_in_the_loop_equals_one_between_two_runs(
    make: Callable[..., Trainer], changes: dict[str, Any]
) -> None:
    rows = [{**row, "metadata": {"source_name": "ab"[number % 2]}} for number, row in enumerate(ROWS)]
    settings = {"data": rows, "buffer_filter": "stratified", "use_kl_loss": True, "kl_loss_coef": 0.0,
                "metadata_key": "metadata", "num_steps_per_rollout": 2}  # fmt: skip
    changed, resumed = make(**settings), make(**settings)
    for step in changed:
        if step.number == 1:
            changed.change(**changes)
    for _ in resumed:
        break
    resumed.change(**changes)
    resumed.train()
    assert checksums(changed.run.checkpoint) == checksums(resumed.run.checkpoint)
    assert changed.run.metrics()[0]["train/loss"] == resumed.run.metrics()[0]["train/loss"]
    if "lr" in changes:
        assert [line["train/lr"] for line in changed.run.metrics()] == [3e-3, 1e-4]
    for name, value in changes.items():
        assert getattr(changed.settings.args, name) == value


@pytest.mark.slow
def test_two_at_once_and_two_ranks(make: Callable[..., Trainer]) -> None:
    whole = make().train()
    first, second = make(), make()  # the second one runs in a process of its own
    for one, other in zip(first, second):
        assert one.metrics["rollout/raw_reward"] == other.metrics["rollout/raw_reward"]
        assert other.advantages
    assert checksums(first.run.checkpoint) == checksums(second.run.checkpoint) == checksums(whole.checkpoint)
    ranks = {"actor_num_gpus_per_node": 2, "device": "cpu"}
    by_command = make(**ranks).train()
    stepped, called = make(**ranks), make(**ranks)
    assert [step.number for step in stepped] == [1, 2]
    with called:
        for number in range(2):
            called.update(called.rollout())
            called.sync()
            if number == 0:
                called.change(entropy_coef=0.0)
    assert checksums(stepped.run.checkpoint) == checksums(by_command.checkpoint) == checksums(called.run.checkpoint)


def test_a_second_training_needs_functions_that_other_processes_have(make: Callable[..., Trainer]) -> None:
    graded = Graded(1.0)
    graded.lock = threading.Lock()
    first, second = make(), make(reward=graded)
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


SCRIPT = """
import os, signal, sys, threading
print("script runs", flush=True)
if {method!r}:
    import multiprocessing
    multiprocessing.set_start_method({method!r})
from slime_core import Trainer
def reward(args, sample):
    return float(len(sample.response))
small = {small!r} | {{"num_rollout": {rollouts}}}
def make():
    return Trainer({model!r}, data={rows!r}, reward=reward, **small)
trainer = make()
{body}
print("end of the script", flush=True)
"""
BODIES = {
    "trained": "print('state', trainer.train().state())",
    "forgotten in a loop": "loop = iter(trainer); print('state', next(loop).number)",
    "forgotten after a call": "trainer.update(trainer.rollout()); print('state 1')",
    "two forgotten": "loops = [iter(trainer), iter(make())]; print('state', *[next(one).number for one in loops])",
    "interrupted": """
def interrupt():
    while not (trainer.run.path / "metrics.jsonl").read_text():
        pass
    os.kill(os.getpid(), signal.SIGINT)
try:
    for step in trainer:
        if step.number == 1:
            threading.Thread(target=interrupt).start()
except KeyboardInterrupt:
    print('state', trainer.run.state(), flush=True)
before = len(trainer.run.metrics())
for step in trainer:
    break
assert step.number == before + 1, (step, before)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "method", "rollouts", "state"),
    [
        ("trained", "", 1, "state ended"),
        ("trained", "spawn", 1, "state ended"),
        ("forgotten in a loop", "", 2000, "state 1"),
        ("forgotten after a call", "", 2000, "state 1"),
        ("two forgotten", "", 2000, "state 1 1"),
        ("interrupted", "", 2000, "state drained"),
    ],
)
@pytest.mark.parametrize("given", ["file", "stdin"])  # a REPL's functions come from standard input
def test_a_script_without_a_main_guard(
    make: Callable[..., Trainer], tmp_path: Path, body: str, method: str, rollouts: int, state: str, given: str
) -> None:
    small = {**SMALL, "preflight": True}
    script = SCRIPT.format(
        method=method, small=small, rollouts=rollouts, model=str(tiny_model()), rows=ROWS, body=BODIES[body]
    )
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MARK_OF_TEST": str(tmp_path)}
    command = [sys.executable, "script.py" if given == "file" else "-"]
    done = subprocess.run(
        command, input=script, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("script runs") == 1
    assert state in done.stdout
    assert "end of the script" in done.stdout
    assert "Traceback" not in done.stderr
    if rollouts > 1:
        assert list((tmp_path / "outputs" / "python-1" / "checkpoints").glob("rollout_*")), "ended with a commit"
    assert left_of(tmp_path) == []


def left_of(mark: Path) -> list[str]:
    """Return the processes of a script, by the mark in their environment, that are left."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK_OF_TEST={mark}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_hooks_of_a_trainer_are_not_those_of_the_next(make: Callable[..., Trainer]) -> None:
    before, seen = dict(os.environ), []

    def slime_step_end(rollout_id: int, metrics: Any) -> None:
        seen.append(rollout_id)

    async def slime_run_start(args: Any, run_dir: Any) -> None: ...

    lock = threading.Lock()  # cannot be pickled, so the hook runs in this process, where it is seen
    slime_step_end.__dict__["lock"] = lock
    make(num_rollout=1, hooks=slime_step_end).train()
    assert seen == [0]
    with pytest.raises(SlimeError, match="make it a plain `def`"):
        make(num_rollout=1, hooks=slime_run_start).train()
    make(num_rollout=1, advantage_estimator="rloo").train()
    assert seen == [0]
    assert dict(os.environ) == before
