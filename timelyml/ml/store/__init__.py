"""The object store's decisions: who holds which buffer, and who gets memory when."""

from timelyml.ml.store.directory import Directory
from timelyml.ml.store.entries import NOBODY, Entry
from timelyml.ml.store.gauges import Gauge, Label
from timelyml.ml.store.ledger import Ledger
from timelyml.ml.store.values import (
    CLIENT_BITS,
    Admit,
    Buffer,
    BufferState,
    Claim,
    Delete,
    DirectoryEffect,
    Known,
    LedgerEffect,
    Refuse,
    Spill,
    Vacant,
)

__all__ = [
    "CLIENT_BITS",
    "NOBODY",
    "Admit",
    "Buffer",
    "BufferState",
    "Claim",
    "Delete",
    "Directory",
    "DirectoryEffect",
    "Entry",
    "Gauge",
    "Known",
    "Label",
    "Ledger",
    "LedgerEffect",
    "Refuse",
    "Spill",
    "Vacant",
]
