"""The contract of generate functions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from slime_core.errors import EngineError
from slime_core.plugins.adapters import GenerateCaller
from slime_core.protocols import GenerateContext
from slime_core.testing.contracts.base import Contract
from slime_core.testing.scripted import CharTokenizer, Reply, ScriptedEngine
from slime_core.types import Sample, SampleStatus

TERMINAL = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.ABORTED, SampleStatus.FAILED)


class GeneratorContract(Contract):
    """Tokens, log-probs and mask aligned, a terminal status, limits kept, and errors not hidden."""

    kind = "generators"
    prompt: ClassVar[str] = "1+1=?"
    script: ClassVar[Sequence[Reply | str]] = (r"\boxed{2}",)
    """What the model answers in an undisturbed run, one reply per engine call."""
    max_new_tokens: ClassVar[int] = 200

    def sample(self) -> Sample:
        """A prompt as the data source makes it."""
        tokens = CharTokenizer().encode(self.prompt)
        return Sample(group_index=0, index=3, prompt=self.prompt, tokens=tokens, label="2", session_id="s")

    def generate(
        self, engine: ScriptedEngine, sample: Sample | None = None, params: dict[str, Any] | None = None
    ) -> list[Sample]:
        """Run the function once, as the pipeline does; the samples it returned."""
        caller = GenerateCaller(self.resolved)
        params = {"max_new_tokens": self.max_new_tokens, "temperature": 1.0} if params is None else params
        context = GenerateContext(engine, engine.tokenizer, evaluation=False, rollout_id=0)
        result = asyncio.run(caller.call(self.settings, sample or self.sample(), params, context=context))
        return result if isinstance(result, list) else [result]

    def test_a_finished_answer(self) -> None:
        """Prompt kept, response aligned, status terminal, text present."""
        engine = ScriptedEngine(list(self.script))
        prompt = self.sample().tokens
        for sample in self.generate(engine):
            sample.validate()
            assert sample.tokens[: len(prompt)] == prompt
            assert sample.response_length == len(sample.tokens) - len(prompt) > 0
            assert sample.status == SampleStatus.COMPLETED
            assert sample.response
            assert sample.rollout_log_probs is not None
            assert len(sample.token_weight_versions) == sample.response_length
        assert len(engine.requests) == len(self.script), "the whole script is played"

    def test_only_sampled_tokens_are_trained(self) -> None:
        """Loss mask 1 exactly on what the policy sampled."""
        for sample in self.generate(ScriptedEngine(list(self.script), weight_version=7)):
            assert sample.loss_mask == [int(v == 7) for v in sample.token_weight_versions]

    def test_fan_out_siblings_share_a_rollout_id(self) -> None:
        """Of several returned samples; None leaves the choice to the pipeline."""
        siblings = self.generate(ScriptedEngine(list(self.script)))
        assert len({sibling.rollout_id for sibling in siblings}) == 1

    def test_the_token_limit_holds(self) -> None:
        """`max_new_tokens` bounds the response, and reaching it is TRUNCATED."""
        limit = 5
        params = {"max_new_tokens": limit, "temperature": 1.0}
        engine = ScriptedEngine(lambda request: Reply("x" * 50))
        for sample in self.generate(engine, params=params):
            assert sample.response_length <= limit
            assert sample.status == SampleStatus.TRUNCATED
        assert all(r.sampling_params["max_new_tokens"] <= limit for r in engine.requests)

    def test_a_partial_sample_is_continued(self) -> None:
        """Its tokens stay, count against the limit, and the engine is given all of them."""
        sample = self.sample()
        partial = CharTokenizer().encode("so far ")
        meta = {"finish_reason": {"type": "abort"}, "weight_version": "1"}
        sample.append_response_tokens(None, partial, [-0.1] * len(partial), meta_info=meta, text="so far ")
        before = list(sample.tokens)
        engine = ScriptedEngine(list(self.script))
        for continued in self.generate(engine, sample):
            assert continued.tokens[: len(before)] == before
            assert continued.status in TERMINAL
            assert continued.response.startswith("so far ")
        assert engine.requests[0].input_ids == before
        assert engine.requests[0].sampling_params["max_new_tokens"] == self.max_new_tokens - len(partial)

    def test_no_room_left(self) -> None:
        """A response that is as long as allowed is TRUNCATED without asking the engine."""
        sample = self.sample()
        sample.append_response_tokens(None, [9] * 4, [-0.1] * 4)
        engine = ScriptedEngine([])
        (result,) = self.generate(engine, sample, {"max_new_tokens": 4, "temperature": 1.0})
        assert result.status == SampleStatus.TRUNCATED
        assert result.response_length == 4
        assert engine.requests == []

    def test_an_abort_ends_it(self) -> None:
        """The tokens so far are kept, and the engine is not asked again."""
        engine = ScriptedEngine([Reply("so ", finish="abort")])
        for sample in self.generate(engine):
            assert sample.status == SampleStatus.ABORTED
            assert sample.response_length == 3
        assert len(engine.requests) == 1

    def test_an_engine_error_is_not_hidden(self) -> None:
        """It is raised, or the sample says FAILED."""
        engine = ScriptedEngine([EngineError("out of memory")])
        try:
            results = self.generate(engine)
        except EngineError:
            return
        assert all(sample.status == SampleStatus.FAILED for sample in results)

    def test_sampling_params_are_left_alone(self) -> None:
        """They are shared by the samples of a group."""
        params = {"max_new_tokens": self.max_new_tokens, "temperature": 0.7, "stop": ["\n"]}
        before = {**params, "stop": ["\n"]}
        self.generate(ScriptedEngine(list(self.script)), params=params)
        assert params == before

    def test_sampling_params_reach_the_engine(self) -> None:
        """All of them but the token limit, unchanged, in every call."""
        engine = ScriptedEngine(list(self.script))
        self.generate(engine, params={"max_new_tokens": self.max_new_tokens, "temperature": 0.7, "top_p": 0.9})
        assert engine.requests
        for request in engine.requests:
            assert request.sampling_params["temperature"] == pytest.approx(0.7)
            assert request.sampling_params["top_p"] == pytest.approx(0.9)
