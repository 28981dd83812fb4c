from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

pytest.importorskip("verifiers")
from slime_generator_verifiers import Options, _spec
from slime_generator_verifiers.environments import TaskRows
from slime_testing_contracts import DataSourceContract, GeneratorContract

from slime_core import Sample, options


class TestTasks(DataSourceContract):
    component = "verifiers"
    args: ClassVar[dict[str, Any]] = {
        "plugins": {"verifiers": {"env": "digit-echo"}}, "metadata_key": "metadata", "label_key": None,
    }  # fmt: skip


class TestEpisodes(GeneratorContract):
    component = "verifiers"
    plays_programs = True
    script = ("12", "3a")
    args: ClassVar[dict[str, Any]] = {"plugins": {"verifiers": {"env": "digit-echo"}}}

    def sample(self) -> Sample:
        """One of the environment's tasks."""
        spec = json.loads(_spec(options(self.settings, "verifiers", Options)))
        row = TaskRows(spec, {}, {"input": "input", "metadata": "metadata"})[0]
        sample = super().sample()
        sample.metadata = row["metadata"]
        return sample


class TestEpisodesOfSeveralRuns(TestEpisodes):
    script = ("12", "3a")
    args: ClassVar[dict[str, Any]] = {
        "plugins": {"verifiers": {"env": "digit-echo", "pair": "best-of-n", "config": {"n": 2}}},
    }
