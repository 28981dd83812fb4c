"""What runs in the keeper's process and in the sandbox: standard library only, in a fresh interpreter.

`main.py` is the entry; read `namespaces.py`, `root_dir.py`, `rights.py` and `jobs.py` after it. Nothing outside of this
package may be imported here. `keeper.py` puts empty packages in the place of its parents, so that a sandbox starts in
milliseconds.
"""
