"""`run_loop`: run a real training run from settings in this process, and return its results.

All parts are those of `slime train`: the embedded engine and trainer, the data source, the loop, checkpoints; only the
model is tiny and random. Settings are checked like the command's flags, so a wrong setting raises slime's own
exceptions here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError
from slime_core.protocols import Args
from slime_core.sample import Sample

if TYPE_CHECKING:
    import torch

_SAMPLES = "rollouts/{rollout_id}.jsonl"


@dataclass
class LoopRun:
    """A finished run."""

    run_dir: Path
    summary: dict[str, Any]
    """Content of `summary.json`."""
    settings: Any
    """The run's `args`."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """`eval/...` metrics of each evaluation, the one before training first."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each rollout and the training on it, in order."""
    samples: list[list[Sample]] = field(default_factory=list)
    """The samples of each rollout, in the order they were trained on."""

    def metric(self, name: str) -> list[float]:
        """Return one metric for every step that has it. Raises KeyError that lists the known names."""
        known = sorted({key for step in self.steps for key in step})
        if name not in known:
            raise KeyError(f"no metric {name!r} in any step; there are {', '.join(known)}")
        return [step[name] for step in self.steps if name in step]

    @property
    def checkpoint(self) -> Path | None:
        """Return the last checkpoint; None if nothing was trained."""
        return Path(self.summary["checkpoint"]) if self.summary["checkpoint"] else None

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """Return HF name -> tensor at the end of the run. Raises ConfigError if nothing was trained."""
        from slime_core.models.hf_io import read_weights

        if self.checkpoint is None:
            raise ConfigError("this run has trained nothing")
        return dict(read_weights(self.checkpoint))

    @property
    def weight_checksums(self) -> dict[str, str]:
        """Return HF name -> checksum at the end of the run, equal for bitwise equal runs."""
        from slime_core.weights.sync import tensor_checksum

        return {name: tensor_checksum(tensor) for name, tensor in self.weights.items()}


def run_loop(folder: Path, steps: int = 3, **settings: Any) -> LoopRun:
    """Train for `steps` rollouts of 4 prompts with 4 answers of up to 8 tokens each, without evaluation.

    Args:
        folder: Missing or empty folder for data, run directory and checkpoint.
        steps: Number of rollouts.
        settings: Any setting of `slime train` by its name; None removes a setting that this function sets.

    Raises:
        SlimeError: The errors of the command: ConfigError for a wrong setting, PluginError for a component, and so on.
    """
    from slime_python import process_restored

    from slime_core.launch import run
    from slime_core.plugins.presets import load_settings
    from slime_testing_contracts.tiny import tiny_model, write_rows

    defaults: dict[str, Any] = {
        "hf_checkpoint": tiny_model(),
        "input_key": "input",
        "label_key": "label",
        "apply_chat_template": True,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "num_steps_per_rollout": 1,
        "rollout_max_response_len": 8,
        "num_rollout": steps,
        "lr": 3e-3,
        "lr_decay_style": "constant",
        "num_threads": 1,
        "preflight": False,
        "keep_checkpoints": 0,
        "save": folder / "run",
        "save_debug_rollout_data": folder / "run" / _SAMPLES,
    }
    if not settings.get("prompt_data"):
        defaults["prompt_data"] = write_rows(folder / "train.jsonl", 64)
    if not {"custom_rm_path", "rm_type", "rollout_function_path"} & settings.keys():
        defaults["custom_rm_path"] = "slime_testing_contracts.tiny:digits"
    if "save" in settings and settings["save"] is None:
        defaults["run_dir"] = folder / "run"
    with process_restored():
        loaded = load_settings([], command="train", env=_environment(), arguments={**defaults, **settings})
        summary = run(loaded)
    return _collected(loaded.args, summary)


def _environment() -> dict[str, str]:
    """Return the environment without `SLIME_...` settings of the shell, on which no test may depend."""
    from slime_python import KEPT_VARIABLES

    return {k: v for k, v in os.environ.items() if not k.startswith("SLIME_") or k in KEPT_VARIABLES}


def _collected(args: Args, summary: dict[str, Any]) -> LoopRun:
    from slime_data.saved import read_samples

    from slime_core.checkpoint.run_dir import run_dir_of

    run_dir = run_dir_of(args)
    run = LoopRun(run_dir, summary, args)
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        metrics = json.loads(line)
        step = metrics.pop("step")
        scores = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if scores:
            run.evaluations.append(scores)
        if step > 0:
            run.steps.append(metrics)
    if args.save_debug_rollout_data:
        paths = [Path(args.save_debug_rollout_data.format(rollout_id=number)) for number in range(args.num_rollout)]
        run.samples = [read_samples(path) for path in paths if path.is_file()]
    return run
