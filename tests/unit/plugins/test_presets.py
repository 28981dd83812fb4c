"""An estimator's own defaults: below files, environment and flags, above the schema's; shown and checked like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.errors import ConfigError, PluginNotFoundError
from slime_core.plugins.presets import load_settings

PRESET = "from slime_core import EstimatorBase\n\n\nclass Mine(EstimatorBase):\n    defaults = {}\n"


def write(path: Path, defaults: str) -> str:
    path.write_text(PRESET.format(defaults))
    return str(path)


def test_dapo_is_a_preset() -> None:
    settings = load_settings(["--advantage-estimator", "dapo"], command="show", env={})
    args = settings.args
    assert (args.eps_clip, args.eps_clip_high, args.calculate_per_token_loss) == (0.2, 0.28, True)
    assert args.dynamic_sampling_filter_path == "nonzero_std"
    assert not args.use_kl_loss
    assert settings.cite("eps_clip_high") == "--eps-clip-high 0.28 (default of --advantage-estimator dapo)"
    assert str(settings.origins["eps_clip"]) == "default"
    assert not settings.is_given("eps_clip_high")


def test_whatever_the_user_says_wins(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("advantage_estimator: dapo\neps_clip_high: 0.3\ncalculate_per_token_loss: false\n")
    settings = load_settings(["--config", str(config)], command="show", env={})
    assert (settings.args.eps_clip_high, settings.args.calculate_per_token_loss) == (0.3, False)
    argv = ["--advantage-estimator", "dapo", "--no-calculate-per-token-loss", "--dynamic-sampling-filter-path", "mine"]
    settings = load_settings(argv, command="show", env={"SLIME_EPS_CLIP_HIGH": "0.5"})
    assert settings.args.eps_clip_high == 0.5
    assert not settings.args.calculate_per_token_loss
    assert settings.args.dynamic_sampling_filter_path == "mine"


def test_the_stored_settings_load_back_alike(tmp_path: Path) -> None:
    settings = load_settings(["--advantage-estimator", "dapo"], command="show", env={})
    text = settings.to_yaml(changed=True)
    assert "eps_clip_high: 0.28  # default of --advantage-estimator dapo" in text
    (tmp_path / "config.yaml").write_text(settings.to_yaml())
    again = load_settings(["--config", str(tmp_path / "config.yaml")], command="show", env={})
    assert {**again.to_dict(), "config": []} == settings.to_dict()


def test_a_preset_of_ones_own_in_a_file(tmp_path: Path) -> None:
    spec = write(tmp_path / "mine.py", '{"eps_clip": 0.1, "plugins": {"math": {"tolerance": 1.0, "other": 2}}}')
    argv = ["--advantage-estimator", spec, "--set", "plugins.math.tolerance=0.5"]
    settings = load_settings(argv, command="show", env={})
    assert settings.args.eps_clip == settings.args.eps_clip_high == 0.1  # rules see it too
    assert settings.args.plugins == {"math": {"tolerance": 0.5, "other": 2}}


@pytest.mark.parametrize(
    ("defaults", "complaint"),
    [
        ('{"eps_clp": 0.1}', r"default of --advantage-estimator .*mine.py: 'eps_clp' .*Did you mean eps_clip"),
        ('{"eps_clip": -1}', r"--eps-clip -1 \(default of --advantage-estimator .*mine.py\): must be greater"),
        ('{"config": "x.yaml"}', "'config' is no setting that it may bring"),
    ],
)
def test_a_wrong_preset_is_one_line_that_names_it(tmp_path: Path, defaults: str, complaint: str) -> None:
    spec = write(tmp_path / "mine.py", defaults)
    with pytest.raises(ConfigError, match=complaint) as error:
        load_settings(["--advantage-estimator", spec], command="show", env={})
    assert "\n" not in str(error.value)


def test_an_unknown_estimator_is_named_with_its_origin() -> None:
    with pytest.raises(PluginNotFoundError, match=r"--advantage-estimator \(flag\).*rlo.*rloo"):
        load_settings(["--advantage-estimator", "rlo"], command="show", env={})


def test_commands_without_an_algorithm_take_no_preset() -> None:
    argv = ["--advantage-estimator", "dapo", "--hf-checkpoint", "m", "--rm-type", "exact"]
    argv += ["--eval-prompt-data", "a", "b", "--eval-max-response-len", "4"]
    settings = load_settings(argv, command="eval", env={})
    assert settings.args.eps_clip_high == 0.2
