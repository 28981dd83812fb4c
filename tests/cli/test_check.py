"""`slime check`, and the same checks at the start of `slime train`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from slime_commands.check import check
from slime_commands.check.overlap import overlap
from slime_testing_probes import fresh_process
from slime_testing_probes.probes import PROBES, Bench, WrongAnswer

from slime_core.config import Args
from slime_core.config.eval_config import EvalDataset
from slime_core.errors import ConfigError
from slime_core.plugins.resolve import resolve
from tests.conftest import Slime, TinyRun
from tests.strangers import forgotten, install


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe in a process of its own that is merely slow is no finding, but where one hangs."""
    if "hangs" not in request.node.name:
        monkeypatch.setattr(fresh_process, "CALL_DEADLINE", 30.0)


def _check(*argv: object) -> tuple[int, list[dict[str, str]]]:
    """Exit status and findings, without the second it takes a fresh interpreter to import torch."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = check.run(["--json", *map(str, argv)])
    return status, [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_sound_run_is_ready(slime: Slime, tiny: TinyRun, tmp_path: Path) -> None:
    done = slime("check", *tiny.argv(tmp_path / "run"))
    assert "ready to run" in done.stdout
    assert "200 rows" in done.stdout
    assert "4 prompts x 4 = 16 samples a rollout, in 2 optimizer steps of 8; 4 rollouts" in done.stdout
    assert not (tmp_path / "run").exists(), "a check writes nothing"


def test_plugins_have_a_say(tiny: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "from slime_core import Finding, Level, hookimpl\n@hookimpl\ndef slime_check(settings):\n"
    told += "    return [Finding('acme', Level.ERROR, settings.command)]\n"
    monkeypatch.setattr("slime_commands.check.preflight.preflight", lambda run: [])
    with forgotten():
        install(tmp_path, "acme-check", {"slime.plugins": {"acme": "acme_check"}}, acme_check=told)
        status, findings = _check(*tiny.argv(tmp_path / "run"))
    assert status == 1
    assert {"subject": "acme", "level": "error", "message": "train"} in findings
    assert [f["level"] for f in findings if f["subject"] == "memory"] == ["ok"], "slime's own: the estimate of the plan"


@pytest.mark.parametrize(
    ("reward", "level"), [("loose", "warning"), pytest.param("exact", "ok", marks=pytest.mark.slow)]
)
def test_what_the_reward_pays_by_mistake_is_told(tiny: TinyRun, tmp_path: Path, reward: str, level: str) -> None:
    loose = tmp_path / "loose.py"
    loose.write_text("def reward(args, sample):\n    return float(str(sample.label) in sample.response)\n")
    spec = str(loose) if reward == "loose" else reward
    _, findings = _check(*tiny.argv(tmp_path / "run", rm_type=None, custom_rm_path=spec))
    (told,) = [finding for finding in findings if finding["subject"] == "reward"]
    assert told["level"] == level, told


REWARDS = {
    "raises": ("def reward(args, sample):\n    return sample.metadata['gold']\n", "error", "KeyError: 'gold'"),
    "nan": ("def reward(args, sample):\n    return float('nan')\n", "warning", "returned nan"),
    "infinite": ("def reward(args, sample):\n    return float('inf')\n", "warning", "returned inf"),
    "text": ("def reward(args, sample):\n    return 'x'\n", "error", "returned str"),
    "hangs": ("import time\ndef reward(args, sample):\n    time.sleep(1000)\n", "warning", "no answer within"),
    "exits": ("import os\ndef reward(args, sample):\n    os._exit(3)\n", "error", "with exit status 3"),
    "crashes": ("import os\ndef reward(args, sample):\n    os.kill(os.getpid(), 11)\n", "error", "by signal SIGSEGV"),
    "elsewhere": (
        "import sys\nif 'slime_testing_probes.probes' in ' '.join(sys.orig_argv):\n"
        "    raise RuntimeError('not in a worker')\n"
        "def reward(args, sample):\n    return 1.0\n",
        "error",
        "in a fresh process",
    ),
}


@pytest.mark.parametrize(
    "case", [case if case == "text" else pytest.param(case, marks=pytest.mark.slow) for case in REWARDS]
)
def test_a_reward_that_is_no_good(case: str, tiny: TinyRun, tmp_path: Path) -> None:
    code, level, message = REWARDS[case]
    reward = tmp_path / "rm.py"
    reward.write_text(code)
    status, findings = _check(*tiny.argv(custom_rm_path=reward, run_dir=tmp_path / "out"))
    bad = [f for f in findings if f["level"] in ("warning", "error")]
    assert [f["level"] for f in bad] == [level], bad
    assert message in bad[0]["message"]
    assert "--custom-rm-path" in bad[0]["message"]
    assert status == (1 if level == "error" else 0)
    assert [f for f in findings if f["level"] == "ok" and "work in a fresh process" in f["message"]]


def test_a_fresh_process_loads_no_torch_for_parts_of_ours(tiny: TinyRun, tmp_path: Path) -> None:
    """They load there as they did in the run's own process, and torch takes longer than all checks together."""
    reward = tmp_path / "rm.py"
    probed = "'slime_testing_probes.probes' in ' '.join(sys.orig_argv)"
    reward.write_text(
        f"import sys\ndef reward(args, sample):\n    assert not ({probed} and 'torch' in sys.modules)\n    return 1.0\n"
    )
    status, findings = _check(*tiny.argv(custom_rm_path=reward, run_dir=tmp_path / "out"))
    assert status == 0, findings
    assert [f for f in findings if f["level"] == "ok" and str(reward) in f["message"]]


