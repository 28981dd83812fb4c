"""`slime.rollout.sglang_streaming_rollout.generate_streaming`: `sglang_rollout.generate` over a stream of events.

    --custom-generate-function-path slime.rollout.sglang_streaming_rollout.generate_streaming

What was sampled is with the sample however the stream ends: at an abort nothing has to be asked for. SGLang's events
are cumulative, so only the last one counts.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from slime import _missing
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.rollout._state import GenerateState, router_url
from slime.utils.http_utils import stream_events
from slime_core.errors import EngineError
from slime_core.sample import Sample, SampleStatus


async def generate_streaming(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Continue `sample.tokens` as `generate` does; ABORTED with what there is once `GenerateState.aborted` is set.

    Raises:
        aiohttp.ClientError, TimeoutError: The engine refused, or the connection broke.
        slime_core.errors.EngineError: It said that it failed.
    """
    state = GenerateState(args)
    state.encode(sample)
    room = int(sampling_params["max_new_tokens"]) - sample.response_length
    if room <= 0:
        sample.status = SampleStatus.TRUNCATED
        return sample
    params = {**state.seeded(sample, sampling_params), "max_new_tokens": room}
    body = {"input_ids": list(sample.tokens), "sampling_params": params, "return_logprob": True, "stream": True}
    headers = None if sample.session_id is None else {"X-SMG-Routing-Key": sample.session_id}
    newest: dict[str, Any] = {"text": "", "meta_info": {}}
    with trace_span(sample, "sglang_generate_stream", attrs={"max_new_tokens": room}) as span:
        try:
            async with aclosing(stream_events(router_url(args) + "/generate", body, headers=headers)) as events:
                async for event in events:
                    if "error" in event:
                        raise EngineError(f"the engine ended its stream: {str(event['error'])[:300]}")
                    newest = event
                    if state.aborted:
                        break
        finally:
            _take(args, sample, newest)
        if newest["meta_info"].get("finish_reason"):
            span.update(build_sglang_meta_trace_attrs(newest["meta_info"]))
        else:
            sample.status = SampleStatus.ABORTED
    return sample


def _take(args: Any, sample: Sample, newest: dict[str, Any]) -> None:
    """Append what the newest event has."""
    meta = dict(newest["meta_info"])
    entries = meta.pop("output_token_logprobs", None) or []
    sample.append_response_tokens(
        args, [int(e[1]) for e in entries], [float(e[0]) for e in entries], meta_info=meta, text=newest["text"]
    )


__all__ = ["generate_streaming"]
__getattr__ = _missing.names(__name__)
