"""What every process of a run sets once: threads and seeds."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def set_up_process(args: Any) -> None:
    """Set the number of threads and seed every random generator."""
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    random.seed(args.seed)
    numpy.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)
