"""`slime tokens` (data): check a tokenizer and its chat template for multi-turn training.

Loads transformers' tokenizers on CPU and no weights. Exit status: 0 nothing failed, 1 an invariant does not hold.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from slime_core.protocols import Command
from slime_core.text import json_text, plain

_MARKS = {"ok": "ok    ", "note": "note  ", "failed": "FAILED"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Define `slime tokens` and its sub-command."""
    text = "what holds of a model's tokenizer and chat template"
    parser = subparsers.add_parser("tokens", help=text, description=text)
    commands = parser.add_subparsers(dest="tokens_command", required=True, metavar="COMMAND")
    checked = commands.add_parser(
        "check",
        help="the invariants of multi-turn training, one by one",
        description="Check a tokenizer and its chat template, and name templates that rewrite history. Exit status: 0"
        " nothing failed, 1 an invariant does not hold.",
    )
    checked.add_argument("model_dir", metavar="MODEL_DIR", help="directory with the tokenizer's files")
    checked.add_argument("--chat-template", metavar="FILE", help="a Jinja template in the place of the model's")
    checked.add_argument(
        "--apply-chat-template-kwargs",
        metavar="JSON",
        default="{}",
        help="for the template, as the run's flag of that name (default %(default)s)",
    )
    checked.add_argument("--json", action="store_true", help="print one JSON object")


def run(namespace: argparse.Namespace) -> int:
    """Print the findings. Raises ConfigError for what is no tokenizer, no file or no JSON."""
    from slime_core.data.tokenizer import load_tokenizer
    from slime_runs.inspect.token_checks import FAILED, NOTE, check_tokens, stop_ids_of

    directory = Path(namespace.model_dir)
    tokenizer = load_tokenizer(directory)
    template = namespace.chat_template
    if template is not None:
        tokenizer.chat_template = _template(Path(template))
    findings = check_tokens(tokenizer, stop_ids_of(directory), _kwargs(namespace.apply_chat_template_kwargs))
    failed = [f.name for f in findings if f.status == FAILED]
    rewrites = [f.name for f in findings if f.status == NOTE and "rewrites history" in f.text]
    if namespace.json:
        checks = [{"name": f.name, "status": f.status, "text": f.text} for f in findings]
        answer = {"model": str(directory), "chat_template": template, "failed": failed, "rewrites_history": rewrites}
        print(json_text({**answer, "checks": checks}))
        return int(bool(failed))
    width = max(len(f.name) for f in findings)
    for finding in findings:
        print(plain(f"{_MARKS[finding.status]}  {finding.name:<{width}}  {finding.text}"))
    name = template or directory
    if rewrites:
        print(f"{name}: the template rewrites history ({', '.join(rewrites)})")
    print(f"{name}: {len(failed)} of {len(findings)} checks failed" + (f": {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


def _template(path: Path) -> str:
    from slime_core.errors import ConfigError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: cannot be read: {error}") from error


def _kwargs(text: str) -> dict[str, Any]:
    from slime_core.errors import ConfigError

    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--apply-chat-template-kwargs {text!r}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--apply-chat-template-kwargs {text!r}: expected a JSON object")
    return value


command = Command(run, add_parser, only_prints=True)
