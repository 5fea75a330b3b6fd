"""Ray and its workers, started while a command still reads its inputs and makes its plan."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from onediff_ext.cli.cluster_arguments import prepare_workers, worker_limit
from onediff_ext.cli.worker_model import prepare_worker
from onediff_ext.cluster.program import Program
from onediff_ext.cluster.ray_graphs import RayGraphs
from onediff_ext.cluster.ray_library import BackgroundRay
from onediff_ext.cluster.ray_pool import RayPool
from onediff_ext.core.start_up_times import StartUpTimes

# A run with nothing to do is over by then, and starts no Ray.
_DELAY_S = 0.3


def workers_ahead(arguments: argparse.Namespace) -> AbstractContextManager[WorkersAhead | None]:
    """Begin to start the workers, for a ``with`` block; None when the command runs in none.

    The arguments are made ready for workers: call this before other arguments are used.
    """
    return WorkersAhead(arguments) if prepare_workers(arguments) else nullcontext()


class WorkersAhead:
    """The workers of a command. Their processes start and import libraries before its plan is made.

    Args:
        arguments: Of the command line, its paths absolute.
        delay_s: Nothing is started before, unless `pool` is called.

    Attributes:
        limit: Most workers; None for all.
        identity: Of the model; set it when it is known, so that graphs are read early.
        times: When the steps of the start-up were done.
    """

    def __init__(self, arguments: argparse.Namespace, *, delay_s: float = _DELAY_S) -> None:
        self._arguments, self.limit = arguments, worker_limit(arguments)
        self._pool: RayPool | None = None
        self.identity: dict[str, object] | None = None
        self.times = StartUpTimes()
        self._background = BackgroundRay(
            arguments.cluster, self.limit, delay_s=delay_s, on_ready=self._start_workers
        )

    def __enter__(self) -> WorkersAhead:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and Ray. Later calls do nothing."""
        try:
            if self._pool is not None:
                self._pool.close()
        finally:
            self._background.close()
            self._pool = None

    def pool(self, program: Program) -> RayPool:
        """Return the workers, which get a program to do.

        Raises:
            OneDiffError: Ray cannot be used, or the exchange of graphs cannot be opened.
        """
        from onediff_ext.store.exchange_address import open_exchange

        self.times.mark("plan")
        ray, arguments = self._background.ready(), self._arguments
        exchange: Any = None  # the workers of one machine share its store
        if arguments.graphs is not None:
            exchange = open_exchange(arguments.graphs, trust=arguments.trust)
        elif arguments.cluster is not None and not arguments.eager:
            exchange = RayGraphs.start(ray)
        assert self._pool is not None
        self._pool.use(program, exchange)
        return self._pool

    def _start_workers(self, ray: Any) -> None:
        self.times.mark("Ray")
        self._pool = RayPool(ray, prepare=partial(prepare_worker, self._arguments, self.identity))
        self._pool.start_ahead(self.limit)
