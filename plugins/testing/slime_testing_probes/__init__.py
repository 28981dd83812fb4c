"""Each component of a run, called once before the run: `probes.py` in a fresh interpreter, `fresh_process.py` here."""
