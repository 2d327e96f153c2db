"""What a call takes: which arguments move or are copied, and how much memory it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from timelyml.ml.controller.records import SliceRecord
from timelyml.ml.controller.work import CallRecord, Work
from timelyml.ml.functions import Computation, MemoryNeeds
from timelyml.ml.store import Claim, Directory, Entry
from timelyml.progress import new_tuple


def placed_args(
    args: Sequence[Entry],
    computation: Computation,
    slice_: SliceRecord,
    slices: Mapping[str, SliceRecord],
) -> tuple[bool, ...]:
    """Say of each argument whether it lies where the computation wants it.

    On a slice of the same shape on the same devices it does.
    """
    return tuple(
        [
            entry.buffer.spec == spec and slice_.is_like(slices[entry.buffer.placement])
            for entry, spec in zip(args, computation.in_specs, strict=True)
        ]
    )


def copied_args(
    client: int,
    args: Sequence[Entry],
    is_placed: Sequence[bool],
    computation: Computation,
    directory: Directory,
) -> tuple[int, ...]:
    """Return the positions of donated arguments to be copied, as others use them.

    Calls before this one need no copy: it is ordered after them, and XLA waits.
    """
    if not computation.donated:
        return ()
    times = Counter(map(id, args))
    return tuple(
        [
            position
            for position in computation.donated
            if is_placed[position]
            and (
                times[id(args[position])] > 1
                or not directory.may_donate(client, args[position])
            )
        ]
    )


def claim_of(call: CallRecord, slice_: SliceRecord, needs: MemoryNeeds) -> Claim:
    """Return the memory that a call needs.

    Args:
        call: The call.
        slice_: Where it runs.
        needs: What XLA says of its computation.
    """
    total = needs.new_bytes
    args, is_placed = call.args, call.is_placed
    # A copy of each, or what the claim takes over.
    kept = [args[each].buffer for each in call.computation.donated if is_placed[each]]
    total += sum([each.size_bytes for each in kept])
    for position, entry in enumerate(args if call.exported else ()):
        if not is_placed[position]:
            of, spec = entry.buffer.type, call.computation.in_specs[position]
            total += slice_.new_buffer(0, of, spec).size_bytes
    outputs = tuple([entry.buffer for entry in call.results])
    moved: tuple[int, ...] = ()
    if call.exported:
        pairs = zip(call.args, call.is_placed, strict=True)
        placed = {entry.number for entry, is_placed in pairs if is_placed}
        moved = tuple({entry.number for entry in call.exported} - placed)
    fields = (
        call.client,
        call.program,
        tuple([entry.number for entry in call.uses]),
        call.taken,
        outputs,
        {call.slice: max(0, total - sum([each.size_bytes for each in outputs]))},
        f"a call of {call.computation.name!r}",
        moved,
    )
    claim: Claim = new_tuple(Claim, fields)
    return claim


def waits_of(work: Work, works: Mapping[str, Work]) -> list[Work]:
    """Return the work to be ordered before other work that might not be otherwise.

    On one slice the work of a client that waits for nothing is ordered as it comes,
    unless it is ordered step by step.
    """
    return [
        each
        for each in work.before
        if each.program in works
        and not each.is_ordered
        and (
            each.num_waits
            or not each.is_in_turn
            or (each.slice, each.client) != (work.slice, work.client)
        )
    ]


def work_before(work: Work, works: Mapping[str, Work]) -> list[Work]:
    """Return the work that makes what other work takes, or reads what it destroys.

    And what is known to come before it already, as it was declared to.
    """
    names = [each.program for each in work.before]
    names += [each.producer for each in work.args if each.producer is not None]
    if read := [each for each in work.args if each.readers is not None]:
        taken = set(work.taken)
        names += [
            x for each in read if each.number in taken for x in each.readers or ()
        ]
    found = [works.get(name) for name in dict.fromkeys(names)]
    parent = work.parent
    return [
        each
        for each in found
        if each is not None and not each.is_ordered and each is not parent
    ]


def error_of(entries: Iterable[Entry]) -> bytes | None:
    """Return why one of these buffers has no value, if so."""
    for entry in entries:
        if entry.error is not None:
            return entry.error
    return None
