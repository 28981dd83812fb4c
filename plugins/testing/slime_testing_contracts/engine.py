"""The contract of rollout engines: sampled tokens, their metadata, pause and resume, abort, and new weights.

One suite for engines of every kind: in this process, behind HTTP, behind a router. An engine must be paused, aborted or
up to date when the call returns, so no test sleeps; every wait has a deadline.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_core.errors import SlimeError
from slime_core.protocols import EngineTraits, traits_of
from slime_core.sample import GenerationOutput, Sample
from slime_testing_contracts.engine_case import GREEDY, PROMPT, SAMPLED
from slime_testing_contracts.engine_control import EngineControl
from slime_testing_contracts.engine_sampling import EngineSampling
from slime_testing_contracts.engine_weights import NEW, EngineWeights
from slime_testing_contracts.tiny import tiny_moe_model


class EngineContract(EngineWeights, EngineControl, EngineSampling):
    """Tokens have right log-probs and weight versions; abort, pause and new weights work while requests run.

    The tests in this class run last, and in this order, because they leave no usable engine for other tests.
    """

    def test_start_and_stop(self) -> None:
        """Check that both are safe twice, that no call works after `stop`, and all do after `start` ("restart")."""

        async def use(engine: Any) -> tuple[GenerationOutput | None, GenerationOutput | BaseException]:
            await engine.start()  # runs already
            running = asyncio.ensure_future(engine.generate(PROMPT, self.long))
            await self.until(engine, 1)
            await engine.stop()
            left = (await asyncio.gather(running, return_exceptions=True))[0]
            await engine.stop()
            with pytest.raises(SlimeError):
                await engine.generate(PROMPT, SAMPLED)
            if "restart" in self.lacking:
                return None, left
            await engine.start()
            return await engine.generate(PROMPT, SAMPLED), left

        again, left = self.run_long(use)
        if isinstance(left, GenerationOutput):
            self.check_parity(PROMPT, left, self.long)
        else:
            assert isinstance(left, SlimeError), f"a request under way ends with {left!r}; with slime's errors, please"
        if again is None:
            self._hosted.engine = None
        else:
            self._hosted.version = 0
            self.check_parity(PROMPT, again, SAMPLED)

    def run_long(self, use: Any) -> Any:
        """Like `run`, with additional time for a start."""
        deadline, type(self).deadline = self.deadline, self.deadline + self.start_deadline
        try:
            return self.run(use)
        finally:
            type(self).deadline = deadline

    @pytest.mark.parametrize("wrong", ["name", "shape"])
    def test_weights_that_do_not_fit_are_refused(self, wrong: str) -> None:
        """Check for slime's errors; old weights still serve, or nothing serves until a restart ("old_weights")."""
        if wrong == "name":
            self.need("unknown_weights")
        others = {"no.such.weight": torch.zeros(2)} if wrong == "name" else {"model.norm.weight": torch.ones(7)}

        async def use(engine: Any) -> None:
            before = await engine.generate(PROMPT, GREEDY)
            with pytest.raises(SlimeError):
                await self.push(engine, engine.weight_transports[0], NEW, others)
            if "old_weights" not in self.lacking:
                assert (await engine.generate(PROMPT, GREEDY)).token_ids == before.token_ids
                self.check_parity(PROMPT, await engine.generate(PROMPT, SAMPLED), SAMPLED)
                return
            task = asyncio.ensure_future(engine.generate(PROMPT, SAMPLED))
            await asyncio.wait({task}, timeout=2.0)
            if not task.done():
                task.cancel()
            found = (await asyncio.gather(task, return_exceptions=True))[0]
            held = isinstance(found, SlimeError | asyncio.CancelledError)
            assert held, f"it answers with weights that it refused, or a part of them: {found!r}"

        self.run(use)
        if "old_weights" in self.lacking:
            self._hosted.discard(self.start_deadline)

    def test_reported_experts_are_those_used(self) -> None:
        """Check the experts of every token but the last, prompt included; skip engines without mixtures of experts."""
        from slime_embedded.models.decoder import Decoder
        from slime_embedded.models.routing import Routing

        from slime_core.models.config import load_model_config
        from slime_core.models.hf_io import read_weights

        if not traits_of(self.resolved.obj, EngineTraits).returns_routed_experts:
            pytest.skip("its traits do not say `returns_routed_experts`")
        checkpoint = tiny_moe_model(dense_layer=False)
        replaced = {"hf_checkpoint": str(checkpoint), "use_rollout_routing_replay": True}
        settings = self.settings.model_copy(update=replaced)

        async def twice(engine: Any) -> list[Sample]:
            if Path(str((await engine.info()).get("model_path"))).resolve() != checkpoint.resolve():
                pytest.skip("it serves a model of its own choice")
            samples = [Sample(tokens=PROMPT * 5) for _ in range(2)]
            for sample in samples:  # the second finds the prompt in the cache
                output = await engine.generate(sample.tokens, SAMPLED)
                ids, log_probs = output.token_ids, output.log_probs
                sample.append_response_tokens(settings, ids, log_probs, meta_info=output.meta_info)
            return samples

        decoder = Decoder.from_weights(load_model_config(checkpoint), read_weights(checkpoint))
        for sample in self.run_apart(twice, settings):
            found = sample.rollout_routed_experts
            assert found is not None, 'meta_info has no "routed_experts" under --use-rollout-routing-replay'
            routing, ids = Routing(None), torch.tensor(sample.tokens)
            with torch.no_grad():
                decoder.hidden(ids, [len(ids)], routing=routing)
            expected = routing.used(len(ids), 3, 2)[:-1].sort(-1).values
            same = (torch.tensor(np.asarray(found).copy()).sort(-1).values == expected).all(-1)
            assert same.float().mean() >= 0.95, f"{int((~same).sum())} of {same.numel()} (token, layer) pairs differ"
