from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from slime_commands.init import prepare as recipe
from slime_commands.init import task, warmup
from slime_commands.init.tiny_model import write_random_model

from slime_core.config import load_settings
from slime_core.errors import ConfigError
from slime_core.launch.prepare import prepare

DEMO = Path(__file__).parents[4] / "plugins/commands/slime_commands/init/templates/demo.yaml"


@pytest.fixture
def short_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rollout per phase: 14 and 31 steps."""
    monkeypatch.setattr(task, "NUM_WORKED", 224)
    monkeypatch.setattr(task, "NUM_MIXED", 496)


def demo_args(directory: Path, seed: int = 0) -> Any:
    argv = ["--config", str(DEMO), "--hf-checkpoint", str(directory / "model"), "--seed", str(seed)]
    argv += ["--prompt-data", str(directory / "train.jsonl"), "--save", str(directory / "run")]
    argv += ["--eval-prompt-data", "addition", str(directory / "heldout.jsonl@[:100]")]
    return load_settings(argv, env={}).args


def test_everything_missing_is_made_and_nothing_else_stays(tmp_path: Path, short_warmup: None) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipe.prepare(demo_args(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["heldout.jsonl", "model", "train.jsonl"]
    train, held_out = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("train.jsonl", "heldout.jsonl")
    )
    assert len(held_out) == 500
    assert not {row["input"] for row in train} & {row["input"] for row in held_out}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12+34=?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    logits = model(prompt).logits[0, -1]
    # Even this short warm-up teaches how an answer begins: a digit of the working, or the box.
    begins = set(tokenizer.convert_ids_to_tokens(logits.topk(4).indices.tolist()))
    assert begins & {r"\boxed{", *"0123456789"}


def test_what_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random_model(tmp_path / "model", seed=9)
    weights = (tmp_path / "model" / "model.safetensors").read_bytes()
    (tmp_path / "train.jsonl").write_text('{"input": "mine", "label": "1"}\n')
    recipe.prepare(demo_args(tmp_path))
    assert (tmp_path / "train.jsonl").read_text() == '{"input": "mine", "label": "1"}\n'
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "heldout.jsonl").is_file()
    printed = capsys.readouterr().out
    assert printed.count("quick start: wrote") == 1


@pytest.mark.slow
def test_a_killed_preparation_is_done_again_with_the_same_result(
    tmp_path: Path, short_warmup: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_after: list[bytes] = []

    def killed(source: Path, target: Path) -> None:
        killed_after.append((source / "model.safetensors").read_bytes())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(warmup, "copy_assets", killed)
        with pytest.raises(KeyboardInterrupt):
            recipe.prepare(demo_args(tmp_path, seed=5))
    assert (tmp_path / ".model.preparing").is_dir()
    assert not (tmp_path / "model").exists()
    recipe.prepare(demo_args(tmp_path, seed=5))
    assert not (tmp_path / ".model.preparing").exists()
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == load(killed_after[0]).keys()
    for name, tensor in load(killed_after[0]).items():
        assert torch.equal(tensor, load_file(tmp_path / "model" / "model.safetensors")[name])


@pytest.mark.slow
def test_the_warm_up_is_one_process_also_under_torchrun(
    tmp_path: Path, short_warmup: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)  # joining a group would fail
    recipe.prepare(demo_args(tmp_path))
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "2")
    assert (tmp_path / "model" / "config.json").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hf-checkpoint", "thesis"], "holds no model"),
        (["--hf-checkpoint", "thesis", "--prepare-path", "addition"], "holds no model"),
        (["--hf-checkpoint", "thesis/chapter.tex"], "holds no model"),
        (["--hf-checkpoint", "Qwen/Qwen3-0.6B"], "not in the cache"),
        (["--hf-checkpoint", "Qwen/Qwen3-0.6B", "--prepare-path", "addition"], "name it ./Qwen/Qwen3-0.6B"),
        (["--hf-checkpoint", "./Qwen/Qwen3-0.6B"], "makes only what is named together with it"),
        (["--prompt-data", "trian.jsonl"], "makes only what is named together with it"),
        (["--eval-prompt-data", "heldout", "held.jsonl"], "makes only what is named together with it"),
        (["--eval-prompt-data", "heldout", "held.jsonl@[:10]"], "makes only what is named together with it"),
    ],
)
@pytest.mark.parametrize("make", [True, False])
def test_a_recipe_stands_in_for_nothing_that_the_user_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str, make: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("thesis").mkdir()
    Path("thesis/chapter.tex").write_text("mine")
    Path("demo.yaml").write_text(DEMO.read_text())
    with pytest.raises(ConfigError, match=message):
        prepare(load_settings(["--config", "demo.yaml", *flags], env={}), make=make)
    left = sorted(str(path) for path in Path().rglob("*"))
    assert left == ["demo.yaml", "thesis", "thesis/chapter.tex"]


def test_a_seed_of_its_own_finds_the_place_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_fine_tune", lambda args, phase, model, data, save: model)
    recipe.prepare(demo_args(tmp_path))
    (tmp_path / "model-seed-1").mkdir()
    (tmp_path / "model-seed-1" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="model-seed-1 is there already and is no model"):
        recipe.prepare(demo_args(tmp_path, seed=1))
    assert [path.name for path in (tmp_path / "model-seed-1").iterdir()] == ["mine.txt"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def clean(tmp_path: Path) -> Any:
    yield
    shutil.rmtree(tmp_path, ignore_errors=True)
