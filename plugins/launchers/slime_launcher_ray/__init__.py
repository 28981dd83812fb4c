"""The Ray launcher: the same stages as inline, each in an actor of its own; the only importer of ray.

`launcher.train` is called by `slime_core.launch.run` for `--launcher ray`. The driver runs the plain loop over
`stand_ins`; the actors are thin shells over the plain stages, which find out from the settings' strings what they are.
"""
