"""Inputs before anybody reads them: which columns were recognised, and `--prepare-path`.

`--prepare-path` lets a recipe make missing inputs, once, whatever number of processes start together.

Every process (all ranks under torchrun, two runs that share inputs) takes the same lock and calls the recipe: the
first one works, the others find everything there. A recipe is therefore idempotent, and may say in
`args.hf_checkpoint` that the model went elsewhere.
"""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

from slime_core.config import Settings
from slime_core.data.dataset import open_rows, split_path
from slime_core.data.rows import Columns, recognised
from slime_core.errors import DataError
from slime_core.launch.lock import file_lock
from slime_core.launch.resolver import Resolver
from slime_core.protocols import Args
from slime_core.waits import part_of_start

LOCK_DEADLINE = 3600.0
"""Seconds to wait for another process's preparation."""


def make_inputs(settings: Settings, resolver: Resolver) -> None:
    """Run the recipe under the lock. Raises ConfigError when another process holds it for too long."""
    args = settings.args
    named = args.hf_checkpoint
    recipe = resolver.function("recipes", "prepare_path")
    refusal = f"--prepare-path: another process has been preparing the inputs for {LOCK_DEADLINE:.0f} s; end it first"
    lock = file_lock(Path(f"{named or args.run_dir}.lock"), deadline=LOCK_DEADLINE, refusal=refusal)
    with lock, part_of_start():
        recipe(args)
    if args.hf_checkpoint != named:
        if args.ref_load == named:
            settings.derive("ref_load", args.hf_checkpoint, "hf_checkpoint")
        settings.derive("hf_checkpoint", args.hf_checkpoint, f"prepare_path, instead of {named}")


def tell_columns(args: Args) -> list[str]:
    """A line per data set whose columns nobody has named, but for `input` alone; files that are not there have none."""
    sets = []
    if args.prompt_data and args.rollout_global_dataset and not args.data_source_path:
        sets.append((args.prompt_data, Columns.of_run(args), "--prompt-data"))
    sets += [(d.path, Columns.of_eval(d, args), f"evaluation data set {d.name!r}:") for d in args.eval_datasets]
    lines = []
    for spec, columns, origin in sets:
        if columns.input is not None or not split_path(spec)[0].is_file():
            continue
        with suppress(DataError):  # who reads the data says what is wrong with it; perhaps nobody does
            rows = open_rows(spec, origin, stream=split_path(spec)[1] == slice(None))  # the first rows tell
            with closing(rows):
                layout = recognised(rows, columns)
            if layout is not None and (layout.prompt != "input" or layout.answer):
                lines.append(f"columns of {spec}: {layout}")
    return lines
