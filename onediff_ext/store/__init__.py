"""The store: graphs on disk, and what is known of the checkpoints that use them."""

from .checkpoints import CheckpointListing, CheckpointRecords
from .container import UnknownSchemaError
from .content_hash import ContentHashes
from .eviction import PruneReport
from .library import GraphLibrary
from .locks import StoreBusyError
from .root import default_root
from .stored_graph import StoredGraph
from .transfer import ImportReport
from .verification import StoreProblem

__all__ = [
    "CheckpointListing",
    "CheckpointRecords",
    "ContentHashes",
    "GraphLibrary",
    "ImportReport",
    "PruneReport",
    "StoreBusyError",
    "StoreProblem",
    "StoredGraph",
    "UnknownSchemaError",
    "default_root",
]