@pytest.mark.slow
def test_a_reward_that_asks_a_model_of_the_run_is_not_asked_yet(tiny: TinyRun, tmp_path: Path) -> None:
    """The engine that serves it does not run; a name that no model has is told all the same."""
    reward, models = tmp_path / "rm.py", tmp_path / "models.yaml"
    reward.write_text(
        "from slime_engine_sglang import get_model_url\n\n"
        "def reward(args, sample):\n    return len(get_model_url(args, args.judge))\n"
    )
    (tmp_path / "own.yaml").write_text("custom: {judge: default}\n")
    argv = tiny.argv(tmp_path / "run", custom_rm_path=reward, config=tmp_path / "own.yaml")
    status, findings = _check(*argv)
    assert status == 0
    assert {f["level"] for f in findings if f["subject"] == "components"} == {"ok"}

    models.write_text("sglang: [{name: judge, model_path: /models/judge, server_groups: [{num_gpus: 1}]}]")
    args = Args(group_rm=False, rollout_engine="sglang", sglang_config=str(models), judge="judge")
    bench = Bench(args)
    PROBES["rewards"](bench, resolve("rewards", str(reward)))
    args.judge = "jugde"
    with pytest.raises(ConfigError, match="no model 'jugde' is served; there are: 'judge'"):
        PROBES["rewards"](bench, resolve("rewards", str(reward)))


LABELS: list[tuple[str, list[Any], dict[str, Any], str | None]] = [
    ("exact", ["2", None], {}, "row 2: ValueError: no label (--label-key NAME names its column;"),
    *((name, [None], {}, "row 1: ValueError: no label (--label-key NAME") for name in ("f1", "gpqa", "boxed_exact")),
    *(
        (name, ["2", {"answer": "2"}], {}, "the label {'answer': '2'}: expected a text, a number")
        for name in ("exact", "f1", "math", "dapo", "deepscaler", "weighted_sum")
    ),
    ("ifbench", [None], {}, "row 1: ValueError: the label holds no instructions: None"),
    ("code", ["42"], {}, "row 1: ValueError: a test asserts nothing, so that every program passes: '42'"),
    (
        "pays_equal.py",
        [None, None],
        {},
        "pays 0.0 for every answer, since it compares with the label, and none of the 2",
    ),
    ("gpqa", [None, None], {"correct_letter": "B"}, None),
    ("random", [None, None], {}, None),
    ("own.py", [{"n": 1}, {"m": 2}], {}, "row 2: KeyError: 'n'"),
    ("own.py", [{"n": 1}, {"n": 2}], {}, None),
]


