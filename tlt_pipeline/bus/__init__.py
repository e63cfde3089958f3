"""Redis streams: work queues with leases, broadcasts, the journal, and finding or starting a server. No
torch."""

from tlt_pipeline.bus.client import Bus
from tlt_pipeline.bus.link import BusError, BusFull, RedisUnusable, redact_url
from tlt_pipeline.bus.streams import Delivery, Outgoing

__all__ = ["Bus", "BusError", "BusFull", "Delivery", "Outgoing", "RedisUnusable", "redact_url"]
