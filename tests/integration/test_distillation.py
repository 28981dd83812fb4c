"""On-policy distillation end to end: a trained teacher beside the actor, or served elsewhere; the reverse KL falls."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from slime_data.saved import read_samples
from slime_runs import Run
from slime_runs.index import Filter

from slime_core.sample.provenance import Source
from tests.conftest import SLIME, TinyRun
from tests.run_files import metrics

QUIET = {"eval_interval": None, "eval_prompt_data": None}
STUDENT = {
    **QUIET,
    "num_rollout": 8,
    "save_interval": None,
    "use_opd": True,
    "custom_rm_path": None,
    "rollout_max_response_len": 12,
}


WORLD = '''
from slime_core import Step

class Environment:
    """Three steps."""

    def __init__(self, args):
        self.steps = 0

    def reset(self, sample):
        return None

    def step(self, action):
        self.steps += 1
        return Step("1+1=", done=self.steps == 3)

    def close(self):
        pass
'''


@pytest.fixture(scope="module")
def teacher(tiny: TinyRun, slime: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after it has learned to answer in digits."""
    save = tmp_path_factory.mktemp("teacher") / "run"
    slime("train", *tiny.argv(save, **{**QUIET, "num_rollout": 12, "save_interval": 12}))
    return save / "checkpoints" / "rollout_0000011"


