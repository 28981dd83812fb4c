"""A small agent program: asks for a draft, then for another look at it, and writes the last answer to a file.

Written against the `openai` and `anthropic` clients, and nothing else: the base URLs and keys come from the
environment, as for the vendors' own services. `python agent.py` does not know that it is being trained.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

DRAFT_TOKENS, ANSWER_TOKENS = 8, 16


def by_openai(question: str) -> str:
    """Draft by chat completions, second look by the Responses API."""
    import openai

    client = openai.OpenAI()
    draft = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}], max_completion_tokens=DRAFT_TOKENS
    )
    text = draft.choices[0].message.content or ""
    again = client.responses.create(
        model="policy",
        input=[
            {"role": "user", "content": question},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "again"},
        ],
        max_output_tokens=ANSWER_TOKENS,
    )
    return again.output_text


def by_anthropic(question: str) -> str:
    """Both by messages, streamed."""
    import anthropic

    client = anthropic.Anthropic()
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": question}]
    with client.messages.stream(model="policy", max_tokens=DRAFT_TOKENS, messages=messages) as stream:
        draft = stream.get_final_text()
    messages += [{"role": "assistant", "content": draft or "-"}, {"role": "user", "content": "again"}]
    answer = client.messages.create(model="policy", max_tokens=ANSWER_TOKENS, messages=messages)
    return "".join(block.text for block in answer.content if block.type == "text")


def main() -> None:
    """Read the task, answer it, leave the answer in `answer.txt`."""
    task = json.loads(Path("task.json").read_text(encoding="utf-8"))
    prompt = task["prompt"]
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    ask = by_anthropic if os.environ.get("AGENT_CLIENT") == "anthropic" else by_openai
    Path("answer.txt").write_text(ask(question), encoding="utf-8")
    print("answered", file=sys.stderr)


if __name__ == "__main__":
    main()
