"""The claim-check store: what is too large for a message lies here, and the message has its reference. No torch."""

from tlt_pipeline.blobs.files import FileBlobs
from tlt_pipeline.blobs.hidden_states import check_shard_size, hidden_states_root, open_hidden_states
from tlt_pipeline.blobs.redis_keys import RedisBlobs
from tlt_pipeline.blobs.store import BlobCorrupt, BlobMissing, BlobStore, BlobTooLarge

__all__ = [
    "BlobCorrupt",
    "BlobMissing",
    "BlobStore",
    "BlobTooLarge",
    "FileBlobs",
    "RedisBlobs",
    "check_shard_size",
    "hidden_states_root",
    "open_hidden_states",
]
