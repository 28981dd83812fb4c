"""Code that runs in the keeper's process and in the sandbox: standard library only, in a fresh interpreter.

`main.py` is the entry; read `namespaces.py`, `root_dir.py`, `rights.py` and `jobs.py` after it. Modules here may import
only this package and the standard library. `keeper.py` replaces the parent packages with empty ones, so that a sandbox
starts in milliseconds.
"""
