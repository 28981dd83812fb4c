"""Settings of generation: model, sampling, scheduling of groups, engines, environments, sandboxes and tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat, PositiveInt

from slime_core.config.sections.base import (
    Components,
    ContextLength,
    File,
    Refused,
    Rule,
    Section,
    Seed,
    Share,
    Spec,
    TopK,
)
from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_core.config.schema import Given
    from slime_core.config.settings import Settings


class ModelArgs(Section):
    """Model."""

    hf_checkpoint: File = None
    """Directory in Hugging Face layout, or a model of the hub, `org/name[@revision]`: initial weights, configuration
    and tokenizer."""
    model: str | None = None
    """Published model whose architecture numbers become Megatron's flags, by a name of `slime models list`."""
    model_name: str | None = None
    """Model family, when it is not the one named in the checkpoint's configuration."""
    custom_model_provider_path: str | None = None
    """Function that builds the trainer's model."""
    padded_vocab_size: PositiveInt | None = None
    """Vocabulary size the embedding is padded to."""


class RolloutArgs(Section):
    """Rollout."""

    rollout_function_path: str | None = None
    """Replaces the whole rollout: a plugin name or path to fn(args, rollout_id, data_source, evaluation=False)."""
    custom_generate_function_path: str | None = None
    """Generates one sample: a plugin name or path to fn(args, sample, sampling_params); single_turn when not given."""
    max_turns: PositiveInt | None = None
    """Turns of a generate function of several turns, which has a limit of its own when not given."""
    rollout_temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by it too."""
    rollout_top_p: Share = 1.0
    """Nucleus sampling."""
    rollout_top_k: TopK = -1
    """Sample from the k likeliest tokens; -1 is all."""
    rollout_max_context_len: ContextLength | None = None
    """Longest prompt and response together, in tokens."""
    rollout_max_prompt_len: PositiveInt | None = None
    """Longer prompts are left out, in tokens."""
    rollout_max_response_len: PositiveInt | None = None
    """Longest response, in tokens; what the model's context leaves when neither this nor a context is given."""
    rollout_skip_special_tokens: bool = False
    """Leave special tokens out of the response text."""
    rollout_stop: list[str] | None = None
    """Strings that end a response."""
    rollout_stop_token_ids: list[int] | None = None
    """Token ids that end a response."""
    rollout_shuffle: bool = False
    """Shuffle the prompts every epoch."""
    rollout_seed: Seed = 42
    """Seed of shuffling and sampling."""
    over_sampling_batch_size: PositiveInt | None = None
    """Prompts started at a time until enough groups pass the filter; --rollout-batch-size when not given."""
    dynamic_sampling_budget: PositiveInt = 16
    """Rollouts' worth of prompts that one rollout may draw, so that too many dropped groups do not go on for ever."""
    dynamic_sampling_on_exhausted: Literal["stop", "keep", "shrink"] = "stop"
    """When that budget is spent: stop the run, keep the best of the dropped groups, or train on fewer groups."""
    dynamic_sampling_filter_path: str | None = None
    """Keeps or drops a scored group: a plugin name or path to fn(args, samples)."""
    shadow_filter_path: Components = []
    """Filters that decide on copies of the groups, beside the run's and without effect on it."""
    partial_rollout: bool = False
    """Put groups that are unfinished at the end of a rollout back, and go on with them in the next."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Do not train on tokens that an earlier rollout generated."""
    buffer_filter_path: str | None = None
    """Takes groups out of the buffer: a plugin name or path to fn(args, rollout_id, buffer, num_samples)."""
    rollout_sample_hook_path: Components = []
    """fn(args, sample[, rollout_id][, evaluation]), plain or async, called between generation and reward;
    repeatable."""
    rollout_sample_filter_path: str | None = None
    """fn(args, groups) that marks samples with remove_sample at the end of a rollout: neither trained on nor in the
    statistics of their group."""
    rollout_all_samples_process_path: str | None = None
    """fn(args, all_groups, data_source) called at the end of a rollout with every group, dropped ones included."""
    rollout_data_postprocess_path: str | None = None
    """fn(args, rollout_id, rollout_data) called in the trainer once advantages are known."""
    custom_convert_samples_to_train_data_path: str | None = None
    """fn(args, samples) that makes the train data."""
    rollout_timeout: PositiveFloat | None = 3600.0
    """Seconds that one sample, not a rollout, may be generated for; longer ones fail."""
    max_consecutive_failures: PositiveInt = 64
    """So many samples failing one after the other stop the run."""
    rollout_buffer_url: str | None = None
    """Address of an external rollout buffer."""
    fetch_trajectory_retry_times: int = -1
    """How often fetching from the external buffer is tried; -1 is without end."""
    min_batch_collection_ratio: Share = 1.0
    """Part of the batch the external buffer must have collected."""
    rollout_task_type: str = "math"
    """Task type sent to the external rollout buffer."""


