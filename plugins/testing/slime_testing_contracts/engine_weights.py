"""The contract of engines for new weights by every transport, while idle and while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from slime_core.sample import GenerationOutput
from slime_core.weights.sync import checksum_dtype, tensor_checksum
from slime_testing_contracts import engine_reference as reference
from slime_testing_contracts.engine_case import CUT, GREEDY, PROMPT, SAMPLED, EngineCase

NEW = 1.5
"""Factor from the tiny model's weights to the new weights."""


class EngineWeights(EngineCase):
    """The contract for weights: the engine serves the version that was pushed, by log-probs, readback and its name."""

    late_versions: ClassVar[int] = 0
    """Maximum number of tokens sampled before an update that may be reported with the version after it."""

    def test_new_weights_answer_from_then_on(self) -> None:
        """Check log-probs, version and readback after an update by each of `weight_transports`, and after the update
        back to the old weights."""

        async def transports(engine: Any) -> tuple[str, ...]:
            return tuple(engine.weight_transports)

        for transport in self.run(transports):
            self.new_weights_answer(transport)

    def new_weights_answer(self, transport: str) -> None:
        """Check new weights by one transport."""

        async def use(engine: Any) -> None:
            await engine.generate(PROMPT * 4, GREEDY)  # may leave a prefix in a cache
            for scale in (NEW, 1.0):
                version = await self.push(engine, transport, scale)
                told = str((await engine.info())["weight_version"])
                assert told == str(version), f"version {version} was pushed; info() says {told!r}"
                outputs = await asyncio.gather(*(engine.generate([*PROMPT * 4], SAMPLED) for _ in range(4)))
                for output in outputs:
                    self.check_parity(PROMPT * 4, output, SAMPLED, scale)
                    self.check_version(output, version)
                await self.read_back(engine, scale)

        self.run(use)

    def test_weights_change_under_a_running_request(self) -> None:
        """Check that tokens before an update have the old version and log-probs, and tokens after it the new ones.

        An engine that lacks "in_flight_updates" ends the request, and its tokens can be continued.
        """
        goes_on = "in_flight_updates" not in self.lacking

        async def use(engine: Any) -> tuple[int, int, GenerationOutput, GenerationOutput | None]:
            old = await self.push(engine, engine.weight_transports[0], 1.0)
            (task,) = await self.in_the_middle(engine, [PROMPT], [self.name()])
            await engine.pause("in_place")
            new = await self.push(engine, engine.weight_transports[0], NEW)
            await engine.resume()
            output = await task
            if goes_on:
                return old, new, output, None
            rest = {**self.long, "max_new_tokens": self.long_answer - len(output.token_ids)}
            return old, new, output, await engine.generate([*PROMPT, *output.token_ids], rest)

        old, new, output, continued = self.run(use)
        self.check(output, self.long_answer)
        versions = output.meta_info.get("token_weight_versions")
        assert versions is not None, 'meta_info has no "token_weight_versions"'
        kept = versions.count(old)
        assert kept, "no token has the old version: the update did not come in the middle"
        before = GenerationOutput(output.token_ids[:kept], output.log_probs[:kept], "", output.meta_info)
        assert self.gap(PROMPT, before, temperature=1.0) <= self.tolerance, "tokens before the update"
        if continued is not None:
            assert (versions, self.finish(output)) == ([old] * len(versions), "abort")
            assert continued.meta_info["token_weight_versions"] == [new] * len(continued.token_ids)
            self.check_parity([*PROMPT, *output.token_ids], continued, self.long, NEW)
            return
        assert versions == [old] * kept + [new] * (self.long_answer - kept), "versions go up once"
        assert self.finish(output) == CUT
        gaps = {late: self.gap_after(output, kept, late) for late in range(4)}
        fits = [late for late, gap in gaps.items() if gap <= self.tolerance]
        assert fits, f"log-probs after the update are off by {gaps[0]:.2g}"
        assert fits[0] <= self.late_versions, f"{fits[0]} tokens of the old weights are said to have the new version"

    def test_old_prefixes_are_not_met(self) -> None:
        """Check that a request after an update computes its prompt with the new weights, although an older request
        still runs, for which the engine may have kept its prefix cache."""
        prompt = PROMPT * 4

        async def use(engine: Any) -> list[GenerationOutput]:
            await self.push(engine, engine.weight_transports[0], 1.0)
            await engine.generate(prompt, GREEDY)  # leaves its prefix in the cache, where there is one
            (task,) = await self.in_the_middle(engine, [PROMPT], [self.name()])
            await engine.pause("in_place")
            await self.push(engine, engine.weight_transports[0], NEW)
            await engine.resume()
            outputs = [await engine.generate(prompt, SAMPLED) for _ in range(2)]
            await engine.abort()
            await task
            return outputs

        for output in self.run(use):
            self.check_parity(prompt, output, SAMPLED, NEW)

    def gap_after(self, output: GenerationOutput, kept: int, late: int) -> float:
        """Return the largest difference from the expected log-probs after the first `kept` tokens.

        Expected are the log-probs of the old weights for `late` tokens, then those of the new weights, over the keys
        and values of the old or of the new weights.
        """
        told = torch.tensor(output.log_probs, dtype=torch.float64)
        old = reference.log_probs(PROMPT, output.token_ids)[kept : kept + late]
        before = (told[kept : kept + late] - old).abs()
        kept += late
        ways = (
            reference.continued_log_probs(PROMPT, output.token_ids, kept, old=1.0, new=NEW),
            reference.log_probs(PROMPT, output.token_ids, scale=NEW)[kept:],
        )
        return min(torch.cat([before, (told[kept:] - way).abs()]).max().item() for way in ways)

    def test_memory_is_given_up_and_taken_again(self) -> None:
        """Check new weights between the two parts; requests wait meanwhile. Skipped without `release_memory`."""
        if not hasattr(self.resolved.obj, "release_memory"):
            pytest.skip("its class has no `release_memory`")

        async def use(engine: Any) -> list[GenerationOutput]:
            before = await engine.generate(PROMPT * 4, GREEDY)
            await engine.release_memory()
            waiting = asyncio.ensure_future(engine.generate(PROMPT * 4, GREEDY))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not waiting.done(), "it answers without its memory"
            await engine.resume_memory(["weights"])
            await self.push(engine, engine.weight_transports[0], 1.0)
            assert not waiting.done(), "it answers without its KV cache"
            await engine.resume_memory(["kv_cache"])
            return [before, await waiting, await engine.generate(PROMPT, SAMPLED)]

        before, waited, after = self.run(use)
        assert waited.token_ids == before.token_ids, "another answer of the same weights"
        self.check_parity(PROMPT * 4, waited, {**GREEDY, "temperature": 1.0})
        self.check_parity(PROMPT, after, SAMPLED)

    def test_what_it_started_with_is_read_back(self) -> None:
        """Check that the engine serves the checkpoint's tensors after the start."""
        self.need("readback")

        async def use(engine: Any) -> None:
            await self.read_back(engine, 1.0)

        self.run(use)

    async def read_back(self, engine: Any, scale: float) -> None:
        """Check that the engine serves the checkpoint's tensors times `scale`; skip an engine that lacks "readback"."""
        if "readback" in self.lacking:
            return
        if hasattr(engine, "differing_weights"):
            names = await engine.differing_weights(iter(reference.weights(scale).items()))
            assert not names, f"the engine does not serve what it was given: {', '.join(names[:5])}"
            return
        found: Mapping[str, str] = await engine.weight_checksums()
        expected = reference.weights(scale)
        differ = sorted(found.keys() ^ expected.keys())[:5]
        assert not differ, f"weight_checksums() names {differ} differently than the model"
        for name, tensor in expected.items():
            cast = tensor.to(checksum_dtype(found[name]))
            assert found[name] == tensor_checksum(cast), f"{name}: the engine does not serve what it was given"

    def check_version(self, output: GenerationOutput, version: int) -> None:
        """Check that all tokens of an answer have this weight version."""
        versions = output.meta_info.get("token_weight_versions")
        assert versions in (None, [version] * len(output.token_ids)), f"sampled with {version}; tokens say {versions}"
        assert str(output.meta_info["weight_version"]) == str(version), output.meta_info["weight_version"]
