"""Moving data: payloads, routing, the codec, transports and credit."""

from __future__ import annotations

from timelyml.exchange.access import (
    AccessKey,
    ServerKeys,
    own_address_towards,
    split_tcp,
    tcp_endpoint,
    write_private,
)
from timelyml.exchange.codec import Codec
from timelyml.exchange.credit import CreditLedger
from timelyml.exchange.hashing import (
    destination_of,
    destinations_by_key,
    stable_hash,
)
from timelyml.exchange.inprocess import InProcessHub, InProcessTransport
from timelyml.exchange.payload import (
    Payload,
    as_payload,
    concat,
    leaves_of,
    map_columns,
    num_records,
    records_of,
    seal,
    slice_rows,
    take,
)
from timelyml.exchange.routing import Away, route, split_by_destination
from timelyml.exchange.sealing import seal_message
from timelyml.exchange.security import CurveKeys
from timelyml.exchange.sizes import size_bytes
from timelyml.exchange.spilling import SpillingQueue
from timelyml.exchange.transport import (
    CONTROLLER,
    Endpoint,
    Incoming,
    Lane,
    LinkFailure,
    Transport,
    TransportMetrics,
    Unreadable,
)
from timelyml.exchange.unread import Unread, holds_failed
from timelyml.exchange.zmq_transport import SILENCE_S, ZmqTransport

__all__ = [
    "CONTROLLER",
    "SILENCE_S",
    "AccessKey",
    "Away",
    "Codec",
    "CreditLedger",
    "CurveKeys",
    "Endpoint",
    "InProcessHub",
    "InProcessTransport",
    "Incoming",
    "Lane",
    "LinkFailure",
    "Payload",
    "ServerKeys",
    "SpillingQueue",
    "Transport",
    "TransportMetrics",
    "Unread",
    "Unreadable",
    "ZmqTransport",
    "as_payload",
    "concat",
    "destination_of",
    "destinations_by_key",
    "holds_failed",
    "leaves_of",
    "map_columns",
    "num_records",
    "own_address_towards",
    "records_of",
    "route",
    "seal",
    "seal_message",
    "size_bytes",
    "slice_rows",
    "split_by_destination",
    "split_tcp",
    "stable_hash",
    "take",
    "tcp_endpoint",
    "write_private",
]
