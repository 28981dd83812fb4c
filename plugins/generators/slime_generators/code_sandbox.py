"""Turns of model and Python: code at the end of a turn runs in a sandbox, and its output follows as untrained tokens.

::

    prompt | <code>x = 12*34\nprint(x)</code> | 408<|end|><|assistant|> | The answer is 408.<|end|>
    mask   | 1 ...                          1 | 0 ...                 0 | 1 ...                    1

Each sample has its own interpreter, whose names stay between turns (`slime_sandbox_local`). The interpreter is not part
of the sample. If a sample was interrupted, or another sample needed its sandbox, its earlier code runs again to restore
the interpreter's state.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field
from slime_sandbox_local import Call, InterpreterPool, SandboxLimits, check_settings, pool_of

from slime_core import Args, GenerateContext, GenerateTraits, PluginOptions, Sample, SampleStatus, declares, options
from slime_generators.multi_turn import Observations, begin_answer, next_turn

STATS = "tool_stats"
"""Key of the sample's metadata: {"python": counts and seconds}."""
HISTORY, PENDING = "code_history", "code_pending"
"""Keys of the sample's metadata: the code of each finished turn, None where the interpreter was restarted; the note of
`begin_answer` while code runs."""


class Options(PluginOptions):
    """`plugins: {code_sandbox: {...}}`; a row's metadata may override each."""

    code: Literal["tag", "fence"] = "tag"
    """Format of code: `<code>...</code>`, or a fenced block marked python."""
    max_turns: int = Field(4, ge=1)
    """Maximum turns of the model; a sample whose last turn is code is TRUNCATED."""
    timeout: float = Field(10.0, gt=0)
    """Maximum seconds for one piece of code."""
    output_tokens: int = Field(512, ge=1)
    """Maximum tokens of shown output; the rest is cut."""
    observation: str | None = None
    """Text around the output, with {result} in it; null: a message, by the tokenizer's chat template."""
    observation_role: str = "user"
    """Role of that message."""
    empty: str = "(no output)"
    """Text shown for code that prints nothing."""
    memory_mb: int = Field(1024, ge=64)
    """Memory of a sandbox in MB."""
    disk_mb: int = Field(64, ge=1)
    """Total size of files that a sandbox may write, in MB of memory."""
    processes: int = Field(16, ge=1)
    """Maximum number of processes and threads at a time."""
    network: bool = False
    """Allow code to use the network."""


_BLOCKS = {
    "tag": re.compile(r"<code>((?:(?!<code>).)*)</code>\s*(?:<[^<>]*>)?\s*\Z", re.DOTALL),
    "fence": re.compile(r"```[ \t]*(?:python3?|py)[^\n]*\n((?:(?!```).)*?)```\s*(?:<[^<>]*>)?\s*\Z", re.DOTALL),
}
"""Code ends the turn; at most the tokenizer's end-of-turn token follows it."""
_STOPS = {"tag": "</code>", "fence": "```\n"}


@declares(GenerateTraits(check=check_settings))
async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext) -> Sample:
    """Alternate model and interpreter until the model answers without code.

    `max_new_tokens` counts observations too. The sample is TRUNCATED when tokens or turns run out.

    Raises:
        ValueError: The sample has no prompt tokens.
        DataError: The observation cannot be rendered.
        SandboxError: No sandbox could be started.
        EngineError: The engine refused the request or stopped responding.
    """
    own = _options(args, sample)
    observations = Observations(args, sample, context.tokenizer, template=own.observation, role=own.observation_role)
    limits = SandboxLimits(
        memory_mb=own.memory_mb, disk_mb=own.disk_mb, processes=own.processes, network=own.network,
        file_mb=min(own.disk_mb, 16),
    )  # fmt: skip
    pool, key = pool_of(args, limits), object()
    try:
        return await _converse(args, sample, sampling_params, context, own, observations, pool, key)
    finally:
        await pool.drop(key)


async def _converse(
    args: Args, sample: Sample, sampling_params: dict[str, Any], context: GenerateContext, own: Options,
    observations: Observations, pool: InterpreterPool, key: object,
) -> Sample:  # fmt: skip
    limit = int(sampling_params["max_new_tokens"])
    while await next_turn(args, sample, sampling_params, context, PENDING, stop=(_STOPS[own.code],)):
        code = find_code(observations.turn_text, own.code)
        if sample.status != SampleStatus.COMPLETED or code is None:
            return sample
        begin_answer(sample, PENDING)
        fits = observations.finished_turns + 1 < own.max_turns
        fits = fits and observations.append(await _run(sample, code, own, observations, pool, key), limit)
        sample.metadata.pop(PENDING)
        if not fits:
            sample.status = SampleStatus.TRUNCATED
            return sample
    return sample


def find_code(turn: str, form: Literal["tag", "fence"]) -> str | None:
    """Return the code at the end of a turn; None if there is no code."""
    match = _BLOCKS[form].search(turn)
    return match[1].strip("\n") if match else None


async def _run(
    sample: Sample, code: str, own: Options, observations: Observations, pool: InterpreterPool, key: object
) -> str:
    """Run the code and return the text that the model sees."""
    started = time.monotonic()
    turns: list[str | None] = sample.metadata.get(HISTORY, [])[: observations.finished_turns]
    try:
        call = await pool.run(key, code, history=_since_restart(turns), timeout=own.timeout)
    finally:
        sample.non_generation_time += time.monotonic() - started
    _count(sample, call)
    text = observations.cut(call.ran.output, own.output_tokens) or own.empty
    sample.metadata[HISTORY] = [*turns, code if call.ran.lost is None else None]
    if call.ran.lost is None:
        return text
    seen = f"{text}\n" if call.ran.output else ""
    return f"{seen}error: {call.ran.lost}; the interpreter was restarted, names are gone"


def _since_restart(turns: Sequence[str | None]) -> list[str]:
    """Return the code that the interpreter ran since it was restarted."""
    kept: list[str] = []
    for code in turns:
        kept = [] if code is None else [*kept, code]
    return kept


def _count(sample: Sample, call: Call) -> None:
    counts = {
        "calls": 1, "errors": int(call.ran.failed), "seconds": call.seconds, "waited": call.waited,
        "timeouts": int(call.ran.lost is not None and call.ran.lost.startswith("time limit")),
        "restarts": int(call.ran.lost is not None), "replayed": call.replayed,
        "evictions": int(call.evicted),
    }  # fmt: skip
    stats = sample.metadata.setdefault(STATS, {}).setdefault("python", dict.fromkeys(counts, 0))
    for name, value in counts.items():
        stats[name] += value


def _options(args: Args, sample: Sample) -> Options:
    own = options(args, "code_sandbox", Options)
    row = {name: sample.metadata[name] for name in Options.model_fields if name in sample.metadata}
    return Options.model_validate({**own.model_dump(), **row}) if row else own
