"""Presets as Megatron's flags: by `--model`, on a command line, sourced by bash, against the families' own maps."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from slime_commands.models.megatron_flags import flag_words, megatron_flags
from slime_commands.models.presets import find_preset, model_presets
from slime_trainer_megatron.arguments.architecture import check_architecture

from slime_core.config import Settings, load_settings
from slime_core.errors import ConfigError
from slime_core.plugins.manager import current_registry
from slime_core.plugins.resolve import resolve
from tests.sweeps import sweep

ROOT = Path(__file__).parents[4]
PRESETS = model_presets()
FAMILIES = {ref.name for ref in current_registry() if ref.kind == "megatron_models"}
every = pytest.mark.parametrize(
    "name", [name if i % 8 == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(PRESETS)]
)


def load(*argv: str, command: str = "show") -> Settings:
    return load_settings(argv, command=command, env={})


def stored(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings.args, name) for name in settings.foreign}


@every
def test_a_launch_script_and_the_setting_say_the_same(name: str) -> None:
    words = [word for words in flag_words(megatron_flags(PRESETS[name])) for word in words]
    if PRESETS[name].model_type not in FAMILIES:
        words += ["--custom-model-provider-path", "mine.py:provide"]
    assert stored(load("--model", name)) == stored(load("--train-backend", "megatron", *words))


def test_bash_reads_the_arrays_as_they_are_meant() -> None:
    scripts = sorted((ROOT / "scripts" / "models").glob("*.sh"))
    assert {path.stem for path in scripts} == {name for p in PRESETS.values() for name in (p.name, *p.also)}
    lines = [f'source "{path}"; printf "%s\\n" "${{MODEL_ARGS[@]}}" END' for path in scripts]
    done = subprocess.run(
        ["bash", "-eu", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60, check=True
    )
    found = [text.strip("\n").split("\n") for text in done.stdout.split("END\n") if text]
    expected = [[w for words in flag_words(megatron_flags(find_preset(path.stem))) for w in words] for path in scripts]
    assert found == expected


@sweep("name", [name for name, preset in PRESETS.items() if preset.model_type in FAMILIES])
def test_the_familys_own_map_agrees(name: str) -> None:
    config = PRESETS[name].config
    found = resolve("megatron_models", PRESETS[name].model_type).obj(config)
    check_architecture(load("--model", name, "--train-backend", "megatron").args, config, found.architecture)


def test_what_the_user_gives_wins_and_the_origin_is_shown() -> None:
    settings = load("--model", "qwen3-4B", "--num-layers", "24", "--train-backend", "megatron")
    assert settings.args.num_layers == 24
    assert str(settings.origins["num_layers"]) == "flag"
    assert settings.args.hidden_size == 2560
    assert str(settings.origins["hidden_size"]) == "--model qwen3-4B"


def test_a_stored_run_names_the_model_and_loads_as_the_same(tmp_path: Path) -> None:
    settings = load("--model", "qwen3-4B", "--num-layers", "24")
    (tmp_path / "run.yaml").write_text(settings.to_yaml())
    again = load("--config", str(tmp_path / "run.yaml"))
    assert stored(again) == stored(settings)
    assert str(again.origins["hidden_size"]) == "--model qwen3-4B"
    assert "# hidden_size: 2560  # --model qwen3-4B" in again.to_yaml()


def test_an_unknown_name_says_where_it_came_from() -> None:
    with pytest.raises(ConfigError, match=r"--model 'qwen3-5B' \(SLIME_MODEL env\).*Did you mean qwen3-"):
        load_settings([], command="show", env={"SLIME_MODEL": "qwen3-5B"})


def test_without_the_presets_the_core_says_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_core.config.load.offered", lambda group, name: None)
    with pytest.raises(ConfigError) as caught:
        load_settings(["--model", "qwen3-4B"], command="show", env={})
    message = "--model 'qwen3-4B' (flag): no plugin that knows published models is installed; pip install slime-rl"
    assert str(caught.value) == message