@pytest.mark.parametrize(("spec", "labels", "metadata", "said"), LABELS)
def test_labels_are_read_before_the_run(
    spec: str, labels: list[Any], metadata: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("def reward(args, sample):\n    return float(sample.label['n'])\n")
    equal = "def reward(args, sample):\n    return float(sample.response == sample.label)\n"
    (tmp_path / "pays_equal.py").write_text(equal)
    spec = str(tmp_path / spec) if spec.endswith(".py") else spec
    rows = [{"place": f"row {n}", "spec": spec, "prompt": "1+1=", "label": label, "metadata": metadata}
            for n, label in enumerate(labels, start=1)]  # fmt: skip
    sums = {"weighted_sum": {"terms": [{"reward": "exact"}]}}
    bench = Bench(Args(group_rm=False, plugins=sums if spec == "weighted_sum" else {}), rows)
    resolved = resolve("rewards", spec)
    if said is None:
        PROBES["rewards"](bench, resolved)
        return
    with pytest.raises((WrongAnswer, KeyError, ValueError)) as caught:
        PROBES["rewards"](bench, resolved)
    assert said in f"{bench.row['place']}: {type(caught.value).__name__}: {caught.value}"


def test_a_model_that_is_cut_is_named(tiny: TinyRun, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.root / "model", model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    status, findings = _check(*tiny.argv(run_dir=tmp_path / "out", hf_checkpoint=model))
    assert status == 1
    (error,) = [f["message"] for f in findings if f["level"] == "error"]
    assert error.startswith(f"{weights} is cut or damaged")


MAPPING = (
    "def reward_func(args, sample, **kwargs):\n    return {'score': float(len(sample.response) % 3), 'acc': True}\n"
)
READS_IT = "def post(args, samples, **kwargs):\n    raw = [s.reward['score'] for s in samples]\n    return raw, raw\n"
SERVICE = "async def reward_func(args, sample, **kwargs):\n    raise ConnectionError('no teacher yet')\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "flags", "known"),
    [
        (MAPPING, {}, True),
        (MAPPING, {"reward_key": "acc"}, True),
        (SERVICE, {}, False),
    ],
)
def test_functions_that_read_rewards_get_what_the_run_s_reward_returns(
    reward: str, flags: dict[str, Any], known: bool, tmp_path: Path, tiny: TinyRun
) -> None:
    (tmp_path / "rm.py").write_text(reward)
    (tmp_path / "post.py").write_text(READS_IT)
    argv = tiny.argv(
        tmp_path / "run", rm_type=None, custom_rm_path=f"{tmp_path / 'rm.py'}:reward_func", **flags,
        custom_reward_post_process_path=f"{tmp_path / 'post.py'}:post",
    )  # fmt: skip
    status, findings = _check(*argv)
    assert status == 0
    told = [finding for finding in findings if finding["subject"] == "components" and finding["level"] != "ok"]
    assert [finding["level"] for finding in told] == ([] if known else ["warning"]), told
    assert all("post" not in finding["message"] for finding in told)


@pytest.mark.parametrize(
    ("reward", "flags", "error"),
    [
        pytest.param(MAPPING, {"reward_key": "score"}, None, marks=pytest.mark.slow),
        pytest.param(
            MAPPING, {"reward_key": "score", "set": "plugins.gdpo.weights={style: 1.0}"},
            "gdpo needs 'style' on every sample; these have acc", marks=pytest.mark.slow,
        ),
        ("def reward_func(args, sample, **kwargs):\n    return 1.0\n", {},
         "gdpo needs rewards with parts; these have none: let the reward return a mapping"),
        pytest.param(SERVICE, {}, None, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_parts_that_the_algorithm_needs_are_looked_for(
    reward: str, flags: dict[str, Any], error: str | None, tiny: TinyRun, tmp_path: Path
) -> None:
    (tmp_path / "rm.py").write_text(reward)
    spec = f"{tmp_path / 'rm.py'}:reward_func"
    argv = tiny.argv(tmp_path / "run", custom_rm_path=spec, advantage_estimator="gdpo", **flags)
    status, findings = _check(*argv)
    errors = [finding["message"] for finding in findings if finding["level"] == "error"]
    assert status == (0 if error is None else 1)
    assert len(errors) == status
    assert error is None or f"--advantage-estimator (flag) 'gdpo': --advantage-estimator {error}" in errors[0]


@pytest.mark.slow
def test_inputs_that_a_recipe_makes_are_made_elsewhere(slime: Slime, tmp_path: Path) -> None:
    run = tmp_path / "demo.yaml"
    slime("init", "demo", run)
    done = slime("check", run)
    assert "--prompt-data train.jsonl: 7599 rows" in done.stdout
    assert "ready to run" in done.stdout
    own = slime("check", run, "--hf-checkpoint", tmp_path / "mine", check=False)
    assert own.returncode == 2
    assert "--hf-checkpoint mine (flag)" in own.stderr
    done = slime("check", run, "--hf-checkpoint", tmp_path / "mine", "--prepare-path", "addition")
    assert "ready to run" in done.stdout
    assert os.listdir(tmp_path) == ["demo.yaml"]


@pytest.mark.slow
def test_places_that_a_run_would_refuse(tiny: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("{}\n")
    refusals = {
        "already holds a run (metrics.jsonl)": {"run_dir": tmp_path / "used"},
        "no slime checkpoint there": {"load": tmp_path / "nothing"},
        "slime did not export it": {"save_hf": tmp_path / "used"},
        "no file": {"load_debug_rollout_data": f"{tmp_path}/{{rollout_id}}.jsonl"},
    }
    for message, changes in refusals.items():
        status, findings = _check(*tiny.argv(**{"run_dir": tmp_path / "out", **changes}))
        (error,) = [f for f in findings if f["level"] == "error"]
        assert error["subject"] == "start"
        assert message in error["message"]
        assert status == 1
    out = tmp_path / "out"
    assert _check(*tiny.argv(run_dir=out, load=out))[0] == 0, "a run that is started again and again names itself"


@pytest.mark.slow
def test_train_checks_first(slime: Slime, tiny: TinyRun, tmp_path: Path) -> None:
    reward = tmp_path / "rm.py"
    reward.write_text(REWARDS["text"][0])
    done = slime("train", *tiny.argv(tmp_path / "run", custom_rm_path=reward, no_preflight=None), check=False)
    assert done.returncode == 2
    assert "returned str" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("rows", "shared"),
    [
        (["37+48=?", "1+1=?"], 2),
        (["  37+48=?\t", "9 + 9"], 1),
        (["Name  the CAPITAL of\nFrance", "9+9"], 1),
        (["\uff13\uff17+48=?", "9+9"], 1),  # full-width digits
        ([[{"role": "user", "content": "37+48=?"}], [{"role": "user", "content": "9+9"}]], 1),
        (["37+4 8=?", "9+9"], 0),
        (["37+48=?"] * 9 + ["9+9"], 0),  # what most rows share does not tell them apart
    ],
)
def test_prompts_that_are_trained_and_evaluated_on(tmp_path: Path, rows: list[Any], shared: int) -> None:
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    trained = ["37+48=?", "1+1=?", "name the capital of france"]
    train.write_text("".join(json.dumps({"input": row, "label": "1"}) + "\n" for row in trained))
    held.write_text("".join(json.dumps({"question": row, "answer": "1"}) + "\n" for row in rows))
    dataset = EvalDataset(name="held", path=str(held), input_key="question", label_key="answer")
    args = Args(prompt_data=str(train), input_key="input", label_key="label", eval_datasets=[dataset])
    found = [finding.message for finding in overlap(args)]
    assert len(found) == (shared > 0)
    assert all(f"{shared} of the {len(rows)} prompts of evaluation data set 'held'" in line for line in found)
