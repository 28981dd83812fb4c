"""Stands for SGLang's CUDA kernels on a machine without a GPU, where their names are imported and never called."""

from typing import Any, NoReturn

__version__ = "99.0.0+slime.stub"  # SGLang compares it with the least that it accepts


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but only slime's stub of sgl_kernel is there")

    missing.__name__ = name
    return missing
