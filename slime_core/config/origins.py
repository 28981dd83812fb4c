"""Where a value came from: the second half of every message about a setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Origin:
    """Source of one value; `str()` gives what messages and `slime config show` print."""

    kind: Literal["default", "file", "env", "flag", "argument", "derived", "auto", "preset"]
    where: str = ""
    """file: "run.yaml:14"; env: "SLIME_LR"; argument: "argument lr"; derived: what it was derived from;
    auto: what chose the value of a setting that was left at "auto", e.g. "because of --rollout-num-gpus";
    preset: "default of --advantage-estimator dapo", "--model qwen3-4B"."""

    def __str__(self) -> str:
        if self.kind == "env":
            return f"{self.where} env"
        if self.kind == "derived":
            return f"derived: {self.where}"
        if self.kind == "auto" and self.where:
            return f"auto: {self.where}"
        return self.where or self.kind


DEFAULT = Origin("default")
FLAG = Origin("flag")


@dataclass(frozen=True)
class Entry:
    """A value on its way into `Args`, still as its source spelled it."""

    value: object
    origin: Origin
    named: str = ""
    """Of another program's flag: how messages call it, `--no-rope-fusion` or `run.yaml:3: sglang_ep`."""
