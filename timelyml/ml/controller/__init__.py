"""What stands beside the runtime's controller: who has which devices, buffers and turns."""

from timelyml.ml.controller.code_messages import NotCompiled, Register
from timelyml.ml.controller.core import Core
from timelyml.ml.controller.messages import (
    AskSlice,
    Call,
    CallProgram,
    ClientUsage,
    Closed,
    DropSlice,
    Failed,
    Fetch,
    Fetched,
    Finished,
    ObjectInfo,
    Put,
    Refused,
    RegisterProgram,
    Release,
    SliceGiven,
)
from timelyml.ml.controller.monitored import HostInfo
from timelyml.ml.controller.traced import LaunchSpan, TransferSpan

__all__ = [
    "AskSlice",
    "Call",
    "CallProgram",
    "ClientUsage",
    "Closed",
    "Core",
    "DropSlice",
    "Failed",
    "Fetch",
    "Fetched",
    "Finished",
    "HostInfo",
    "LaunchSpan",
    "NotCompiled",
    "ObjectInfo",
    "Put",
    "Refused",
    "Register",
    "RegisterProgram",
    "Release",
    "SliceGiven",
    "TransferSpan",
]
