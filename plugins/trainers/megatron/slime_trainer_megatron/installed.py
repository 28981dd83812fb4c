"""The megatron-core that is installed: whether it is one that this trainer was written for, and its first import.

`checks.py` asks before anything starts, without importing it, and `ProcessGroups` in every process. Megatron warns at
its import and in every run about things that no setting of slime's changes; those warnings, and no others, are switched
off for the process.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import warnings
from pathlib import Path

from slime_core.errors import ConfigError

SUPPORTED = "0.16"
"""The release series that the fixes of `cpu_mode.py` and the name maps were written for."""
INSTALL = 'install it with: pip install "megatron-core==0.16.*" einops psutil'

_PACKAGE_INFO = "package_info.py"
"""Nothing but numbers."""

_NOISE = (
    # Fields whose defaults upstream has deprecated (transformer_config.py, inference/contexts/__init__.py, ...).
    (r"full scope is deprecated", UserWarning),
    (r"The following imports from `dynamic_context.py` will be removed", DeprecationWarning),
    (r"MLP requires ffn_hidden_size", DeprecationWarning),
    (r".*tp_group is None, using default tp group", DeprecationWarning),
    # Names of torch.distributed that Megatron still calls by their old ones.
    (r"`torch\.distributed\.(reduce_scatter|all_gather)\w*` is deprecated", FutureWarning),
    (r"`load_state_dict` is deprecated and will be removed", FutureWarning),
    (r"Please use DTensor instead", FutureWarning),
    # The distributed optimizer reads `.grad` of its shards, which are views of parameters (optimizer.py
    # `_zero_grad_group_helper`).
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor", UserWarning),
)
_NOISE_ON_CPU = (
    # Neither runs without a GPU.
    (r"(Transformer Engine and )?Apex (is|are) not installed", UserWarning),
    (r"When using async grad allreduce it is recommended to set the environment variable CUDA_DEVICE", UserWarning),
)


def core_directory() -> Path | None:
    """Where megatron/core is installed; None without it."""
    # `megatron` is a namespace package or an empty one: finding a module below it runs nothing of Megatron's.
    found = importlib.util.find_spec("megatron")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if (Path(folder) / "core" / _PACKAGE_INFO).is_file():
            return Path(folder) / "core"
    return None


def missing() -> str:
    """That megatron-core is not installed, and what to type; empty when it is."""
    return "" if core_directory() is not None else f"megatron-core is not installed; {INSTALL}"


def check_installed() -> None:
    """There is a megatron-core of a known release; imports nothing.

    Raises:
        ConfigError: It is missing, or another release.
    """
    root = core_directory()
    if root is None:
        raise ConfigError(f"--train-backend megatron: {missing()}")
    _check_release(runpy.run_path(str(root / _PACKAGE_INFO))["__version__"])


def check_version() -> None:
    """Import megatron-core, and silence what it says in every run.

    Raises:
        ConfigError: It is missing, another release, or does not import.
    """
    _silence()
    try:
        version = importlib.import_module("megatron.core.package_info").__version__
    except ImportError as error:
        raise ConfigError(f"--train-backend megatron: megatron-core does not import ({error}); {INSTALL}") from error
    _check_release(version)


def _check_release(version: str) -> None:
    if version.split(".")[:2] != SUPPORTED.split("."):
        raise ConfigError(
            f"--train-backend megatron: megatron-core {version} is installed and this trainer knows only "
            f"{SUPPORTED}.*; {INSTALL}"
        )


def _silence() -> None:
    import torch

    noise = _NOISE if torch.cuda.is_available() else (*_NOISE, *_NOISE_ON_CPU)
    for message, category in noise:
        warnings.filterwarnings("ignore", message=message, category=category)
