"""The store: graphs on disk, and what is known of the checkpoints that use them."""

from .checkpoints import CheckpointListing, CheckpointRecords
from .container import UnknownSchemaError
from .content_hash import ContentHashes
from .eviction import PruneReport
from .history import History, StepRecord
from .library import GraphLibrary
from .locks import StoreBusyError
from .root import default_root
from .stored_graph import StoredGraph
from .transfer import ImportReport
from .verdicts import Failure, Proof, Verdict, Verdicts
from .verification import StoreProblem

__all__ = [
    "CheckpointListing",
    "CheckpointRecords",
    "ContentHashes",
    "Failure",
    "GraphLibrary",
    "History",
    "ImportReport",
    "Proof",
    "PruneReport",
    "StepRecord",
    "StoreBusyError",
    "StoreProblem",
    "StoredGraph",
    "UnknownSchemaError",
    "Verdict",
    "Verdicts",
    "default_root",
]
