"""The recipe `addition` (kind `recipes`): creates missing inputs of the quick start.

The launcher calls `prepare(args)` before it reads any input. The warm-up is two ordinary `slime sft` runs, with the
settings of `warmup-1.yaml` and `warmup-2.yaml`; `warmup.py` starts them.
"""

from __future__ import annotations

from pathlib import Path

from slime_commands.init import task
from slime_commands.init.tiny_model import write_random_model
from slime_commands.init.warmup import Recipe, is_missing, make_missing, say, write_missing
from slime_core.protocols import Args

_RECIPE = Recipe("addition", version=2)


def prepare(args: Args) -> None:
    """Create `args.prompt_data`, the files of `args.eval_prompt_data`, and `args.hf_checkpoint` if they are missing.

    Existing files are not changed. If the existing model was made for another seed, this run's model goes to a
    directory of its own next to it, and `args.hf_checkpoint` is set to that directory. Supervised runs get
    conversations that show the working, and a random model.
    """
    train, held_out = task.split_problems()
    if not args.compute_advantages_and_returns:
        _prepare_supervised(args, train)
        return
    input_key, label_key = args.input_key or "input", args.label_key or "label"
    rows = task.rl_rows(train, input_key, label_key)
    held_out_rows = task.rl_rows(held_out, args.eval_input_key or input_key, args.eval_label_key or label_key)
    make_missing(args, _RECIPE, rows, held_out_rows, task.warmup_rows(train, args.seed))


def _prepare_supervised(args: Args, train: list[task.Problem]) -> None:
    if args.prompt_data:
        write_missing(args.prompt_data, task.warmup_rows(train, args.seed)[0])
    model = Path(args.hf_checkpoint)
    if is_missing(model):
        say(f"wrote {model}: a random model of {write_random_model(model, args.seed):,} parameters")
