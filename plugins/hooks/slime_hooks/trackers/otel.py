"""OpenTelemetry: a trace for each sample, its turns and tools, by the GenAI conventions.

::

    invoke_agent slime      began .. scored      rl.rollout, rl.group, rl.sample, rl.reward, ...
      chat MODEL            began .. generated   gen_ai.usage.*; one for each turn
      execute_tool          began .. generated   for each answer of a tool
      rl.reward             generated .. scored

Times are those of `trace.jsonl`, which has none of single turns: these lie between beginning and end of generation.
They go to the process's tracer provider where the program has set one, else by OTLP to `OTEL_EXPORTER_OTLP_ENDPOINT`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime_runs.timeline import FILE

from slime_core.errors import ConfigError
from slime_hooks.trackers.numbers import Rollout, Traced, Tracked
from slime_hooks.trackers.tail import Tail


class OpenTelemetry:
    """Tracker that reads the run's timeline as it grows and sends spans."""

    def __init__(self, run: Tracked) -> None:
        self._provider, self._own = provider()
        self._tracer = self._provider.get_tracer("slime")
        self._model = Path(str(run.args.hf_checkpoint)).name
        self._timeline, self._began = Tail(run.run_dir / FILE), run.began
        self._samples: dict[tuple[int, int | None], Traced] = {}

    def rollout(self, found: Rollout) -> None:
        """Remember the samples to which the timeline's next lines belong."""
        self._samples = {(found.step - 1, sample.index): sample for sample in found.samples}

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send spans of the samples that finished since the last call."""
        for event in self._timeline.new():
            if event["e"] == "sample" and event["t"][0] >= self._began:  # an earlier part of the run sent the others
                traced = self._samples.get((event["r"], event["i"])) if not event.get("ev") else None
                sample_spans(self._tracer, event, traced, self._model)

    def close(self) -> None:
        """Send the remaining spans."""
        self.metrics(0, {})
        if self._own:
            self._provider.shutdown()


def check(*, trace_kept: bool = True) -> None:
    """Raise ConfigError if times are not recorded, or no destination of spans is configured."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    if not trace_kept:
        raise ConfigError("plugins.trackers.use otel: times of samples are in trace.jsonl; remove --no-trace")
    told = any(os.environ.get(f"OTEL_EXPORTER_OTLP{part}_ENDPOINT") for part in ("", "_TRACES"))
    if not told and not isinstance(trace.get_tracer_provider(), TracerProvider):
        raise ConfigError(
            "plugins.trackers.use otel: nothing says where spans go; set OTEL_EXPORTER_OTLP_ENDPOINT=http://HOST:4318"
        )


def provider(processor: Callable[[Any], Any] | None = None) -> tuple[Any, bool]:
    """Return (tracer provider, whether it was created here); `processor` replaces the queue, which drops spans."""
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    found = trace.get_tracer_provider()
    if isinstance(found, TracerProvider):
        return found, False
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    made = TracerProvider(resource=Resource.create({"service.name": "slime"}))
    made.add_span_processor((processor or BatchSpanProcessor)(OTLPSpanExporter()))
    return made, True


def sample_spans(tracer: Any, event: Mapping[str, Any], sample: Traced | None, model: str) -> None:
    """Write the spans of a sample.

    Args:
        tracer: Of the provider they go to.
        event: Its line of `trace.jsonl`.
        sample: What is known besides; None of evaluations and dropped groups.
        model: Name of the model.
    """
    from opentelemetry import trace

    began, generated, scored = (int(t * 1e9) for t in event["t"])
    facts = {
        "gen_ai.operation.name": "invoke_agent",
        "rl.evaluation": bool(event.get("ev")),
        "rl.status": event["s"],
        **_known(rollout=event["r"], group=event["g"], sample=event["i"], weight_version=event.get("v")),
        **(_known(reward=sample.reward) if sample is not None else {}),
    }
    root = tracer.start_span("invoke_agent slime", start_time=began, attributes=facts)
    inside = trace.set_span_in_context(root)

    def child(name: str, start: int, end: int, attributes: Mapping[str, Any]) -> None:
        tracer.start_span(name, context=inside, start_time=start, attributes=attributes).end(end)

    prompt = event["p"]
    for turn in sample.turns if sample is not None else ():
        if turn.tool:
            child("execute_tool", began, generated, {"gen_ai.operation.name": "execute_tool"})
        else:
            child(f"chat {model}", began, generated, {**_chat(model, prompt, turn.tokens), **_text(sample)})
        prompt += turn.tokens
    if sample is None:
        child(f"chat {model}", began, generated, _chat(model, prompt, event["n"]))
    child("rl.reward", generated, scored, {})
    root.end(scored)


def _known(**facts: Any) -> dict[str, Any]:
    return {f"rl.{name}": value for name, value in facts.items() if value is not None}


def _chat(model: str, tokens_in: int, tokens_out: int) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "slime",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": tokens_in,
        "gen_ai.usage.output_tokens": tokens_out,
    }


def _text(sample: Traced | None) -> dict[str, str]:
    if sample is None or sample.text is None:
        return {}
    return {"gen_ai.input.messages": sample.text.prompt, "gen_ai.output.messages": sample.text.response}
