"""A model in this process: its engine, its text side, and a gateway over both, without Ray."""

import secrets

from bakehouse_replica.build import build_engine
from bakehouse_replica.core.types import ReplicaCard
from bakehouse_replica.engine import Engine
from bakehouse_replica.source import open_source
from bakehouse_router.dispatch import Dispatcher
from bakehouse_router.gateway import Gateway
from bakehouse_router.structured import GrammarChecker
from bakehouse_router.text.model_text import ModelText, load_model_text

from bakehouse_cluster.config import Config

# Those beyond a full batch wait in the engine, so that a slot that falls free is taken at the next step.
IN_FLIGHT_PER_SEQUENCE = 2


class OfflineModel:
    """Loaded and started by the constructor; whoever makes it closes `engine`.

    Raises `StartupError` where the model cannot be served as asked.
    """

    def __init__(self, config: Config) -> None:
        settings = config.gateway_settings()
        self.text: ModelText = load_model_text(
            open_source(config.source), template_override=settings.chat_template
        )
        self.engine: Engine = build_engine(
            config.replica_settings(secrets.token_bytes(32)), replica_id="offline", on_failure=None
        )
        self.card: ReplicaCard = self.engine.card
        self.engine.start()
        grammars = GrammarChecker(self.text.tokenizer.vocabulary, settings)
        # An engine in this process has no successor for which a stream could wait.
        dispatcher = Dispatcher(self.engine, resume_wait_s=0.0)
        self.gateway = Gateway(settings, dispatcher, self.text, grammars=grammars)
