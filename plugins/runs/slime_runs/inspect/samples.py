"""`slime samples` (data): read what the model wrote in a run, and keep the best of saved samples as data for slime sft.

`filter`: what `slime rollout` saved -> rows of the sampled tokens themselves.
Exit status: 0 a file was written, 1 nothing was left to write.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.protocols import Command
from slime_core.text import json_text, plain

if TYPE_CHECKING:
    from slime_runs.inspect.selection import Selection


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Define `slime samples` and its sub-command."""
    from slime_runs.inspect import samples_show

    text = "what the model wrote in a run; the best of it as data for supervised fine-tuning"
    parser = subparsers.add_parser("samples", help=text, description=text)
    commands = parser.add_subparsers(dest="samples_command", required=True, metavar="COMMAND")
    samples_show.add_parser(commands)
    chosen = commands.add_parser(
        "filter",
        help="keep the best and write them as rows for slime sft",
        description="Keep samples by reward and write them as rows for slime sft, token for token. Samples that failed,"
        " have no reward or were cut at the token limit are left out. Exit status 1: none was left.",
    )
    chosen.add_argument("sources", nargs="+", metavar="RUN", help="run directory, file of samples, or glob pattern")
    chosen.add_argument("-o", "--output", required=True, metavar="FILE", help="JSONL file to write")
    chosen.add_argument(
        "--hf-checkpoint", required=True, metavar="DIR", help="model directory whose tokenizer the samples are of"
    )
    chosen.add_argument("--min-reward", type=_finite, metavar="X", help="keep rewards of X and more")
    chosen.add_argument("--reward-key", metavar="KEY", help="which number of rewards that are mappings")
    chosen.add_argument("--best-of-group", type=_positive, metavar="N", help="at most N per prompt, best first")
    chosen.add_argument("--dedupe", action="store_true", help="one of samples with the same tokens")
    chosen.add_argument("--truncated", action="store_true", help="keep those cut at the token limit too")
    chosen.add_argument("--max-response-tokens", type=_positive, metavar="N", help="leave longer responses out")
    chosen.add_argument("--json", action="store_true", help="print one JSON object")


def run(namespace: argparse.Namespace) -> int:
    """Show, or choose and write. Raises RunError, DataError and ConfigError for what cannot be read."""
    if namespace.samples_command == "show":
        from slime_runs.inspect import samples_show

        return samples_show.run(namespace)
    from slime_commands.sft.sampled_rows import to_row
    from slime_data.saved import read_samples

    from slime_core.data.dumps import to_json, write_lines
    from slime_core.data.tokenizer import load_tokenizer
    from slime_core.errors import ConfigError
    from slime_runs.files import saved_files
    from slime_runs.inspect.selection import Wanted, select

    output = Path(namespace.output)
    if output.exists():
        raise ConfigError(f"-o {output} is there already; name another file")
    wanted = Wanted(
        min_reward=namespace.min_reward,
        reward_key=namespace.reward_key,
        best_of_group=namespace.best_of_group,
        truncated=namespace.truncated,
        max_response_tokens=namespace.max_response_tokens,
        dedupe=namespace.dedupe,
    )
    tokenizer = load_tokenizer(namespace.hf_checkpoint)
    found = select(((path, read_samples(path)) for path in saved_files(namespace.sources)), wanted)
    _check_ids(found, tokenizer, namespace.hf_checkpoint)
    if found.kept:
        write_lines(output, (to_json(to_row(s, tokenizer), f"sample {s.index}") for s in found.kept))
    _tell(found, output, namespace.json)
    return int(not found.kept)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text}: must be a number")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return value


def _check_ids(found: Selection, tokenizer: Any, directory: str) -> None:
    from slime_core.errors import DataError

    size = len(tokenizer)
    for sample in found.kept:
        if max(sample.tokens) >= size:
            raise DataError(
                f"sample {sample.index} has token {max(sample.tokens)}, and the tokenizer of {directory} has {size};"
                " --hf-checkpoint names the model that sampled"
            )


def _tell(found: Selection, output: Path, as_json: bool) -> None:
    if as_json:
        told = {
            "output": str(output) if found.kept else None,
            "samples": found.total,
            "kept": len(found.kept),
            "left_out": dict(found.left_out.most_common()),
            "prompts": found.groups,
            "prompts_kept": found.groups_kept,
        }
        print(json_text(told))
        return
    where = f" -> {output}" if found.kept else "; nothing is written"
    print(
        f"kept {len(found.kept)} of {found.total} samples, of {found.groups_kept} of {found.groups} prompts{where}"
    )  # fmt: skip
    for reason, count in found.left_out.most_common():
        print(plain(f"  {count:>6}  {reason}"))


command = Command(run, add_parser)
