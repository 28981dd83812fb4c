"""An agent program that asks a model once: it knows a base URL, as of a vendor's API, and nothing of slime.

Replace it by your own, with the client library of your choice if the sandbox's Python has it.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path


def ask(messages: list[dict[str, str]]) -> str:
    """The model's answer by OpenAI's chat API."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def main() -> None:
    """Answer the row's prompt, and leave the answer in a file as if somebody had asked for one."""
    task = json.loads(Path("task.json").read_text(encoding="utf-8"))
    Path("answer.txt").write_text(ask([{"role": "user", "content": task["prompt"]}]), encoding="utf-8")


if __name__ == "__main__":
    main()
