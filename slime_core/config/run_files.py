"""Files of a run in its directory; importing them loads nothing else."""

from __future__ import annotations

CONFIG, SUMMARY, CHECKPOINTS = "config.yaml", "summary.json", "checkpoints"
OUTPUT = ("actors", "engines", "stalls")
"""Folders of the processes' own output, which is there before any record."""
RUN_FILES = (
    CONFIG, SUMMARY, "metrics.jsonl", CHECKPOINTS, "tensorboard", "weights", "local_weights", "rollouts", "eval",
    "eval.json", "failures", "samples", "events.jsonl", "incidents.jsonl", "trace.jsonl", "profile", *OUTPUT,
)  # fmt: skip
"""Files and folders of a run in its directory."""
HEADER = "# name: value  # origin"
"""First line of the text, by which a run's `config.yaml` is known."""
