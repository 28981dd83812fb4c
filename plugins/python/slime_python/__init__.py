"""slime from Python: settings as keyword arguments, data and functions as objects, a run as an iterator.

`trainer.py` has the object that users make; `inputs.py` writes their data and models to files, `functions.py` turns
their functions into specs that every process of the run can resolve, and `control.py` runs the training on a thread
and hands over its steps.
"""

from slime_python.control import Step
from slime_python.trainer import Run, Trainer

__all__ = ["Run", "Step", "Trainer"]
