"""Prometheus metrics through Ray's own exporter, which each node of a cluster has."""

from __future__ import annotations

from collections.abc import Sequence

from onediff_ext.cluster.coordinator import WorkerState


class ClusterMetrics:
    """The metrics of one run; names begin with ``ray_onediff_`` in Prometheus. Ray is connected."""

    def __init__(self) -> None:
        from ray.util.metrics import Counter, Gauge

        of_worker = ("worker", "host")
        self._pictures = Counter(
            "onediff_pictures", "Pictures that were written.", tag_keys=of_worker
        )
        self._failures = Counter("onediff_failures", "Pictures that failed.")
        self._lost = Counter("onediff_lost_workers", "Workers that were lost.")
        self._alive = Gauge("onediff_workers", "Workers that have their models.")
        self._graphs = Gauge(
            "onediff_graphs", "Block kinds that a worker draws with graphs.", tag_keys=of_worker
        )
        self._known_lost = 0

    def written(self, worker: WorkerState, count: int) -> None:
        """Count written pictures."""
        tags = {"worker": worker.name, "host": str(worker.about.get("host", ""))}
        if count:
            self._pictures.inc(count, tags=tags)
        graphs = worker.about.get("built", 0) + worker.about.get("loaded", 0)
        self._graphs.set(graphs, tags=tags)

    def failed(self, count: int) -> None:
        """Count pictures that failed."""
        if count:
            self._failures.inc(count)

    def workers(self, workers: Sequence[WorkerState]) -> None:
        """Count the workers."""
        lost = sum(bool(worker.lost) for worker in workers)
        if lost > self._known_lost:
            self._lost.inc(lost - self._known_lost)
            self._known_lost = lost
        self._alive.set(sum(worker.is_ready and not worker.lost for worker in workers))
