"""`TrainInputs`, importable from the module that the documentation names."""

from slime_core.sample.multimodal import TrainInputs as TrainInputs
