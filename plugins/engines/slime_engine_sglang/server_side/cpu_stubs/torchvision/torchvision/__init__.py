"""Stands for torchvision where it is not installed: SGLang imports it for images, and text models never call it."""

import enum

from slime_stub import module

__version__ = "0.0.0+slime.stub"
InterpolationMode = enum.Enum(
    "InterpolationMode",
    {name.upper(): name for name in ("nearest", "nearest_exact", "bilinear", "bicubic", "box", "hamming", "lanczos")},
)
io, ops = module("torchvision.io"), module("torchvision.ops")
transforms = module(
    "torchvision.transforms",
    InterpolationMode=InterpolationMode,
    functional=module("torchvision.transforms.functional", InterpolationMode=InterpolationMode),
    v2=module(
        "torchvision.transforms.v2",
        InterpolationMode=InterpolationMode,
        functional=module("torchvision.transforms.v2.functional", InterpolationMode=InterpolationMode),
    ),
)
