"""Engines: streams, aborts, pauses and the cache, while requests run."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from typing import Any

import pytest

from slime_core.errors import SlimeError
from slime_core.protocols import EngineTraits, traits_of
from slime_core.sample import GenerationOutput
from slime_testing_contracts import engine_reference as reference
from slime_testing_contracts.engine_case import CUT, GREEDY, LOOKS, PROMPT, SAMPLED, EngineCase

PROMPTS = [[*PROMPT, 60 + i] for i in range(4)]


class EngineControl(EngineCase):
    """The contract for running requests: streams, aborts, pauses and the cache."""

    # -- streams ---------------------------------------------------------------------------------------

    def test_a_stream_tells_everything_so_far(self) -> None:
        """Check that each piece begins with the previous one and that the last is the whole answer.

        Skipped if the engine has no method `stream`.
        """
        self.need_stream()
        params = {**SAMPLED, "max_new_tokens": 24}

        async def use(engine: Any) -> tuple[list[GenerationOutput], list[GenerationOutput], GenerationOutput]:
            pieces = [piece async for piece in engine.stream(PROMPT, params, session_id="session")]
            greedy = [piece async for piece in engine.stream(PROMPT, GREEDY)]
            return pieces, greedy, await engine.generate(PROMPT, GREEDY)

        pieces, greedy, whole = self.run(use)
        assert len(pieces) > 2, f"24 tokens in {len(pieces)} pieces"
        for before, after in itertools.pairwise(pieces):
            count = len(before.token_ids)
            assert after.token_ids[:count] == before.token_ids, "a piece does not begin with the one before"
            assert after.log_probs[:count] == pytest.approx(before.log_probs)
            assert not before.meta_info.get("finish_reason"), "a piece before the last has a finish reason"
        self.check_parity(PROMPT, pieces[-1], params)
        assert (len(pieces[-1].token_ids), self.finish(pieces[-1])) == (24, CUT)
        assert (greedy[-1].token_ids, greedy[-1].text) == (whole.token_ids, whole.text)

    def test_a_stream_can_be_left_and_aborted(self) -> None:
        """Check that leaving a stream ends its request, and that the last piece of an aborted stream has its tokens."""
        self.need_stream()

        async def use(engine: Any) -> GenerationOutput:
            async with aclosing(engine.stream(PROMPTS[0], self.long)) as pieces:
                async for piece in pieces:
                    if piece.token_ids:
                        break
            await self.until(engine, 0)
            name = self.name()
            last: GenerationOutput | None = None
            async for piece in engine.stream(PROMPTS[1], self.long, rid=name):
                if last is None:
                    await engine.abort(name)
                last = piece
            await self.until(engine, 0)
            assert last is not None
            return last

        output = self.run(use)
        assert self.finish(output) == "abort"
        assert 0 < len(output.token_ids) < self.long_answer
        self.check_parity(PROMPTS[1], output, self.long)

    def need_stream(self) -> None:
        """Skip the test if the engine's class has no method `stream`."""
        if not hasattr(self.resolved.obj, "stream"):
            pytest.skip("its class has no `stream`")

    # -- aborts ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("everything", [False, True], ids=["one", "all"])
    def test_abort_ends_with_what_there_is(self, everything: bool) -> None:
        """Check that aborted requests (one or all) keep their tokens and can be continued; others are answered."""
        names = [self.name() for _ in range(4)]

        async def use(engine: Any) -> tuple[list[GenerationOutput], GenerationOutput]:
            tasks = await self.in_the_middle(engine, PROMPTS, names)
            await engine.abort(None if everything else names[0])
            outputs = list(await asyncio.gather(*tasks))
            partial = outputs[0].token_ids
            rest = {**self.long, "max_new_tokens": self.long_answer - len(partial)}
            return outputs, await engine.generate([*PROMPTS[0], *partial], rest)

        (aborted, *others), continued = self.run(use)
        self.check_parity(PROMPTS[0], aborted, self.long)
        assert self.finish(aborted) == "abort", aborted.meta_info["finish_reason"]
        count = len(aborted.token_ids)
        assert 0 < count < self.long_answer, f"a request that was aborted in the middle has {count} tokens"
        for prompt, other in zip(PROMPTS[1:], others):
            self.check_parity(prompt, other, self.long)
            assert self.finish(other) == ("abort" if everything else CUT), other.meta_info["finish_reason"]
            assert everything or len(other.token_ids) == self.long_answer
        assert count + len(continued.token_ids) == self.long_answer
        self.check_parity([*PROMPTS[0], *aborted.token_ids], continued, self.long)

    def test_abort_takes_whole_names(self) -> None:
        """Check that an abort spares a request whose name only begins with its name, and ignores an unknown name."""
        self.need("names")
        name = self.name()

        async def use(engine: Any) -> list[GenerationOutput]:
            tasks = await self.in_the_middle(engine, PROMPTS[:2], [name, f"{name}0"])
            await engine.abort("nobody has this name")
            await engine.abort(name)
            return list(await asyncio.gather(*tasks))

        assert [self.finish(output) for output in self.run(use)] == ["abort", CUT]

    def test_nobody_waits_for_a_cancelled_request(self) -> None:
        """Check that a cancelled request ends in the engine while another continues.

        Tried several times, since on a busy machine the other request may end before it is observed.
        """

        async def use(engine: Any) -> GenerationOutput:
            for _ in range(LOOKS):
                cancelled, other = await self.in_the_middle(engine, PROMPTS[:2], [self.name(), self.name()])
                cancelled.cancel()
                if await self.runs_alone(engine, other):
                    break
                await self.until(engine, 0)
            else:
                raise AssertionError("a cancelled request was not seen to end before another one of its length")
            await engine.abort()
            await self.until(engine, 0)
            return await other

        assert self.finish(self.run(use)) == "abort"

    @staticmethod
    async def runs_alone(engine: Any, task: asyncio.Task[GenerationOutput]) -> bool:
        """Return whether all other requests end before this request."""
        while not task.done():
            info = await engine.info()
            if info["num_running"] + info["num_waiting"] == 1:
                return not task.done()
            await asyncio.sleep(0.005)
        return False

    # -- pauses ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
    def test_pause_holds_and_resume_goes_on(self, mode: str) -> None:
        """Check each of `pause_modes`: running requests stop or end, new requests wait, and all are answered."""
        if mode not in traits_of(self.resolved.obj, EngineTraits).pause_modes:
            pytest.skip(f"its `pause_modes` has no {mode!r}")

        async def use(engine: Any) -> tuple[list[GenerationOutput], GenerationOutput]:
            running = await self.in_the_middle(engine, PROMPTS[:2], [self.name(), self.name()])
            await engine.pause(mode)
            waiting = asyncio.ensure_future(engine.generate(PROMPT, SAMPLED))
            held = {waiting} | (set() if mode == "abort" else set(running))
            if mode == "abort":
                await asyncio.gather(*running)
            done, _ = await asyncio.wait(held, timeout=0.3)
            assert not done, "the engine answered while it was paused"
            await engine.info()
            await engine.resume()
            return list(await asyncio.gather(*running)), await waiting

        outputs, waited = self.run(use)
        for prompt, output in zip(PROMPTS, outputs):
            assert self.finish(output) == ("abort" if mode == "abort" else CUT), output.meta_info["finish_reason"]
            self.check_parity(prompt, output, self.long)
        self.check_parity(PROMPT, waited, SAMPLED)
        assert len(waited.token_ids) == 8

    def test_an_unknown_pause_is_refused(self) -> None:
        """Check that an unknown pause mode raises and pauses nothing."""

        async def use(engine: Any) -> GenerationOutput:
            with pytest.raises(SlimeError):
                await engine.pause("for_a_while")
            answer: GenerationOutput = await engine.generate(PROMPT, SAMPLED)
            return answer

        self.check_parity(PROMPT, self.run(use), SAMPLED)

    def test_a_request_that_waits_can_be_aborted(self) -> None:
        """Check that a waiting request that is aborted has no tokens, and that the next request is answered."""
        name = self.name()

        async def use(engine: Any) -> tuple[GenerationOutput, GenerationOutput]:
            await engine.pause()
            waiting = asyncio.ensure_future(engine.generate(PROMPT, self.long, rid=name))
            done, _ = await asyncio.wait({waiting}, timeout=0.3)
            assert not done, "the engine answered while it was paused"
            await engine.abort(name)
            await engine.resume()
            return await waiting, await engine.generate(PROMPT, SAMPLED)

        aborted, after = self.run(use)
        assert self.finish(aborted) == "abort"
        self.check_parity(PROMPT, aborted, self.long)
        assert len(aborted.token_ids) < self.long_answer
        self.check_parity(PROMPT, after, SAMPLED)

    # -- the rest --------------------------------------------------------------------------------------

    def test_a_flushed_cache_is_empty(self) -> None:
        """Check that the first request after a flush finds no prefix (by `cached_tokens`, if given) and is answered."""
        prompt = PROMPT * 8

        async def use(engine: Any) -> list[GenerationOutput]:
            before = [await engine.generate(prompt, SAMPLED) for _ in range(2)]
            await engine.flush_cache()
            return [*before, await engine.generate(prompt, SAMPLED)]

        outputs = self.run(use)
        for output in outputs:
            self.check_parity(prompt, output, SAMPLED)
        assert outputs[-1].meta_info.get("cached_tokens", 0) == 0

    def test_what_it_says_of_itself(self) -> None:
        """Check that `info()` names the model and the load."""

        async def use(engine: Any) -> dict[str, Any]:
            await self.until(engine, 0)
            told: dict[str, Any] = await engine.info()
            tasks = await self.in_the_middle(engine, PROMPTS[:2], [self.name(), self.name()])  # `info()` counted both
            await engine.abort()
            await asyncio.gather(*tasks)
            await self.until(engine, 0)
            return told

        told = self.run(use)
        assert isinstance(told.get("model_path"), str), told.get("model_path")
        assert "weight_version" in told
        assert isinstance(told.get("max_context_length"), int), told.get("max_context_length")

    def test_its_address_answers_sglangs_api(self) -> None:
        """Check `/health`, and `/generate` in SGLang's format, which functions written for slime call."""
        self.need("http")
        import aiohttp

        body = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}

        async def use(engine: Any) -> tuple[GenerationOutput, int, Any, int]:
            host, port = await engine.address()
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            async with aiohttp.ClientSession() as session:
                async with session.get(f"{url}/health") as response:
                    health = response.status
                async with session.post(f"{url}/generate", json=body) as response:
                    assert response.status == 200, await response.text()
                    answer = await response.json()
                wrong = {**body, "sampling_params": {"top_p": 7}}
                async with session.post(f"{url}/generate", json=wrong) as response:
                    refused = response.status
            return await engine.generate(PROMPT, GREEDY), health, answer, refused

        output, health, answer, refused = self.run(use)
        assert health == 200
        assert 400 <= refused < 500, f"a bad request is answered with HTTP {refused}"
        meta = answer["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == output.token_ids
        assert [entry[0] for entry in meta["output_token_logprobs"]] == pytest.approx(output.log_probs, abs=1e-4)
        assert (meta["finish_reason"]["type"], meta["completion_tokens"]) == (CUT, 8)
        assert "weight_version" in meta
        if "text" not in self.lacking:
            assert answer["text"] == reference.tokenizer().decode(output.token_ids, skip_special_tokens=True)
