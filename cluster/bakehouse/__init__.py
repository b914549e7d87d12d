"""Public names of bakehouse, loaded on first use: `import bakehouse` loads neither torch nor ray."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bakehouse_cluster.app import build as build
    from bakehouse_cluster.llm import LLM as LLM
    from bakehouse_replica.core.sampling import SamplingParams as SamplingParams
    from bakehouse_router.connect import connect as connect

_HOME = {
    "LLM": "bakehouse_cluster.llm",
    "SamplingParams": "bakehouse_replica.core.sampling",
    "build": "bakehouse_cluster.app",
    "connect": "bakehouse_router.connect",
}
__all__ = ["LLM", "SamplingParams", "build", "connect"]

if not TYPE_CHECKING:  # otherwise the checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'bakehouse' has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)
