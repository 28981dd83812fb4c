"""Stands for torchaudio where it is not installed: SGLang imports it for audio, and text models never call it."""

from slime_stub import module

__version__ = "0.0.0+slime.stub"
functional, transforms = module("torchaudio.functional"), module("torchaudio.transforms")
compliance = module("torchaudio.compliance", kaldi=module("torchaudio.compliance.kaldi"))
