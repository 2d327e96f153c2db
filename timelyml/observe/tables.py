"""Tables of what there is on a cluster and who takes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from timelyml.ml import ClientUsage, HostInfo, ObjectInfo

PIPED_WIDTH = 240
"""Columns where no terminal says how many there are, so that nothing is cut."""


def objects_table(objects: Iterable[ObjectInfo]) -> Table:
    """Return a table of logical buffers, a line for each."""
    table = _table(
        "object", "owner", "published", "what", "state", "type", "sharding", "island",
        numbers=("on devices", "on hosts", "references"),
    )  # fmt: skip
    for each in objects:
        table.add_row(
            each.name,
            "-" if each.owner is None else f"client {each.owner}",
            ", ".join(each.names) or "-",
            each.label,
            each.state,
            f"{each.dtype}[{','.join(map(str, each.shape))}]",
            ", ".join(map(str, each.spec)) or "whole",
            each.island,
            decimal(each.device_bytes),
            decimal(each.host_bytes),
            str(each.num_references),
        )
    return table


def usage_table(clients: Iterable[ClientUsage]) -> Table:
    """Return a table of what clients take, a line for each."""
    numbers = (
        "weight", "priority", "device time", "launches", "objects", "on devices",
        "on hosts", "rows routed", "idle shards",
    )  # fmt: skip
    table = _table("client", numbers=numbers)
    for each in clients:
        table.add_row(
            "none" if each.client is None else f"client {each.client}",
            str(each.weight),
            str(each.priority),
            f"{each.device_s:.3f} s",
            str(each.num_launches),
            str(each.num_objects),
            decimal(each.device_bytes),
            decimal(each.host_bytes),
            str(each.num_rows),
            str(each.num_idle_shards),
        )
    return table


def hosts_table(hosts: Iterable[HostInfo]) -> Table:
    """Return a table of worker processes that have devices, a line for each."""
    numbers = (
        "process", "devices", "slices", "functions", "programs", "values", "launches",
        "upkeep", "open epochs",
    )  # fmt: skip
    table = _table("host", "island", numbers=numbers)
    for each in hosts:
        counts = (
            each.process_id,
            each.num_devices,
            each.num_slices,
            each.num_functions,
            each.num_programs,
            each.num_buffers,
            each.num_launches,
            each.epoch,
            each.num_open_epochs,
        )
        table.add_row(f"worker {each.host}", each.island, *map(str, counts))
    return table


def show(table: Table, file: TextIO) -> None:
    """Write a table; as wide as it needs to be if the file is no terminal."""
    console = Console(file=file)
    if not console.is_terminal:
        console = Console(file=file, width=PIPED_WIDTH)
    console.print(table)


def _table(*columns: str, numbers: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table
