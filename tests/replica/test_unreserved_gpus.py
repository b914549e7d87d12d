"""Where `auto` reserved no GPU, a replica does not start on a node that has some."""

import pytest
from bakehouse_replica.actor import refuse_unreserved_gpus
from bakehouse_replica.core.errors import StartupError
from bakehouse_replica.core.types import ModelSource
from bakehouse_replica.settings import ReplicaSettings


def test_gpus_that_have_joined_since_are_named() -> None:
    with pytest.raises(StartupError, match=r"model\.device: auto .*this node has 8\. Say cuda, or cpu"):
        refuse_unreserved_gpus(ReplicaSettings(), n_reserved=0, n_on_node=8.0)


@pytest.mark.parametrize(
    ("settings", "n_reserved", "n_on_node"),
    [
        (ReplicaSettings(), 0, 0.0),
        (ReplicaSettings(), 1, 8.0),
        (ReplicaSettings(device="cpu"), 0, 8.0),
        (ReplicaSettings(device="cuda"), 0, 8.0),  # Ray reserves what is asked for by name
        (ReplicaSettings(executor="fake"), 0, 8.0),
        (ReplicaSettings(source=ModelSource(model="scripted:file.json")), 0, 8.0),
    ],
)
def test_whoever_reserved_what_it_uses_starts(
    settings: ReplicaSettings, n_reserved: int, n_on_node: float
) -> None:
    refuse_unreserved_gpus(settings, n_reserved=n_reserved, n_on_node=n_on_node)
