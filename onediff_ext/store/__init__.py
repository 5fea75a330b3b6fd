"""The store: graphs on disk, and records of their builds and of the checkpoints that use them."""

from onediff_ext.store.build_history import BuildHistory, StepRecord
from onediff_ext.store.build_records import (
    BuildRecord,
    BuildRecords,
    Failure,
    LoadCheck,
    Tuning,
)
from onediff_ext.store.checkpoints import CheckpointListing, CheckpointRecords
from onediff_ext.store.content_hash import ContentHashes
from onediff_ext.store.default_root import default_root
from onediff_ext.store.eviction import PruneReport
from onediff_ext.store.graph_archive import ImportReport
from onediff_ext.store.graph_exchange import GraphExchange
from onediff_ext.store.graph_file import UnknownSchemaError
from onediff_ext.store.last_kinds import COUNTED_PICTURES, LastKinds, LastUse
from onediff_ext.store.library import GraphLibrary
from onediff_ext.store.locks import StoreBusyError
from onediff_ext.store.saved_time import SavedTime, SavedTimes
from onediff_ext.store.stored_graph import StoredGraph
from onediff_ext.store.verification import StoreProblem

__all__ = [
    "COUNTED_PICTURES",
    "BuildHistory",
    "BuildRecord",
    "BuildRecords",
    "CheckpointListing",
    "CheckpointRecords",
    "ContentHashes",
    "Failure",
    "GraphExchange",
    "GraphLibrary",
    "ImportReport",
    "LastKinds",
    "LastUse",
    "LoadCheck",
    "PruneReport",
    "SavedTime",
    "SavedTimes",
    "StepRecord",
    "StoreBusyError",
    "StoreProblem",
    "StoredGraph",
    "Tuning",
    "UnknownSchemaError",
    "default_root",
]
