"""The whole application over fake executors in a private Ray: says `ready`, and ends when its input does.

A process of its own, because Serve reads its environment once, when it is imported.
"""

import os
import sys
from dataclasses import replace

from bakehouse_cluster.config import Config
from bakehouse_cluster.local_ray import LocalRay
from bakehouse_cluster.ports import LOOPBACK
from bakehouse_cluster.serve_environment import LocalRaySettings
from bakehouse_replica.settings import ReplicaSettings


class FakeConfig(Config):
    """A configuration whose replicas need no weights."""

    def replica_settings(self, hash_key: bytes) -> ReplicaSettings:
        return replace(super().replica_settings(hash_key), executor="fake")


def main(port: int, n_replicas: int) -> None:
    config = FakeConfig.model_validate({"server": {"port": port, "replicas": n_replicas}})
    config = config.shared_out(os.cpu_count() or 1)
    settings = LocalRaySettings(
        host=LOOPBACK, port=port, n_cpus=os.cpu_count() or 1, object_store_bytes=config.server.object_store
    )
    with LocalRay(settings) as ray:
        ray.start(take_signals=lambda: None)
        from bakehouse_cluster.app import build  # imports Serve, which reads the environment that `start` has set

        ray.deploy(build(config))
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
