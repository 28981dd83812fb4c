"""Contract of engines: sampled tokens, their log-probs and metadata, and stop rules."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from slime_core.errors import SlimeError
from slime_core.sample import GenerationOutput
from slime_testing_contracts import engine_reference as reference
from slime_testing_contracts.engine_case import CUT, GREEDY, PROMPT, SAMPLED, EngineCase

EOS = 1
"""End-of-sequence token of the tiny model."""
BAD_REQUESTS: list[tuple[Any, Mapping[str, Any]]] = [
    ([], {}),
    ([5, 10**6], {}),
    ([5, -1], {}),
    ([5], {"temprature": 1.0}),
    ([5], {"temperature": "hot"}),
    ([5], {"temperature": -1.0}),
    ([5], {"max_new_tokens": "many"}),
    ([5], {"max_new_tokens": -1}),
    ([5], {"top_p": 7}),
    ([5], {"top_k": 0.5}),
    ([5], {"stop": 3}),
    ([5], {"stop_token_ids": ["x"]}),
    ([5], {"ignore_eos": "maybe"}),
]


class EngineSampling(EngineCase):
    """Tests of correct log-probs, stop rules, streams, concurrent requests and invalid requests."""

    @pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
    def test_log_probs_are_those_of_transformers(self, temperature: float) -> None:
        """Check log-probs of the temperature-scaled distribution, and the number of tokens."""
        params = {**SAMPLED, "temperature": temperature}
        output = self.run(lambda engine: engine.generate(PROMPT, params))
        self.check_parity(PROMPT, output, params)
        assert len(output.token_ids) == 8, f"with ignore_eos the answer has 8 tokens; found {len(output.token_ids)}"
        assert self.finish(output) == CUT, f"reaching max_new_tokens is {CUT!r}; found {self.finish(output)!r}"

    def test_greedy_answers_take_the_most_likely_token(self) -> None:
        """Check that temperature 0 gives the same tokens in every call."""

        async def twice(engine: Any) -> list[GenerationOutput]:
            return [await engine.generate(PROMPT, {**GREEDY, "max_new_tokens": 24}) for _ in range(2)]

        first, second = self.run(twice)
        self.check(first, 24)  # the engine chooses the log-prob of a greedy token
        assert first.token_ids == second.token_ids, f"two greedy answers differ: {first} and {second}"
        found = reference.distributions(PROMPT, first.token_ids)
        chosen = found.gather(1, torch.tensor(first.token_ids)[:, None])[:, 0]
        short = (found.max(dim=-1).values - chosen).max().item()
        assert short <= self.tolerance, f"a token is {short:.2g} nats less likely than the most likely one"

    def test_company_changes_nothing(self) -> None:
        """Check that eight concurrent requests give the same results as sequential requests."""
        prompts = [[*PROMPT[: 2 + i % 4], 30 + i] for i in range(8)]

        async def both(engine: Any) -> tuple[list[list[int]], list[list[int]]]:
            together = await asyncio.gather(*(engine.generate(p, GREEDY) for p in prompts))
            apart = [await engine.generate(p, GREEDY) for p in prompts]
            return [o.token_ids for o in together], [o.token_ids for o in apart]

        together, apart = self.run(both)
        assert together == apart, "greedy answers to requests at once differ from those one after the other"

    def test_many_requests_at_once(self) -> None:
        """Check that each of 64 requests has log-probs of its own prompt and temperature."""
        prompts = [[20 + i, *PROMPT, 100 + i][: 3 + i % 5] for i in range(64)]
        params = [{**SAMPLED, "temperature": 0.7 + 0.1 * (i % 5), "max_new_tokens": 2 + i % 7} for i in range(64)]

        async def all_of_them(engine: Any) -> list[GenerationOutput]:
            calls = (
                engine.generate(prompt, given, session_id=f"session-{i % 5}")
                for i, (prompt, given) in enumerate(zip(prompts, params))
            )
            return list(await asyncio.gather(*calls))

        outputs = self.run(all_of_them)
        for prompt, given, output in zip(prompts, params, outputs):
            self.check_parity(prompt, output, given)
            assert len(output.token_ids) == given["max_new_tokens"]
        swapped = self.gap(prompts[1], outputs[0], temperature=params[0]["temperature"])
        assert swapped > self.tolerance, "log-probs do not depend on the prompt: this test shows nothing"

    # -- where an answer ends --------------------------------------------------------------------------

    @pytest.mark.parametrize("limit", [0, 1])
    def test_the_shortest_answers(self, limit: int) -> None:
        """Check responses of no token and of one token."""
        output = self.run(lambda engine: engine.generate(PROMPT, {**SAMPLED, "max_new_tokens": limit}))
        self.check(output, limit)
        assert (len(output.token_ids), self.finish(output)) == (limit, CUT)

    @pytest.mark.parametrize("ignore", [False, True], ids=["eos", "ignore_eos"])
    def test_the_end_token_ends_an_answer(self, ignore: bool) -> None:
        """Check that EOS is the last token, with finish reason "stop", unless `ignore_eos` is set."""
        params = {"temperature": 2.0, "max_new_tokens": 32, "ignore_eos": ignore}

        async def until_there_is_one(engine: Any) -> list[GenerationOutput]:
            found: list[GenerationOutput] = []
            while not any(EOS in output.token_ids[:-1] if ignore else EOS in output.token_ids for output in found):
                found += await asyncio.gather(*(engine.generate([*PROMPT, 40 + i], params) for i in range(16)))
            return found

        for output in self.run(until_there_is_one):
            self.check(output, 32)
            if ignore:
                assert (len(output.token_ids), self.finish(output)) == (32, CUT), "the end token ended it"
                continue
            assert EOS not in output.token_ids[:-1], f"it goes on after the end token: {output.token_ids}"
            ended = bool(output.token_ids) and output.token_ids[-1] == EOS
            assert self.finish(output) == ("stop" if ended else CUT), f"{output.token_ids}: {self.finish(output)}"

    def test_a_stop_token_ends_the_answer(self) -> None:
        """Check that the finish reason is "stop"."""

        async def use(engine: Any) -> tuple[GenerationOutput, GenerationOutput]:
            free = await engine.generate(PROMPT, GREEDY)
            stop = {**GREEDY, "stop_token_ids": [free.token_ids[2]], "ignore_eos": False}
            return free, await engine.generate(PROMPT, stop)

        free, stopped = self.run(use)
        end = free.token_ids.index(free.token_ids[2])
        assert stopped.token_ids == free.token_ids[: end + 1], (
            f"stop token {free.token_ids[2]}: expected {free.token_ids[: end + 1]}, found {stopped.token_ids}"
        )
        assert self.finish(stopped) == "stop", stopped.meta_info["finish_reason"]

    def test_no_stop_before_min_new_tokens(self) -> None:
        """Stop tokens are not sampled before."""
        self.need("min_new_tokens")

        async def use(engine: Any) -> tuple[int, GenerationOutput]:
            free = await engine.generate(PROMPT, GREEDY)
            stop = {**GREEDY, "stop_token_ids": [free.token_ids[0]], "ignore_eos": False, "min_new_tokens": 5}
            return free.token_ids[0], await engine.generate(PROMPT, stop)

        banned, output = self.run(use)
        assert len(output.token_ids) >= 5, f"min_new_tokens is 5; the answer has {len(output.token_ids)} tokens"
        assert banned not in output.token_ids[:5], f"stop token {banned} within the first 5 of {output.token_ids}"

    @pytest.mark.parametrize("kept", [False, True], ids=["trimmed", "no_stop_trim"])
    def test_a_stop_string_ends_the_answer(self, kept: bool) -> None:
        """Check that the tokens keep the stop string, and the text only with `no_stop_trim`."""
        self.need("text", "stop_strings")
        tokenizer = reference.tokenizer()

        async def use(engine: Any) -> tuple[list[int], str, GenerationOutput]:
            for first in range(30, 200):
                prompt = [*PROMPT, first]
                free = await engine.generate(prompt, GREEDY)
                words = [tokenizer.decode([token]) for token in free.token_ids]
                plain = [i for i, word in enumerate(words) if i and word.isascii() and word.isalnum()]
                ends = [i for i in plain if words[i] not in words[:i]]
                if ends:
                    break
            stop = {**GREEDY, "ignore_eos": False, "stop": [words[ends[0]]], "no_stop_trim": kept}
            return free.token_ids[: ends[0] + 1], words[ends[0]], await engine.generate(prompt, stop)

        expected, word, output = self.run(use)
        assert (output.token_ids, self.finish(output)) == (expected, "stop"), f"stop string {word!r}"
        text = tokenizer.decode(expected if kept else expected[:-1], skip_special_tokens=True)
        assert output.text == text, f"stop string {word!r}: the text is {output.text!r}, expected {text!r}"

    @pytest.mark.parametrize("skip", [False, True], ids=["specials", "skip_special_tokens"])
    def test_the_text_is_that_of_the_tokens(self, skip: bool) -> None:
        """Check the text with and without special tokens."""
        self.need("text")
        params = {"temperature": 1.5, "max_new_tokens": 24, "ignore_eos": True, "skip_special_tokens": skip}

        async def use(engine: Any) -> list[GenerationOutput]:
            found: list[GenerationOutput] = []
            while not any({0, EOS} & set(output.token_ids) for output in found):
                calls = (engine.generate([*PROMPT, 40 + i], {**params, "no_stop_trim": True}) for i in range(16))
                found += await asyncio.gather(*calls)
            return found

        for output in self.run(use):
            expected = reference.tokenizer().decode(output.token_ids, skip_special_tokens=skip)
            assert output.text == expected, f"{output.token_ids} are {expected!r}; the text is {output.text!r}"

    # -- sampling parameters ---------------------------------------------------------------------------

    @pytest.mark.parametrize(("key", "value"), [("top_k", 1), ("top_k", 3), ("top_p", 0.1), ("top_p", 0.5)])
    def test_filters_keep_to_the_likely_tokens(self, key: str, value: float) -> None:
        """Check that top_k samples from the k most likely tokens, and that more likely tokens have less than top_p."""
        self.need("filters")
        params = {**SAMPLED, "temperature": 1.0, "max_new_tokens": 16, key: value}
        prompts = [[*PROMPT, 50 + i] for i in range(8)]

        async def use(engine: Any) -> list[GenerationOutput]:
            return list(await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts)))

        for prompt, output in zip(prompts, self.run(use), strict=True):
            self.check(output, 16)
            found = reference.distributions(prompt, output.token_ids)
            own = found.gather(1, torch.tensor(output.token_ids)[:, None])
            better = found > own + self.tolerance
            seen = better.sum(-1) if key == "top_k" else (found.exp() * better).sum(-1)
            assert (seen < value + (0 if key == "top_k" else 1e-3)).all(), f"{key}={value}: {seen.tolist()}"

    def test_a_seed_repeats_an_answer(self) -> None:
        """Check that a seed repeats a response, independent of concurrent requests."""
        self.need("seeds")
        params = {**SAMPLED, "sampling_seed": 5}

        async def use(engine: Any) -> list[list[int]]:
            alone = await engine.generate(PROMPT, params)
            others = (engine.generate([*PROMPT, 40 + i], SAMPLED) for i in range(4))
            again, *_ = await asyncio.gather(engine.generate(PROMPT, params), *others)
            other = await engine.generate(PROMPT, {**params, "sampling_seed": 6})
            return [output.token_ids for output in (alone, again, other)]

        alone, again, other = self.run(use)
        assert alone == again, f"equal seeds, different answers: {alone} and {again}"
        assert alone != other, f"different seeds, equal answers: {alone}"

    def test_a_session_is_taken_note_of_or_ignored(self) -> None:
        """Check that `session_id` does not change a response."""

        async def use(engine: Any) -> list[list[int]]:
            calls = [await engine.generate(PROMPT, GREEDY, session_id=s) for s in ("a", "a", "session/ 2", None)]
            return [output.token_ids for output in calls]

        first, *others = self.run(use)
        assert others == [first] * 3

    # -- requests that are refused ---------------------------------------------------------------------

    def test_bad_requests_are_refused(self) -> None:
        """Check that slime's errors are raised at once, and that concurrent and later requests are unaffected."""

        async def use(engine: Any) -> tuple[GenerationOutput, GenerationOutput, list[str]]:
            good = asyncio.ensure_future(engine.generate(PROMPT, {**SAMPLED, "max_new_tokens": 64}))
            limit = int((await engine.info())["max_context_length"])
            wrong = []
            for ids, params in [*BAD_REQUESTS, ([3] * (limit + 1), {})]:
                shown = f"generate({ids if len(ids) < 9 else f'{len(ids)} tokens'}, {params})"
                try:
                    answer = await asyncio.wait_for(engine.generate(ids, {"max_new_tokens": 1, **params}), 20)
                    wrong.append(f"{shown} is answered: {answer.token_ids}")
                except SlimeError as error:
                    if not str(error):
                        wrong.append(f"{shown}: no reason is given")
                except Exception as error:
                    wrong.append(f"{shown}: {type(error).__name__}: {error}")
            return await good, await engine.generate(PROMPT, SAMPLED), wrong

        good, after, wrong = self.run(use)
        assert not wrong, "a bad request raises EngineError; " + "; ".join(wrong)
        self.check_parity(PROMPT, good, {**SAMPLED, "max_new_tokens": 64})
        assert len(good.token_ids) == 64
        self.check_parity(PROMPT, after, SAMPLED)