@pytest.fixture(scope="module")
def address(teacher: Path) -> Iterator[str]:
    """Where the teacher is served."""
    argv = [SLIME, "serve", "--hf-checkpoint", str(teacher), "--port", "0", "--num-threads", "1"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " on http://" in line
        yield line.split(" on ")[1].strip()
    finally:
        process.terminate()
        process.wait(timeout=60)
        assert process.stdout is not None
        process.stdout.close()


def distil(tiny: TinyRun, run_dir: Path, slime: Any, *chosen: str, **changes: Any) -> list[dict[str, Any]]:
    """A run's metrics; `chosen` are options of plugins."""
    argv = tiny.argv(None, **{**STUDENT, "run_dir": run_dir, **changes})
    slime("train", *argv, *(part for option in chosen for part in ("--set", f"plugins.{option}")))
    return metrics(run_dir)


@pytest.fixture(scope="module")
def no_reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "none.py"
    path.write_text("def reward(args, sample, **kwargs):\n    return 0.0\n")
    return path


@pytest.mark.slow
def test_a_local_teacher_is_learned_from(
    tiny: TinyRun, teacher: Path, no_reward: Path, tmp_path: Path, slime: Any
) -> None:
    flags = {"opd_type": "local", "opd_teacher_load": teacher, "custom_rm_path": no_reward}
    lines = distil(tiny, tmp_path / "run", slime, **flags)
    gaps = [line["rollout/opd_reverse_kl"] for line in lines]
    assert gaps[0] > 0.1
    assert sum(gaps[-2:]) / 2 < gaps[0] / 2
    for line in lines:
        expected = line["rollout/log_probs"] - line["rollout/teacher_log_probs"]
        assert line["rollout/opd_reverse_kl"] == pytest.approx(expected, abs=1e-5)
        assert line["rollout/advantages"] == pytest.approx(-line["rollout/opd_reverse_kl"], abs=1e-5)


@pytest.mark.slow
def test_a_divergence_falls_and_is_the_same_from_a_server(
    tiny: TinyRun, teacher: Path, address: str, no_reward: Path, tmp_path: Path, slime: Any
) -> None:
    """The likeliest 16 of 272 tokens and the sampled one: of the trainer's teacher, and of a server that rows name."""
    loss = {"loss_type": "distillation"}
    local = {**loss, "opd_type": "local", "opd_teacher_load": teacher, "custom_rm_path": no_reward}
    lines = distil(tiny, tmp_path / "local", slime, "distillation.top_k=16", **local)
    found = [line["train/divergence"] for line in lines]
    assert found[0] > 0.1
    assert sum(found[-2:]) / 2 < found[0] / 2
    assert all(line["rollout/advantages"] == 0 for line in lines)
    rows = [json.loads(line) for line in (tiny.root / "train.jsonl").read_text().splitlines()]
    routed = [json.dumps({**row, "metadata": {"teacher": "far"}}) + "\n" for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(routed))
    served = {**loss, "opd_type": "sglang", "rm_type": "on_policy_distillation", "num_rollout": 1}
    options = ("distillation.top_k=16", f"on_policy_distillation.teachers={{far: {{url: '{address}'}}}}")
    (line,) = distil(tiny, tmp_path / "server", slime, *options, prompt_data=tmp_path / "rows.jsonl", **served)
    for name in ("train/divergence", "train/teacher_top_mass", "train/outside_top", "rollout/opd_reverse_kl"):
        assert line[name] == pytest.approx(lines[0][name], abs=1e-4), name


@pytest.mark.slow
def test_rows_choose_among_the_trainers_teachers(tiny: TinyRun, teacher: Path, tmp_path: Path, slime: Any) -> None:
    """Resumed bit for bit; a row that names no teacher of the run ends it before it starts."""
    rows = [json.loads(line) for line in (tiny.root / "train.jsonl").read_text().splitlines()]
    for name in ("digits", "art"):
        routed = [{**row, "metadata": {"teacher": name}} if i % 2 else row for i, row in enumerate(rows)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in routed))
    flags = {
        "opd_type": "local", "opd_teacher_load": tiny.root / "model", "loss_type": "distillation", "num_rollout": 2,
        "rm_type": "on_policy_distillation", "prompt_data": tmp_path / "digits.jsonl", "save_interval": 1,
    }  # fmt: skip
    options = ["distillation.top_k=16", f"on_policy_distillation.teachers={{digits: {{path: {teacher}}}}}"]

    def argv(name: str, **changes: Any) -> list[str]:
        given = tiny.argv(tmp_path / name, **{**STUDENT, **flags, **changes})
        return [*given, *(part for option in options for part in ("--set", f"plugins.{option}"))]

    slime("train", *argv("run"))
    slime("train", *argv("again", load=tmp_path / "run/checkpoints/rollout_0000000"))
    lines, again = (metrics(tmp_path / name) for name in ("run", "again"))
    assert again[-1]["train/divergence"] == lines[-1]["train/divergence"] > 0.05
    ends = [tmp_path / run / "checkpoints/rollout_0000001/model.safetensors" for run in ("run", "again")]
    assert ends[0].read_bytes() == ends[1].read_bytes()
    wrong = [SLIME, "train", *argv("art", prompt_data=tmp_path / "art.jsonl", no_preflight=None)]
    done = subprocess.run(wrong, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "metadata['teacher'] is 'art'; plugins.on_policy_distillation.teachers has 'digits'" in done.stderr


SECRETS = {letter: str((7 * i + 3) % 10) for i, letter in enumerate("abcdefghij")}
"""Right answer to each letter; only a teacher that sees the label knows it."""


@pytest.fixture(scope="module")
def copier(tiny: TinyRun, slime: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after it has learned to repeat a digit that it is shown, and to guess where it is shown none."""
    root, draw = tmp_path_factory.mktemp("copier"), random.Random(0)
    rows = []
    for i in range(3000):
        letter, digit = draw.choice("abcdefghij"), str(draw.randrange(10))
        question = f"{letter} {digit}" if i % 2 else letter
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": digit}]})
    (root / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--rollout-batch-size", 100, "--num-epoch", 2, "--lr", "3e-3", "--num-threads", 1, "--no-preflight"]
    paths = ["--hf-checkpoint", tiny.root / "model", "--prompt-data", root / "sft.jsonl", "--save", root / "run"]
    slime("sft", *map(str, [*flags, *paths, "--save-interval", 1000]))
    return root / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "siblings", "more"),
    [("{prompt} {label}", 4, ()), ("{prompt} {peer}", 16, ("distillation.teacher_rate=0.05",))],
    ids=["OPSD", "SDPO"],
)
def test_a_self_that_sees_the_answer_teaches_it(
    tiny: TinyRun, copier: Path, tmp_path: Path, slime: Any, context: str, siblings: int, more: tuple[str, ...]
) -> None:
    """No reward reaches the advantages; the policy learns what its first weights repeat from the prompt.

    OPSD shows the teacher the label; SDPO a right answer of the group, to a teacher that follows the actor.
    """
    rows = [json.dumps({"input": letter, "label": digit}) + "\n" for letter, digit in SECRETS.items()]
    (tmp_path / "letters.jsonl").write_text("".join(rows))
    (tmp_path / "right.py").write_text(
        "def reward(args, sample, **kwargs):\n    return float(sample.response.startswith(sample.label))\n"
    )
    (tmp_path / "none.py").write_text(
        "def post(args, samples):\n    return [s.reward for s in samples], [0.0] * len(samples)\n"
    )
    flags = {
        "hf_checkpoint": copier / "checkpoints" / "rollout_0000059", "prompt_data": tmp_path / "letters.jsonl",
        "lr": "2e-3", "rollout_batch_size": 10, "n_samples_per_prompt": siblings, "rollout_max_response_len": 1,
        "num_rollout": 12 if siblings == 4 else 16, "opd_type": "local", "opd_teacher_load": copier,
        "loss_type": "distillation", "rm_type": "on_policy_distillation",
        "custom_reward_post_process_path": tmp_path / "none.py",
    }  # fmt: skip
    options = (
        *more, "distillation.top_k=16", f"on_policy_distillation.context='{context}'",
        f"on_policy_distillation.reward={tmp_path / 'right.py'}",
    )  # fmt: skip
    lines = distil(tiny, tmp_path / "run", slime, *options, **flags)
    assert all(line["rollout/advantages"] == 0 for line in lines)
    right, shown = ([line[f"rollout/{name}"] for line in lines] for name in ("raw_reward", "teacher_context"))
    assert sum(right[:3]) / 3 < 0.25, "one of ten digits by chance"
    assert sum(right[-3:]) / 3 > 0.35
    assert shown[0] < shown[-1] if "{peer}" in context else set(shown) == {1}, "more groups have a right answer to show"
    assert lines[-1]["train/divergence"] < lines[0]["train/divergence"]


@pytest.mark.slow
def test_over_several_turns_the_teacher_scores_what_was_sampled(
    tiny: TinyRun, teacher: Path, address: str, tmp_path: Path, slime: Any
) -> None:
    """Aligned with the sampled tokens, 0 elsewhere, against transformers; the advantages are of these tokens alone."""
    (tmp_path / "world.py").write_text(WORLD)
    flags = {
        "opd_type": "sglang", "rm_type": "on_policy_distillation", "rm_url": address, "num_rollout": 1,
        "custom_generate_function_path": "multi_turn", "environment_path": tmp_path / "world.py",
        "apply_chat_template": None, "rollout_max_response_len": 60, "set": "plugins.multi_turn.max_turn_tokens=4",
        "save_debug_rollout_data": tmp_path / "{rollout_id}.jsonl",
    }  # fmt: skip
    (row,) = distil(tiny, tmp_path / "run", slime, **flags)
    model = transformers.AutoModelForCausalLM.from_pretrained(teacher, dtype="float32").eval()
    samples, gaps = read_samples(tmp_path / "0.jsonl"), []
    for sample in samples:
        told = [span.source for span in sample.spans or () for _ in range(span.length)][-sample.response_length :]
        sampled = [source == Source.SAMPLED for source in told]
        assert sum(after > before for before, after in zip([False, *sampled], sampled)) == 3, "three turns"
        assert [bool(trained) for trained in sample.loss_mask or ()] == sampled
        with torch.no_grad():
            scores = model(torch.tensor([sample.tokens])).logits[0, :-1].log_softmax(-1)
        of_all = scores.gather(-1, torch.tensor(sample.tokens[1:])[:, None])[-sample.response_length :, 0].tolist()
        expected = [score if was else 0.0 for score, was in zip(of_all, sampled)]
        assert sample.teacher_log_probs == pytest.approx(expected, abs=1e-4)
        assert sample.rollout_log_probs is not None
        gaps.append([p - t for p, t, was in zip(sample.rollout_log_probs, expected, sampled) if was])
    of_samples = sum(sum(gap) / len(gap) for gap in gaps) / len(gaps)
    assert row["rollout/opd_reverse_kl"] == pytest.approx(of_samples, abs=1e-4)
    assert row["rollout/advantages"] == pytest.approx(-of_samples, abs=1e-4)


def test_a_reward_may_be_the_teacher_and_what_it_said_is_kept(tiny: TinyRun, tmp_path: Path, slime: Any) -> None:
    rm = tmp_path / "teaches.py"
    rm.write_text(
        "def reward(args, sample, **kwargs):\n"
        "    sample.teacher_log_probs = [-0.5 * (i % 2) for i in range(sample.response_length)]\n"
        "    return 0.0\n"
    )
    distil(tiny, tmp_path / "run", slime, num_rollout=1, opd_type="sglang", custom_rm_path=rm)
    run = Run(tmp_path / "run")
    for found in run.samples(Filter(data_set="")):
        assert run.trained(0)[found.entry.key]["teacher_log_probs"] == found.sample.teacher_log_probs
