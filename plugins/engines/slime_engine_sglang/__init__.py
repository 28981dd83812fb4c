"""SGLang's servers behind a router, and which models of a run answer where."""

from slime_engine_sglang.model_urls import get_model_url, planned_models

__all__ = ["get_model_url", "planned_models"]