class EngineArgs(Section):
    """Rollout engine."""

    engine_max_running_requests: PositiveInt = 256
    """Sequences the embedded engine decodes together."""
    engine_max_context_len: ContextLength | None = None
    """Longest prompt and response together that the embedded engine accepts; by default --rollout-max-context-len or
    --eval-max-context-len, whichever is longer, and never more than the model was made for."""
    engine_max_tokens: PositiveInt | None = None
    """Capacity of the embedded engine's key-value cache, in tokens; sized to the requests when not given."""
    engine_prefix_cache: bool = True
    """Share the key-value cache of common prefixes."""
    engine_python: File = None
    """Python interpreter of the environment the rollout engine's server is installed in, such as
    /path/to/venv/bin/python; by default this one."""
    sglang_server_concurrency: PositiveInt = 512
    """Samples being generated at the same time, per engine."""
    engine_router: bool = True
    """Start a router in front of the rollout servers; without one, requests go to the servers themselves."""
    engine_start_timeout: PositiveFloat = 600.0
    """Seconds that a server or router which slime launches has until it is ready."""
    sglang_router_ip: str | None = None
    """Address of a router that is already running."""
    sglang_router_port: int | None = None
    """Port of a router that is already running."""
    sglang_router_request_timeout_secs: PositiveInt = 14400
    """Seconds a request may take."""
    sglang_config: File = None
    """YAML file with the models to serve and their groups of servers; docs/engines/sglang-config.md."""
    prefill_num_servers: PositiveInt | None = None
    """So many engines only prefill, and the others only decode."""
    rollout_external_engine_addrs: list[str] | None = None
    """Addresses of engines that are already running."""


class EnvironmentArgs(Section):
    """Environment."""

    environment_path: str | None = None
    """Environment that samples act in: a plugin name or a path to a class(args); a row's metadata may name another as
    environment_path. Sets --custom-generate-function-path multi_turn."""
    environment_step_timeout: PositiveFloat = 60.0
    """Seconds that building, resetting, stepping or closing an environment may take each; then the sample fails, or is
    cut, as its generator declares."""
    environment_threads: PositiveInt = 512
    """Environments with plain methods that may exist at once, hanging ones included; each has a thread."""


class SandboxArgs(Section):
    """Sandboxes."""

    sandbox_isolation: Literal["require", "best-effort", "none"] = "require"
    """require: the run does not start where a sandbox cannot be isolated completely; best-effort: it starts with a
    warning that says what is missing, unless programs could write slime's files and memory; none: it starts, and
    programs may do all that your user may."""
    sandbox_concurrency: PositiveInt = 32
    """Sandboxes that a rollout process keeps at once; one that is needed by another sample is given up, and rebuilt
    from what ran in it."""


class ToolArgs(Section):
    """Tools."""

    tools_path: Components = []
    """Something the model may call: a plugin name or path to a function with annotations, or to a list of them; its
    schema is given to the chat template. Repeatable."""
    tool_call_parser: Spec = "auto"
    """How the model writes tool calls: a parser's name or path; auto takes the one that knows the chat template."""


def model_is_named(s: Settings) -> None:
    """Every command but `show` needs a checkpoint."""
    if s.command != "show" and not s.args.hf_checkpoint:
        where = "scripts/models/*.sh take it from HF_CHECKPOINT"
        raise ConfigError(f"--hf-checkpoint is required: a directory in Hugging Face layout ({where}).")


def _generator(s: Settings) -> None:
    """An environment needs a generator that acts in it."""
    if s.args.environment_path and s.args.custom_generate_function_path is None:
        s.derive("custom_generate_function_path", "multi_turn", "environment_path")


def _over_sampling(s: Settings) -> None:
    """At least one rollout's prompts are started at a time."""
    a: Given = s.args
    if a.rollout_batch_size is None:
        return
    if a.over_sampling_batch_size is None:
        s.derive("over_sampling_batch_size", a.rollout_batch_size, "rollout_batch_size")
    elif a.over_sampling_batch_size < a.rollout_batch_size:
        raise ConfigError(f"{s.cite('over_sampling_batch_size')} must be at least {s.cite('rollout_batch_size')}.")


