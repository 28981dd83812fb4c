"""`slime models`, and `--model` in a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slime_testing_contracts.families import FAMILIES

from slime_core.cli import main as frame
from slime_core.launch.prepare import prepare
from slime_core.models.hf_io import write_config
from slime_core.plugins.presets import load_settings
from tests.scripts import load_script


def slime(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert frame.main(["models", *argv]) == status
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_list_says_who_can_train_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in json.loads(slime(capsys, "list", "--json"))}
    assert len(rows) == 45
    assert rows["qwen3-30B-A3B"] == {
        "name": "qwen3-30B-A3B",
        "family": "qwen3_moe",
        "parameters": 30_532_122_624,
        "active_parameters": 3_353_032_704,
        "layers": 48,
        "experts": 128,
        "hub": "Qwen/Qwen3-30B-A3B",
        "embedded": "slime",
        "fsdp": "slime",
        "megatron": True,
        "sglang": True,
        "vllm": True,
    }
    assert all(row["embedded"] or row["megatron"] for row in rows.values()), "a preset that no trainer takes"
    by_transformers = {row["family"] for row in rows.values() if row["embedded"] == "transformers"}
    assert by_transformers <= FAMILIES.keys(), "a family that is not compared with its float64 reference"
    assert {"qwen3_5", "qwen3_5_moe", "glm_moe_dsa", "deepseek_v3"} <= by_transformers
    text = slime(capsys, "list")
    assert text.startswith("NAME  ")
    assert len(text.splitlines()) == 46 + 3
    assert "sglang 0.5.23, vllm 0.32.0" in text


def test_list_says_which_servers_know_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded:
        @staticmethod
        def read_text(**_: str) -> str:
            kinds = {"sglang": ["Qwen3ForCausalLM"], "vllm": ["DeepseekV3ForCausalLM"]}
            return json.dumps({name: {"version": "1", "architectures": found} for name, found in kinds.items()})

    monkeypatch.setattr("slime_commands.models.presets.ENGINES", Recorded)
    rows = {row["name"]: (row["sglang"], row["vllm"]) for row in json.loads(slime(capsys, "list", "--json"))}
    assert rows["qwen3-4B"] == (True, False)
    assert rows["kimi-k2"] == rows["moonlight"] == (False, True)
    assert rows["llama3-8B"] == (False, False)


def test_args_are_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[2] / "scripts" / "models" / "glm4-9B.sh"
    assert slime(capsys, "args", "glm-z1-9B") in script.read_text()


def test_no_command_of_it_loads_torch() -> None:
    code = (
        "from slime_core.cli.main import main; import sys;"
        "main(['models', 'list']); main(['models', 'show', 'moonlight']); main(['models', 'args', 'mimo-7B-rl']);"
        "print([m for m in ('torch', 'transformers', 'megatron.core', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_generated_files_are_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = load_script("scripts/generate_models.py")
    assert module.main(["--check"]) == 0
    assert module.main([], tmp_path) == 0
    assert module.main(["--check"], tmp_path) == 0
    (tmp_path / "scripts" / "models" / "gone.sh").touch()
    assert module.main(["--check"], tmp_path) == 1
    assert "gone.sh is out of date" in capsys.readouterr().err
    assert module.main([], tmp_path) == 0
    assert not (tmp_path / "scripts" / "models" / "gone.sh").exists()


# -- --model of a run --------------------------------------------------------------------------------------


def check(name: str, checkpoint: Path, *argv: str) -> None:
    flags = ["--model", name, "--hf-checkpoint", str(checkpoint), "--rm-type", "exact", "--num-rollout", "1"]
    flags += ["--n-samples-per-prompt", "2"]
    flags += ["--prompt-data", "x.jsonl", "--rollout-batch-size", "1", "--rollout-max-response-len", "8", *argv]
    prepare(load_settings(flags, env={}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    from slime_commands.models.presets import find_preset

    write_config(tmp_path, find_preset("qwen3-4B").config)
    return tmp_path


def test_a_run_of_another_model_of_the_family_lists_the_differences(checkpoint: Path) -> None:
    with pytest.raises(Exception, match=r"--model 'qwen3-8B' \(flag\) is not the model of --hf-checkpoint") as caught:
        check("qwen3-8B", checkpoint)
    text = str(caught.value)
    assert "--hidden-size: 4096 in the preset, 2560 in config.json" in text
    assert "--ffn-hidden-size: 12288 in the preset, 9728 in config.json" in text
    assert "--untie-embeddings-and-output-weights: False in the preset, True in config.json" in text


def test_a_run_of_another_family_is_refused(checkpoint: Path) -> None:
    with pytest.raises(Exception, match=r"qwen3-30B-A3B is of family qwen3_moe, config.json says qwen3"):
        check("qwen3-30B-A3B", checkpoint)


def test_numbers_that_the_user_gives_are_left_to_the_trainer(checkpoint: Path) -> None:
    write_config(checkpoint, {**json.loads((checkpoint / "config.json").read_text()), "rms_norm_eps": 1e-5})
    with pytest.raises(Exception, match=r"--norm-epsilon: 1e-06 in the preset, 1e-05 in config.json"):
        check("qwen3-4B", checkpoint)
    check("qwen3-4B", checkpoint, "--norm-epsilon", "1e-5")
