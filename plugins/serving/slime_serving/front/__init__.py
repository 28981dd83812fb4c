"""The one front with OpenAI's and Anthropic's APIs, over an engine or over agents' sessions.

    request -> Body (pydantic) -> Wanted -> Desk: prompt, engine -> pieces -> Answer -> reply or events of the API

`openai_chat`, `openai_completions`, `openai_responses` and `anthropic_messages` translate; `app` has the routes and
sends; a `Desk` answers: `engine_desk` by itself, `slime_agent_base_url` within sessions that are recorded.
"""
