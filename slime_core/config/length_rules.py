"""Rules of lengths: what bounds a prompt and its response, and what holds where nobody said.

`rules.RULES` runs them. Without any length the model's own context is the bound, which may be very long.
"""

from __future__ import annotations

import json
from pathlib import Path

from slime_core.config.schema import Given
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError

_GENERATES = ("train", "eval", "rollout", "show")


def context_lengths(s: Settings) -> None:
    """A prompt must leave room for at least one token."""
    a = s.args
    for kind in ("rollout", "eval"):
        context, prompt = f"{kind}_max_context_len", f"{kind}_max_prompt_len"
        if kind == "eval" and a.eval_max_context_len is None and a.rollout_max_context_len is not None:
            s.derive(context, a.rollout_max_context_len, "rollout_max_context_len")
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


def context_of_model(s: Settings) -> None:
    """Where no length is given, the model's context bounds prompt and response together."""
    a = s.args
    given = [a.rollout_max_response_len, a.rollout_max_context_len]
    given += [a.eval_max_response_len, a.eval_max_context_len] if s.command == "eval" else []
    if s.command not in _GENERATES or given != [None] * len(given) or a.debug_train_only:
        return
    context = context_of(a.hf_checkpoint)
    if context is not None:
        s.derive("rollout_max_context_len", context, "the model's context")
        s.warnings.append(
            f"no --rollout-max-response-len: it may take what the prompt leaves of the model's {context} tokens."
        )


def context_of(checkpoint: str | None) -> int | None:
    """`max_position_embeddings` of the checkpoint's configuration; None where there is none to read."""
    path = Path(checkpoint or "", "config.json")
    if not checkpoint or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        found = config.get("text_config", config).get("max_position_embeddings")
    except (ValueError, AttributeError):
        return None  # the preflight says what is wrong with it
    return found if isinstance(found, int) and found > 1 else None


def response_is_bounded(s: Settings) -> None:
    """Without a limit an untrained model may never stop; the context is one, too."""
    a: Given = s.args
    if a.rollout_max_response_len is None and a.rollout_max_context_len is not None:
        s.derive("rollout_max_response_len", a.rollout_max_context_len - 1, "rollout_max_context_len - 1")
    if s.command == "eval" and not a.eval_function_path:
        for d in s.args.eval_datasets:
            if d.max_response_len is None and d.max_context_len is None:
                raise ConfigError(
                    f"evaluation of {d.name!r} needs --eval-max-response-len N or --eval-max-context-len N."
                )
    if s.command not in ("train", "rollout") or a.rollout_function_path or a.debug_train_only:
        return
    if a.rollout_max_response_len is None and a.rollout_max_context_len is None:
        raise ConfigError(
            "--rollout-max-response-len N or --rollout-max-context-len N is required, since"
            f" {s.cite('hf_checkpoint')} has no config.json yet that says how long the model's context is."
        )
