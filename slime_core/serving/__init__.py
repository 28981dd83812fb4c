"""What every HTTP server of slime's is made of: a guard, checked bodies, error shapes, events, work beside the loop.

    socket -> uvicorn (`listen`) -> `Guard` (who may ask, how much) -> FastAPI route -> `Body` (what may be asked)
                                                                          `-> `Beside` (what takes long, with an end)

The embedded engine's server (`engines/embedded/server.py`), and the OpenAI and Anthropic front of `slime-command-serve`
over it and over agents' sessions, are routes on `application`. Nothing here knows an engine.
"""
