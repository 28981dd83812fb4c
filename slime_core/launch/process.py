"""What every process of a run sets once, threads, seeds, and how often garbage is collected; and which one it is."""

from __future__ import annotations

import atexit
import gc
import os
import random

import numpy
import torch

from slime_core.errors import ConfigError
from slime_core.protocols import Args

GC_THRESHOLDS = (50_000, 20, 10)
"""Of the cyclic garbage collector, by generation. With Python's 700, scanning the samples and tasks of a large rollout
again and again takes more than half of the CPU time of dispatching them (`benchmarks/overhead.py`)."""


def set_up_process(args: Args) -> None:
    """Set the number of threads, seed every random generator, and let the garbage collector run less often.

    Collector thresholds of the embedding program that are off or higher stay as they are.
    """
    if 0 < gc.get_threshold()[0] < GC_THRESHOLDS[0]:
        gc.set_threshold(*GC_THRESHOLDS)
    # At exit the interpreter collects several times over what torch and transformers left, half a second for nothing.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    random.seed(args.seed)
    numpy.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)


def is_leader() -> bool:
    """Whether this process is torch's rank 0, which rolls out and records."""
    return os.environ.get("RANK", "0") == "0"


def num_processes() -> int:
    """Processes that train together, of which this is one. Raises ConfigError when torchrun's word is no number."""
    text = os.environ.get("WORLD_SIZE", "1")
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"environment variable WORLD_SIZE={text!r}: an integer is needed; torchrun sets it"
        ) from error
