"""What components say about settings reaches the user before anything starts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from slime_core.config import Settings, load_settings
from slime_core.errors import ConfigError, PluginError
from slime_core.launch.checks import check_component_settings
from slime_core.launch.components import Components
from slime_core.protocols import EngineTraits, TrainerTraits


class Launching:
    """An engine that acts on placement."""

    traits = EngineTraits(uses=frozenset({"sglang_config", "rollout_num_gpus"}))

    @classmethod
    def check_settings(cls, settings: Settings) -> list[str]:
        if settings.args.rollout_num_gpus == 13:
            raise ConfigError("13 is refused")
        return [f"{settings.cite('rollout_num_gpus')} is a lot"]


class Plain:
    """A component that declares nothing."""


def settings(*argv: str) -> Settings:
    return load_settings(["--rollout-engine", "mine", "--num-rollout", "1", *argv], command="show", env={})


def warned(caplog: pytest.LogCaptureFixture, engine: Any, *argv: str, trainer: Any = Plain) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="slime_core"):
        check_component_settings(settings(*argv), Components(engine=engine, trainer=trainer))
    return [record.getMessage() for record in caplog.records]


def test_settings_that_a_component_uses_are_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    argv = ("--rollout-num-gpus", "4", "--sglang-config", "m.yaml", "--colocate")
    assert warned(caplog, Launching, *argv) == [
        "without effect with --rollout-engine mine and --train-backend embedded: --colocate (flag)",
        "--rollout-num-gpus 4 (flag) is a lot",
    ]
    assert warned(caplog, None, "--rollout-num-gpus", "4", trainer=None) == [
        "without effect with slime show: --rollout-num-gpus 4 (flag)"
    ]


def test_settings_that_nobody_uses(caplog: pytest.LogCaptureFixture) -> None:
    assert warned(caplog, Plain) == []
    assert warned(caplog, Plain, "--rollout-num-gpus", "4") == [
        "without effect with --rollout-engine mine and --train-backend embedded: --rollout-num-gpus 4 (flag)"
    ]
    with pytest.raises(ConfigError) as raised:
        warned(caplog, Plain, "--sglang-config", "m.yaml")
    assert str(raised.value) == (
        "--sglang-config 'm.yaml' (flag) has no effect with --rollout-engine mine and --train-backend embedded; remove"
        " to go on, or choose others."
    )


def test_a_trainer_may_use_settings_too(caplog: pytest.LogCaptureFixture) -> None:
    class Placed(Plain):
        traits = TrainerTraits(uses=frozenset({"colocate"}))

    assert warned(caplog, Plain, "--colocate", trainer=Placed) == []


def test_misspelt_names_end_the_command(caplog: pytest.LogCaptureFixture) -> None:
    class Misspelt:
        traits = EngineTraits(uses=frozenset({"rollout_num_gpu"}))

    with pytest.raises(PluginError) as raised:
        warned(caplog, Misspelt)
    assert str(raised.value) == (
        "--rollout-engine 'mine' (flag): `uses` of its traits has 'rollout_num_gpu', which is no setting"
    )


def test_what_a_component_refuses_ends_the_command(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="13 is refused"):
        warned(caplog, Launching, "--rollout-num-gpus", "13")
