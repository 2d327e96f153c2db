"""The resource manager: which devices there are, and who may use which."""

from timelyml.ml.resources.groups import DeviceGroups, Split
from timelyml.ml.resources.inventory import Device, Inventory
from timelyml.ml.resources.manager import ResourceManager
from timelyml.ml.resources.requests import (
    Displaced,
    Freed,
    Granted,
    Prepare,
    Released,
    Remapped,
    ResourceEffect,
    SliceRequest,
    SliceState,
    TimedOut,
    Vacate,
)

__all__ = [
    "Device",
    "DeviceGroups",
    "Displaced",
    "Freed",
    "Granted",
    "Inventory",
    "Prepare",
    "Released",
    "Remapped",
    "ResourceEffect",
    "ResourceManager",
    "SliceRequest",
    "SliceState",
    "Split",
    "TimedOut",
    "Vacate",
]
