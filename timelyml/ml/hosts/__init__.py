"""What runs in a worker: its devices, the buffers on them, and the one who launches."""

from timelyml.ml.hosts.boxes import Box, HeldBox, boxes_by_device, cover, intersection
from timelyml.ml.hosts.messages import (
    MESSAGES,
    NO_NEEDS,
    Compiled,
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
    Spilled,
)

__all__ = [
    "MESSAGES",
    "NO_NEEDS",
    "Box",
    "Compiled",
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
    "Spilled",
    "boxes_by_device",
    "cover",
    "intersection",
]