def _cannot_shrink(a: Given) -> bool:
    """A smaller rollout is made of whole optimizer steps."""
    asked = a.dynamic_sampling_on_exhausted == "shrink" and a.rollout_batch_size is not None
    per_step = a.global_batch_size or 0  # filled in by now
    return asked and (a.num_steps_per_rollout == 1 or per_step % a.n_samples_per_prompt != 0)


def _context_of_model(s: Settings) -> None:
    """Without a given length, the model's context, which may be very long, bounds prompt and response together."""
    a = s.args
    given = [a.rollout_max_response_len, a.rollout_max_context_len]
    given += [a.eval_max_response_len, a.eval_max_context_len] if s.command == "eval" else []
    generates = s.command in ("train", "eval", "rollout", "show")
    if not generates or given != [None] * len(given) or a.debug_train_only:
        return
    context = context_of(a.hf_checkpoint)
    if context is not None:
        s.derive("rollout_max_context_len", context, "the model's context")
        s.warnings.append(
            f"no --rollout-max-response-len: it may take what the prompt leaves of the model's {context} tokens."
        )


def context_of(checkpoint: str | None) -> int | None:
    """Return `max_position_embeddings` of the checkpoint's configuration; None if it cannot be read."""
    path = Path(checkpoint or "", "config.json")
    if not checkpoint or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        found = config.get("text_config", config).get("max_position_embeddings")
    except (ValueError, AttributeError):
        return None  # the preflight reports the error
    return found if isinstance(found, int) and found > 1 else None


def no_model(checkpoint: str) -> str:
    """Return the reason, for a message, why a directory without `config.json` holds no model."""
    if Path(checkpoint).is_dir():
        return f"--hf-checkpoint {checkpoint} has no config.json: no model in Hugging Face's layout"
    return f"{checkpoint}: no such directory; --hf-checkpoint names one in Hugging Face's layout, or a model of the hub"


def _context_lengths(s: Settings) -> None:
    """A prompt, of training and of evaluation, must leave room for at least one token."""
    a = s.args
    if a.eval_max_context_len is None and a.rollout_max_context_len is not None:
        s.derive("eval_max_context_len", a.rollout_max_context_len, "rollout_max_context_len")
    for kind in ("rollout", "eval"):
        context, prompt = f"{kind}_max_context_len", f"{kind}_max_prompt_len"
        limit = getattr(a, context)
        if limit is None:
            continue
        if getattr(a, prompt) is None:
            s.derive(prompt, limit - 1, f"{context} - 1")
        elif getattr(a, prompt) > limit - 1:
            raise ConfigError(f"{s.cite(prompt)} must be smaller than {s.cite(context)}.")
    if a.engine_max_context_len is None and a.rollout_max_context_len and a.eval_max_context_len:
        longest = max(a.rollout_max_context_len, a.eval_max_context_len)
        s.derive("engine_max_context_len", longest, "the longer of rollout_max_context_len and eval_max_context_len")


def response_is_bounded(s: Settings) -> None:
    """Without a limit an untrained model may never stop; the context is one, too. After evaluation's data sets."""
    a: Given = s.args
    if a.rollout_max_response_len is None and a.rollout_max_context_len is not None:
        s.derive("rollout_max_response_len", a.rollout_max_context_len - 1, "rollout_max_context_len - 1")
    if s.command not in ("train", "rollout") or a.rollout_function_path or a.debug_train_only:
        return
    if a.rollout_max_response_len is None:
        longest = "--rollout-max-response-len N or --rollout-max-context-len N says how long an answer may be"
        if a.prepare_path:
            raise ConfigError(f"{longest}; {s.cite('hf_checkpoint')} has no config.json yet that does.")
        raise ConfigError(f"{no_model(str(a.hf_checkpoint))}. Where the model is elsewhere, {longest}.")


RULES: tuple[Rule, ...] = (
    _generator,
    _over_sampling,
    Refused(
        _cannot_shrink,
        "{dynamic_sampling_on_exhausted} trains on fewer optimizer steps of whole groups, so it needs several steps per"
        " rollout and {global_batch_size} a multiple of {n_samples_per_prompt}; set --num-steps-per-rollout, or choose"
        " stop or keep.",
    ),
    _context_of_model,
    _context_lengths,
    Refused(
        lambda a: a.mask_offpolicy_in_partial_rollout and not a.partial_rollout,
        "{mask_offpolicy_in_partial_rollout} needs --partial-rollout.",
    ),
)
