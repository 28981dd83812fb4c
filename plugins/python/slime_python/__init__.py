"""slime from Python: settings as keyword arguments, data and functions as objects, a run as an iterator.

`trainer.py` has the object that users make; `inputs.py` writes their data and models to files, `functions.py` turns
their functions into specs that every process of the run can resolve. `control.py` runs the training on a thread, or in
a process of its own; `loops.py` are the loops there, `channel.py` is between them. `changes.py` has the table of
settings that may change meanwhile; `records.py`, `html.py` and `display.py` show the run.
"""

from slime_python.control import KEPT_VARIABLES, process_restored
from slime_python.records import Run
from slime_python.steps import Batch, Step
from slime_python.trainer import Trainer

__all__ = ["KEPT_VARIABLES", "Batch", "Run", "Step", "Trainer", "process_restored"]
