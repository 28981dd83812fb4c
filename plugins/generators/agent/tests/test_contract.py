from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_core import SampleStatus
from slime_core.engines.scripted import CharTokenizer, Reply, ScriptedEngine
from slime_core.testing import GeneratorContract

PROGRAMS = Path(__file__).with_name("programs.py")


class TestAgent(GeneratorContract):
    component = "agent"
    args = {"plugins": {"agent": {"program": f"{PROGRAMS}:ask"}}, "rollout_max_context_len": None}

    @pytest.mark.xfail(reason="the prompt is the program's, not the row's")
    def test_a_finished_answer(self) -> None:
        """See `test_agents_a_finished_answer`."""
        super().test_a_finished_answer()

    def test_agents_a_finished_answer(self) -> None:
        """As the suite's, but for the prompt: it is the program's, in the chat template."""
        for sample in self.generate(ScriptedEngine(list(self.script))):
            sample.validate()
            assert CharTokenizer().decode(sample.prompt_tokens) == f"<|user|>{self.prompt}<|end|><|assistant|>"
            assert sample.status == SampleStatus.COMPLETED
            assert sample.response == self.script[0]

    @pytest.mark.xfail(reason="a program's state is gone, so its run starts again")
    def test_a_partial_sample_is_continued(self) -> None:
        """See `test_agents_a_partial_sample_is_continued`."""
        super().test_a_partial_sample_is_continued()

    def test_agents_a_partial_sample_is_continued(self) -> None:
        """It starts again: the program's state is gone, so its tokens are too."""
        sample = self.sample()
        sample.append_response_tokens(None, [9] * 4, [-0.1] * 4)
        engine = ScriptedEngine(list(self.script))
        for again in self.generate(engine, sample):
            assert again.response == self.script[0]
            assert engine.requests[0].input_ids == again.prompt_tokens

    @pytest.mark.xfail(reason="a run starts again, with room")
    def test_no_room_left(self) -> None:
        """See `test_agents_no_room_left`."""
        super().test_no_room_left()

    def test_agents_no_room_left(self) -> None:
        """A limit of 0 tokens: the program gets an empty answer, and the sample fails, as nothing was sampled."""
        engine = ScriptedEngine([])
        (result,) = self.generate(engine, params={"max_new_tokens": 0, "temperature": 1.0})
        assert result.status == SampleStatus.FAILED
        assert engine.requests == []

    @pytest.mark.xfail(reason="nothing is kept of a run that is repeated from its beginning")
    def test_an_abort_ends_it(self) -> None:
        """See `test_agents_an_abort_ends_it`."""
        super().test_an_abort_ends_it()

    def test_agents_an_abort_ends_it(self) -> None:
        """Nothing is kept: the run is repeated from its beginning."""
        engine = ScriptedEngine([Reply("so ", finish="abort")])
        (sample,) = self.generate(engine)
        assert sample.status == SampleStatus.ABORTED
        assert sample.response_length == 0
        assert len(engine.requests) == 1

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        pytest.importorskip("openai")
        return super().generate(*args, **kwargs)
