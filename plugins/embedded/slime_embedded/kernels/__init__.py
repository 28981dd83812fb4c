"""Compile the C sources in this folder, for float32 on CPUs; without them torch computes the same.

The embedded trainer and the embedded engine load a source by name. A source is compiled on first use, for this
machine's processor, into a cache directory (`$XDG_CACHE_HOME/slime/kernels`, or below `~/.cache`) under a hash of all
inputs of the compilation. The order of sums does not depend on the batch, so results repeat bit for bit on one machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-shared", "-fPIC")
_TYPES = {"float": ctypes.c_float, "int64_t": ctypes.c_int64}
_choice = "auto"


def use(choice: str) -> None:
    """Set `--kernels` for this process: "auto", or "torch", which makes `load` return None."""
    global _choice
    _choice = choice


def load(source: str) -> ctypes.CDLL | None:
    """Load the functions of `SOURCE.c` that are `void` and not `static`, with their argument types from the source.

    A pointer is an integer (`Tensor.data_ptr()`) or None; its target is not checked.

    Returns:
        The library; None with `--kernels torch`, or if compilation fails, which is logged once with the reason.
    """
    return _load(source) if _choice == "auto" else None


def training(*tensors: torch.Tensor | None, multiplied: bool = False) -> ctypes.CDLL | None:
    """Load `training.c` if it supports these tensors: contiguous float32 on a CPU.

    Return None otherwise, or if torch has more than one thread, since the kernels have one.

    `multiplied`: the first tensors are x [T, in] and weight [out, in] of a product; x must have enough rows for packing
    to pay off.
    """
    taken = {(x.dtype, x.device.type, x.is_contiguous()) for x in tensors if x is not None}
    if multiplied and tensors[0] is not None and (tensors[0].shape[0] < 256 or tensors[0].shape[1] % 16):
        return None
    return load("training") if torch.get_num_threads() == 1 and taken == {(torch.float32, "cpu", True)} else None


def pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    """Return the tensors' addresses, which compiled functions take as arguments."""
    return [None if x is None else x.data_ptr() for x in tensors]


@cache
def _load(source: str) -> ctypes.CDLL | None:
    try:
        parts = (Path(__file__).with_name(f"{name}.c") for name in ("products", source))
        text = "".join(part.read_text(encoding="utf-8") for part in parts)
        found = ctypes.CDLL(str(_built(source, text)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # also if there is no home directory
        told = getattr(error, "stderr", None) or error  # the compiler's message, if any
        logging.getLogger(__name__).warning("torch computes what %s.c would, slower: %s", source, told)
        return None
    for name, arguments in re.findall(r"^void (\w+)\(([^)]*)\)", text, re.MULTILINE):
        types = [ctypes.c_void_p if "*" in each else _TYPES[each.split()[0]] for each in arguments.split(",")]
        getattr(found, name).argtypes, getattr(found, name).restype = types, None
    return found


def _built(source: str, text: str) -> Path:
    """Return the shared library for this text, compiler and processor; compile it if it does not exist yet."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler (cc, gcc, clang, or what CC names)")
    cpu = re.search(r"^(flags|Features)\s*:.*", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    key = repr((text, _FLAGS, os.path.realpath(compiler), os.stat(compiler).st_mtime_ns, cpu and cpu.group()))
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime" / "kernels"
    target = root / f"{source}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as work:
            made_here = Path(work) / target.name
            words = [compiler, *_FLAGS, "-x", "c", "-", "-o", str(made_here), "-lm"]
            subprocess.run(words, input=text, text=True, capture_output=True, check=True, timeout=120)
            with made_here.open("rb") as file:
                os.fsync(file.fileno())  # part of a library, after a loss of power, would end the process that loads it
            made_here.replace(target)  # ranks that start together each compile; the last replaces the others
    return target
