"""The parts of every HTTP server of slime: a guard, checked bodies, error shapes, events, work in other threads.

    socket -> uvicorn (`listen`) -> `Guard` (who may ask, how much) -> FastAPI route -> `Body` (what may be asked)
                                                        `DeadlineThreads` (what takes long, with an end) <-`

The embedded engine's native API (`native.py`), and the OpenAI and Anthropic front over it and over agents' sessions
(`front`), are routes on `application`. Nothing here knows an engine.
"""
