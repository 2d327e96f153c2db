"""What runs in a worker: its devices, the buffers on them, and the one who launches."""

from timelyml.ml.hosts.boxes import Box, HeldBox, boxes_by_device, cover, intersection
from timelyml.ml.hosts.messages import (
    MESSAGES,
    Done,
    Expect,
    Export,
    Load,
    Orders,
    Piece,
    Pieces,
    Prepare,
    Present,
    Reports,
    SliceMade,
)

__all__ = [
    "MESSAGES",
    "Box",
    "Done",
    "Expect",
    "Export",
    "HeldBox",
    "Load",
    "Orders",
    "Piece",
    "Pieces",
    "Prepare",
    "Present",
    "Reports",
    "SliceMade",
    "boxes_by_device",
    "cover",
    "intersection",
]
