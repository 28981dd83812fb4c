"""Graders as users write them: broken ones and sound ones, for measuring `slime rewards attack`.

`broken.py` and `sound.py` were written before the attacks, `held_broken.py` and `held_sound.py` after they stood, and
nothing was tuned on these. Each grader is a function of a sample; the first word of its name says what rows it is for.
"""
