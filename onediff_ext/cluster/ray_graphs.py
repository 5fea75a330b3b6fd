"""A graph exchange in a Ray actor beside the driver, for nodes that share no folder.

Graphs travel between the nodes of one Ray cluster only. Who can reach a Ray cluster can run any
code on it, so graphs add no right that was not there.
"""

from __future__ import annotations

from typing import Any

from onediff_ext.store import GraphExchange
from onediff_ext.store.memory_exchange import MemoryExchange


class RayGraphs(GraphExchange):
    """Asks the actor that holds the graphs. Travels to workers.

    Args:
        actor: From `start`.
    """

    frees_lost_holders = True

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def start(cls, ray: Any) -> RayGraphs:
        """Start the actor on the driver's own node; it ends with the driver."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor_class = ray.remote(num_cpus=0, scheduling_strategy=here)(MemoryExchange)
        return cls(actor_class.remote())

    def digests(self, tag: str) -> set[str]:
        return set(self._ask("digests", tag))

    def fetch(self, tag: str, digest: str) -> bytes | None:
        found: bytes | None = self._ask("fetch", tag, digest)
        return found

    def publish(self, tag: str, digest: str, graph_file: bytes) -> bool:
        return bool(self._ask("publish", tag, digest, graph_file))

    def discard(self, tag: str, digest: str) -> None:
        self._ask("discard", tag, digest)

    def lease(self, tag: str, digest: str, holder: str) -> bool:
        return bool(self._ask("lease", tag, digest, holder))

    def release(self, tag: str, digest: str, holder: str) -> None:
        self._ask("release", tag, digest, holder)

    def release_all(self, holder: str) -> None:
        self._actor.release_all.remote(holder)

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self._actor, method).remote(*arguments), timeout=60)
