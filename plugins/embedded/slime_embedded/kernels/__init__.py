"""Compile the C sources in this folder, for float32 on CPUs; without them torch computes the same.

The embedded trainer and the embedded engine ask for a source by name. It is compiled on first use, for this machine's
processor, into a cache directory (`$XDG_CACHE_HOME/slime/kernels`, or below `~/.cache`) under a hash of all that the
result depends on. Sums are in one order whatever the batch is, so results repeat bit for bit on one machine.
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
    """`--kernels`, for this process: "auto", or "torch", with which `load` finds nothing."""
    global _choice
    _choice = choice


def load(source: str) -> ctypes.CDLL | None:
    """The functions of `SOURCE.c` that are `void` and not `static`, with the argument types written there.

    A pointer is an integer (`Tensor.data_ptr()`) or None; nothing checks what it points to.

    Returns:
        None with `--kernels torch`, and where it cannot be compiled, which is said once with the reason.
    """
    return _load(source) if _choice == "auto" else None


def training(*tensors: torch.Tensor | None, multiplied: bool = False) -> ctypes.CDLL | None:
    """`training.c`, where it takes these tensors: float32 on a CPU. It has one thread; where torch has more, None.

    `multiplied`: the first are x [T, in] and weight [out, in] of a product, of so many rows that packing pays.
    """
    taken = {(x.dtype, x.device.type, x.is_contiguous()) for x in tensors if x is not None}
    if multiplied and tensors[0] is not None and (tensors[0].shape[0] < 256 or tensors[0].shape[1] % 16):
        return None
    return load("training") if torch.get_num_threads() == 1 and taken == {(torch.float32, "cpu", True)} else None


def pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    """What compiled functions take for tensors."""
    return [None if x is None else x.data_ptr() for x in tensors]


@cache
def _load(source: str) -> ctypes.CDLL | None:
    try:
        parts = (Path(__file__).with_name(f"{name}.c") for name in ("products", source))
        text = "".join(part.read_text(encoding="utf-8") for part in parts)
        found = ctypes.CDLL(str(_built(source, text)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # no home to compile in, too
        told = getattr(error, "stderr", None) or error  # the compiler's own words, where it has any
        logging.getLogger(__name__).warning("torch computes what %s.c would, slower: %s", source, told)
        return None
    for name, arguments in re.findall(r"^void (\w+)\(([^)]*)\)", text, re.MULTILINE):
        types = [ctypes.c_void_p if "*" in each else _TYPES[each.split()[0]] for each in arguments.split(",")]
        getattr(found, name).argtypes, getattr(found, name).restype = types, None
    return found


def _built(source: str, text: str) -> Path:
    """The shared library of this text, this compiler and this processor, compiled where it is not there yet."""
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
            made_here.replace(target)  # ranks that start at once each make one, and the last stays
    return target
