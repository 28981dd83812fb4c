"""Check the installed megatron-core's release, and import it for the first time.

`checks.py` checks before anything starts, without an import; `ProcessGroups` checks in every process. At its import and
in every run, Megatron warns about things that no slime setting changes. Exactly these warnings are disabled for the
process.
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
"""File with the version numbers only."""

_NOISE = (
    # Fields whose defaults upstream has deprecated (transformer_config.py, inference/contexts/__init__.py, ...).
    (r"full scope is deprecated", UserWarning),
    (r"The following imports from `dynamic_context.py` will be removed", DeprecationWarning),
    (r"MLP requires ffn_hidden_size", DeprecationWarning),
    (r".*tp_group is None, using default tp group", DeprecationWarning),
    # Old names in torch.distributed that Megatron still uses.
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
    """Return the directory of megatron/core; None if it is not installed."""
    # `megatron` is a namespace package or an empty one, so finding a module below it runs no code of Megatron's.
    found = importlib.util.find_spec("megatron")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if (Path(folder) / "core" / _PACKAGE_INFO).is_file():
            return Path(folder) / "core"
    return None


def missing() -> str:
    """Return a message with the install command if megatron-core is not installed, else ""."""
    return "" if core_directory() is not None else f"megatron-core is not installed; {INSTALL}"


def check_installed() -> None:
    """Check that a supported release of megatron-core is installed; imports nothing.

    Raises:
        ConfigError: megatron-core is missing, or is another release.
    """
    root = core_directory()
    if root is None:
        raise ConfigError(f"--train-backend megatron: {missing()}")
    _check_release(runpy.run_path(str(root / _PACKAGE_INFO))["__version__"])


def check_version() -> None:
    """Import megatron-core, and disable its warnings of every run.

    Raises:
        ConfigError: megatron-core is missing, is another release, or cannot be imported.
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
