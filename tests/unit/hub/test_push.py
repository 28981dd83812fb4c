"""`slime push`: one commit with the model and the facts of the run, into repositories that may be written to."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from slime_hub.card import FACTS, _command
from slime_hub.push import push
from slime_runs import Run

from slime_core import Trainer
from slime_core.config import load_settings
from slime_core.errors import ConfigError
from tests.conftest import Slime, TinyRun
from tests.hub_server import TOKEN, Hub
from tests.unit.hub.conftest import DATA, MODEL

SECRETS = {
    "wandb": "f" * 36 + "cafe", "url": "sesame-open-77", "form": "sk-" + "q" * 40, "option": "swordfish-1234",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny: TinyRun, slime: Slime, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two rollouts, whose settings and environment have secrets."""
    root = tmp_path_factory.mktemp("pushed")
    planted = [
        "--set", f"plugins.exact.api_key={SECRETS['option']}", "--set", f"custom.judge=https://me:{SECRETS['url']}@host/v1",
        "--set", f"custom.note={SECRETS['form']}",
    ]  # fmt: skip
    argv = tiny.argv(root / "run", num_rollout=2, eval_interval=1)
    slime("train", *argv, *planted, WANDB_API_KEY=SECRETS["wandb"])
    return Run(root / "run")


@pytest.fixture
def writable(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def test_the_model_with_the_facts_of_its_run(writable: Hub, run: Run, tiny: TinyRun, tmp_path: Path) -> None:
    writable.part_bytes = 300_000  # the weights go in parts
    done = push(run, "org/mine")
    files = writable.repos["model", "org/mine"].files
    assert done.url == f"{writable.url}/org/mine"
    assert done.commit == writable.repos["model", "org/mine"].branches["main"]
    assert {*files} >= {"README.md", FACTS, "config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    commit = run.path / "checkpoints" / "rollout_0000001"
    assert files["model.safetensors"] == (commit / "model.safetensors").read_bytes()
    assert any(request.endswith("/2") for request in writable.requests if "/upload/" in request)
    facts = json.loads(files[FACTS])
    assert facts["rollouts"] == 2
    assert facts["data"][0]["rows"] == 200
    assert facts["data"][0]["sha256"] == hashlib.sha256((tiny.root / "train.jsonl").read_bytes()).hexdigest()
    (reward,) = facts["rewards"]
    assert reward["sha256"] == hashlib.sha256((tiny.root / "rm.py").read_bytes()).hexdigest()
    assert facts["settings"]["lr"] == 3e-3
    assert "kl_coef" not in facts["settings"]
    assert facts["seeds"] == {"seed": 1234, "rollout_seed": 42} or all(facts["seeds"].values())
    assert facts["versions"]["torch"]
    assert sorted(facts["evaluations"]["held"]) == ["0", "1", "2"]
    assert facts["ledger"]["holds"] is True
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "| rollouts | held |" in card
    assert "largest difference of logits" in card
    words = shlex.split(facts["command"].replace("<not kept>", "given-again"))
    told = load_settings(words[2:], command="train").args
    assert told.note == "given-again"
    assert (told.lr, told.num_rollout, told.prompt_data) == (3e-3, 2, str(tiny.root / "train.jsonl"))


def test_the_cards_command_repeats_flags_that_take_one_value(run: Run) -> None:
    settings = {"plugin_dir": ["a", "b"], "rollout_stop": ["x", "y"], "no_save_optim": False, "sequence_parallel": True}
    words = shlex.split(_command(run, settings))
    assert words[2:8] == ["--plugin-dir", "a", "--plugin-dir", "b", "--rollout-stop", "x"]
    assert words[8:] == ["y", "--sequence-parallel", "--save", "outputs/run"]


def test_no_secret_leaves(writable: Hub, run: Run) -> None:
    push(run, "org/quiet")
    sent = b"\n".join((*writable.repos["model", "org/quiet"].files.values(), *writable.bodies))
    for secret in (*SECRETS.values(), TOKEN):
        assert secret.encode() not in sent
    assert b"<not kept>" in writable.repos["model", "org/quiet"].files[FACTS]


def test_only_repositories_of_its_own_are_overwritten(writable: Hub, run: Run) -> None:
    writable.add("org/theirs", {"README.md": b"mine", "model.safetensors": b"old", "pytorch_model.bin": b"old"})
    before = dict(writable.repos["model", "org/theirs"].files)
    with pytest.raises(ConfigError, match=r"exists and slime push has not made it .*type --overwrite"):
        push(run, "org/theirs")
    assert writable.repos["model", "org/theirs"].files == before
    push(run, "org/theirs", overwrite=True)
    files = writable.repos["model", "org/theirs"].files
    assert "pytorch_model.bin" not in files
    push(run, "org/theirs", step=0)
    assert json.loads(writable.repos["model", "org/theirs"].files[FACTS])["rollouts"] == 1


@pytest.mark.parametrize(
    ("repo", "token", "message"),
    [
        ("org/mine", "", r"slime push org/mine: no token; set HF_TOKEN"),
        ("mine", TOKEN, r"slime push mine: expected a repository, org/name"),
        ("org/not-mine", TOKEN, r"refuses \(You don't have the rights.*HF_TOKEN needs the right"),
        ("org/mine", "hf_" + "b" * 34, r"does not accept the token in HF_TOKEN"),
    ],
)
def test_what_cannot_be_pushed(
    hub: Hub, run: Run, monkeypatch: pytest.MonkeyPatch, repo: str, token: str, message: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError, match=message):
        push(run, repo)
    assert ("model", repo) not in hub.repos


@pytest.mark.slow
def test_the_command(slime_hub: Slime, hub: Hub, run: Run) -> None:
    done = slime_hub("push", run.path, "org/by-command", "--private", "--step", "1", HF_TOKEN=TOKEN)
    assert f"{hub.url}/org/by-command" in done.stdout
    assert hub.repos["model", "org/by-command"].private
    assert TOKEN not in done.stdout + done.stderr


def test_the_object(writable: Hub, tiny: TinyRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {
        "num_rollout": 1, "rollout_batch_size": 4, "n_samples_per_prompt": 2, "rollout_max_response_len": 4,
        "apply_chat_template": True, "num_threads": 1, "preflight": False,
    }  # fmt: skip
    data, reward = f"hf:{DATA}:main[train][:8]", str(tiny.root / "rm.py") + ":reward"
    with pytest.raises(ConfigError, match="expected a repository"):
        Trainer(MODEL, data=data, reward=reward, push_to_hub="mine", **settings)
    trainer = Trainer(MODEL, data=data, reward=reward, push_to_hub="org/object", **settings)
    trainer.train()
    files = writable.repos["model", "org/object"].files
    card = files["README.md"].decode()
    assert f"base_model: {MODEL}\ndatasets:\n- {DATA}\n" in card
    commit = writable.repos["model", MODEL].branches["main"]
    assert json.loads(files[FACTS])["model"] == f"hf:{MODEL}@{commit}"
    trainer.to_yaml("run.yaml")
    assert f"hf_checkpoint: hf:{MODEL}@{commit}\n" in Path("run.yaml").read_text()
    (tmp_path / "w.safetensors").write_bytes(files["model.safetensors"])
    assert load_file(tmp_path / "w.safetensors")
