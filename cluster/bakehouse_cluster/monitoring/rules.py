"""The file of recorded series and alerts."""

from importlib.resources import files


def rules() -> str:
    """As Prometheus reads it."""
    return files("bakehouse_cluster.monitoring").joinpath("rules.yaml").read_text()
