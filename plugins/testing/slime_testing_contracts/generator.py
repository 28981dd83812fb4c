"""The contract of generate functions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from slime_testing_probes.scripted import CharTokenizer, Reply, ScriptedEngine

from slime_core.errors import EngineError
from slime_core.plugins.adapters import GenerateCaller
from slime_core.protocols import GenerateContext
from slime_core.sample import Sample, SampleStatus
from slime_testing_contracts.base import Contract

TERMINAL = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.ABORTED, SampleStatus.FAILED)


class GeneratorContract(Contract):
    """Contract of generate functions: tokens, log-probs and mask aligned, a final status, limits kept, errors shown."""

    kind = "generators"
    prompt: ClassVar[str] = "1+1=?"
    script: ClassVar[Sequence[Reply | str]] = (r"\boxed{2}",)
    """Replies of the model in an undisturbed run, one per engine call."""
    max_new_tokens: ClassVar[int] = 200
    plays_programs: ClassVar[bool] = False
    """True if a program talks to the model: it writes the prompts, and an interrupted run begins again."""

    def sample(self) -> Sample:
        """Return a sample with a prompt, as the data source makes it."""
        tokens = CharTokenizer().encode(self.prompt)
        return Sample(group_index=0, index=3, prompt=self.prompt, tokens=tokens, label="2", session_id="s")

    def generate(
        self, engine: ScriptedEngine, sample: Sample | None = None, params: dict[str, Any] | None = None
    ) -> list[Sample]:
        """Run the function once, as a rollout does; the samples it returned."""
        caller = GenerateCaller(self.resolved)
        params = {"max_new_tokens": self.max_new_tokens, "temperature": 1.0} if params is None else params
        context = GenerateContext(engine, engine.tokenizer, evaluation=False, rollout_id=0)
        result = asyncio.run(caller.call(self.settings, sample or self.sample(), params, context=context))
        return result if isinstance(result, list) else [result]

    def test_a_finished_answer(self) -> None:
        """Check that the prompt is kept, the response aligned, the status final and the text present."""
        engine = ScriptedEngine(list(self.script))
        for sample in self.generate(engine):
            prompt = sample.prompt_tokens if self.plays_programs else self.sample().tokens
            try:
                sample.validate()
            except ValueError as error:
                pytest.fail(f"the sample cannot be trained on: {error}", pytrace=False)
            assert prompt, "the model was given something to answer"
            assert sample.tokens[: len(prompt)] == prompt, "sample.tokens begins with the prompt's tokens"
            assert sample.response_length == len(sample.tokens) - len(prompt) > 0, (
                f"{len(sample.tokens)} tokens of which {len(prompt)} are the prompt, but response_length is"
                f" {sample.response_length}; a finished answer has tokens"
            )
            assert sample.status == SampleStatus.COMPLETED, f"a finished answer is COMPLETED; found {sample.status!r}"
            assert sample.response, "sample.response has the text of the answer"
            assert sample.rollout_log_probs is not None, "rollout_log_probs is missing; use append_response_tokens"
            assert len(sample.token_weight_versions) == sample.response_length, "one weight version per response token"
        assert len(engine.requests) == len(self.script), "the whole script is played"

    def test_only_sampled_tokens_are_trained(self) -> None:
        """Check that the loss mask is 1 exactly for tokens that the policy sampled."""
        for sample in self.generate(ScriptedEngine(list(self.script), weight_version=7)):
            sampled = [int(v == 7) for v in sample.token_weight_versions]
            assert sample.loss_mask == sampled, (
                f"the loss mask is 1 on what the policy sampled, {sampled}, and 0 elsewhere; found {sample.loss_mask}"
            )

    def test_fan_out_siblings_share_a_rollout_id(self) -> None:
        """Check that all returned samples have one rollout id; None leaves the choice to the rollout."""
        siblings = self.generate(ScriptedEngine(list(self.script)))
        ids = {sibling.rollout_id for sibling in siblings}
        assert len(ids) == 1, f"samples from one call share a rollout_id; found {ids}"

    def test_the_token_limit_holds(self) -> None:
        """Check that `max_new_tokens` bounds the response, and that a response at the limit is TRUNCATED."""
        limit = 5
        params = {"max_new_tokens": limit, "temperature": 1.0}
        engine = ScriptedEngine(lambda request: Reply("x" * 50))
        for sample in self.generate(engine, params=params):
            length = sample.response_length
            assert length <= limit, f"max_new_tokens is {limit}, and the response has {length} tokens"
            assert sample.status == SampleStatus.TRUNCATED, f"cut at the limit is TRUNCATED; found {sample.status!r}"
        asked = [r.sampling_params["max_new_tokens"] for r in engine.requests]
        assert max(asked, default=0) <= limit, f"max_new_tokens is {limit}; the engine was asked for {asked}"

    def test_a_partial_sample_is_continued(self) -> None:
        """Check that its tokens stay, count against the limit and all reach the engine; or that it begins again."""
        sample = self.sample()
        partial = CharTokenizer().encode("so far ")
        meta = {"finish_reason": {"type": "abort"}, "weight_version": "1"}
        sample.append_response_tokens(None, partial, [-0.1] * len(partial), meta_info=meta, text="so far ")
        before = list(sample.tokens)
        engine = ScriptedEngine(list(self.script))
        if self.plays_programs:
            again = self.generate(engine, sample)
            assert engine.requests[0].input_ids == again[0].prompt_tokens, "a run that begins again has no answer yet"
            assert all(not s.response.startswith("so far ") for s in again), "nothing is left of the first try"
            return
        for continued in self.generate(engine, sample):
            assert continued.tokens[: len(before)] == before, "the tokens so far are kept"
            assert continued.status in TERMINAL, f"the sample is not finished: {continued.status!r}"
            assert continued.response.startswith("so far "), f"the text so far is kept; found {continued.response!r}"
        first = engine.requests[0]
        assert first.input_ids == before, "the engine is given prompt and response so far, to go on from there"
        room, asked = self.max_new_tokens - len(partial), first.sampling_params["max_new_tokens"]
        assert asked == room, f"{len(partial)} of {self.max_new_tokens} tokens are used: ask for {room}, not {asked}"

    def test_no_room_left(self) -> None:
        """Check that a response at the maximum length is TRUNCATED without an engine call."""
        sample = self.sample()
        if self.plays_programs:
            engine = ScriptedEngine([])
            (result,) = self.generate(engine, sample, {"max_new_tokens": 0, "temperature": 1.0})
            assert result.status == SampleStatus.FAILED, f"no answer at all is FAILED; found {result.status!r}"
            assert engine.requests == [], "the engine was asked for 0 tokens"
            return
        sample.append_response_tokens(None, [9] * 4, [-0.1] * 4)
        engine = ScriptedEngine([])
        (result,) = self.generate(engine, sample, {"max_new_tokens": 4, "temperature": 1.0})
        assert result.status == SampleStatus.TRUNCATED, f"no room left is TRUNCATED; found {result.status!r}"
        assert result.response_length == 4, f"the response had 4 tokens, now {result.response_length}"
        assert engine.requests == [], "the engine was asked for 0 tokens"

    def test_an_abort_ends_it(self) -> None:
        """Check that the tokens so far are kept, if the generator can resume, and that no engine call follows."""
        engine = ScriptedEngine([Reply("so ", finish="abort")])
        kept = 0 if self.plays_programs else 3
        for sample in self.generate(engine):
            assert sample.status == SampleStatus.ABORTED, f"the engine aborted; the sample says {sample.status!r}"
            assert sample.response_length == kept, (
                f"{kept} tokens are kept of the 3 before the abort; the response has {sample.response_length}"
            )
        assert len(engine.requests) == 1, "after an abort the engine is not asked again"

    def test_an_engine_error_is_not_hidden(self) -> None:
        """Check that the error is raised, or the sample is FAILED."""
        engine = ScriptedEngine([EngineError("out of memory")])
        try:
            results = self.generate(engine)
        except EngineError:
            return
        found = {sample.status for sample in results}
        assert found <= {SampleStatus.FAILED}, f"the engine failed; raise, or set FAILED. The samples say {found}"

    def test_sampling_params_are_left_alone(self) -> None:
        """Check that sampling parameters are not changed: the samples of a group share them."""
        params = {"max_new_tokens": self.max_new_tokens, "temperature": 0.7, "stop": ["\n"]}
        before = {**params, "stop": ["\n"]}
        self.generate(ScriptedEngine(list(self.script)), params=params)
        assert params == before, f"sampling_params are shared by the group: copy before changing; now {params}"

    def test_sampling_params_reach_the_engine(self) -> None:
        """Check that all of them except the token limit reach every engine call unchanged."""
        engine = ScriptedEngine(list(self.script))
        self.generate(engine, params={"max_new_tokens": self.max_new_tokens, "temperature": 0.7, "top_p": 0.9})
        assert engine.requests, "the engine was not asked"
        for request in engine.requests:
            assert request.sampling_params["temperature"] == pytest.approx(0.7)
            assert request.sampling_params["top_p"] == pytest.approx(0.9)
