"""Stands for SGLang's CUDA kernels on a machine without a GPU, where their names are imported and never called."""

from slime_stub import names_of

__version__ = "99.0.0+slime.stub"  # SGLang compares it with the least that it accepts
__getattr__ = names_of(__name__)
