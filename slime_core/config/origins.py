"""The origin of a setting's value, which is the second half of every message about a setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Origin:
    """Source of a value; `str()` gives its form in messages and `slime config show`."""

    kind: Literal["default", "file", "env", "flag", "argument", "derived", "auto", "preset"]
    where: str = ""
    """Detail by kind. file: "run.yaml:14"; env: "SLIME_LR"; argument: "argument lr"; derived: the other settings;
    auto: the reason for the value of a setting at "auto", e.g. "because of --rollout-num-gpus";
    preset: "default of --advantage-estimator dapo", "--model qwen3-4B"."""

    def __str__(self) -> str:
        if self.kind == "env":
            return f"{self.where} env"
        if self.kind == "derived":
            return f"derived: {self.where}"
        if self.kind == "auto" and self.where:
            return f"auto: {self.where}"
        return self.where or self.kind

    def of(self, key: str) -> str:
        """Return the name of a setting that this source gave under `key`, for messages."""
        return self.where if self.kind in ("env", "argument") else f"{self.where}: {key}"


DEFAULT = Origin("default")
FLAG = Origin("flag")


@dataclass(frozen=True)
class Entry:
    """A value on its way into `Args`, still as its source spelled it."""

    value: object
    origin: Origin
    named: str = ""
    """Name of another program's flag in messages: `--no-rope-fusion` or `run.yaml:3: sglang_ep`."""
