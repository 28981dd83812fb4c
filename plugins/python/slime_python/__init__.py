"""slime from Python: settings as keyword arguments, data and functions as objects, a run as an iterator.

`trainer.py` has the object that users make; `inputs.py` writes their data and models to files, `functions.py` turns
their functions into specs that every process of the run can resolve, and `control.py` runs the training on a thread
and hands over its steps.
"""

from slime_python.control import KEPT_VARIABLES, Step, process_restored
from slime_python.trainer import Run, Trainer

__all__ = ["KEPT_VARIABLES", "Run", "Step", "Trainer", "process_restored"]
