"""Replaying a captured stream, on any number of workers and shards.

Each shard plays some of the tapes. What it may still send follows the progress on
them: it starts with one epoch at the minimum for each tape, and ends when all are over.

Source:
    timely dataflow (replay).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from timelyml.errors import ConfigError, TapeError
from timelyml.exchange import Codec
from timelyml.graph import GraphBuilder, Placement, StreamRef
from timelyml.operators.addresses import Address, Place, addresses_of
from timelyml.operators.asking import Asking
from timelyml.operators.operator_builder import OperatorBuilder
from timelyml.operators.tape_readers import BytesTape, FileTape, Listener, Tape
from timelyml.progress import Capability
from timelyml.runtime.operator import Logic
from timelyml.runtime.recording import TAPE_SUFFIX, Recording
from timelyml.runtime.shard import Shard
from timelyml.runtime.tape import Data, Event, Label, Progress, tape_codec

PLAYED = "played"
"""Name of the state: by tape, how many of its events were played."""


def replay(
    flow: GraphBuilder,
    source: Recording | Place,
    *,
    allow_pickle: bool = False,
    num_shards: int | None = None,
    placement: Placement | None = None,
    name: str | None = None,
) -> StreamRef:
    """Make a stream of what `capture` wrote.

    Args:
        flow: The dataflow.
        source: What `result.recording` returned; or the directory of tape files; or
            the addresses at which to listen, the same as those of the capture.
        allow_pickle: Whether to read records that only pickle can express. Reading
            them runs code of whoever wrote the tape.
        num_shards: Default: the dataflow's; the tapes are shared between them.
        placement: Which worker holds which shard.
        name: Shown in traces and errors.

    Raises:
        ConfigError: There are no tapes, or not all; or an address cannot be used.
    """
    who = name or "replay"
    player = _Player(_reels_of(who, source), allow_pickle=allow_pickle)
    builder = OperatorBuilder(
        flow,
        "replay",
        name=name,
        is_source=True,
        states=("state", PLAYED),
        num_shards=num_shards,
        placement=placement,
    )
    builder.add_output()
    logic = Logic(
        on_start=player.on_start,
        on_activate=player.on_activate,
        on_message=player.on_message,
        on_close=player.on_close,
    )
    (out,) = builder.build(logic)
    return out


Reel = bytes | Path | Address


def _reels_of(who: str, source: Any) -> list[Reel]:
    """Return what is to be played: tapes, files, or addresses."""
    if isinstance(source, Recording):
        return list(source.tapes)
    addresses = addresses_of(who, source)
    if addresses is not None:
        return list(addresses)
    paths = sorted(Path(source).glob(f"*{TAPE_SUFFIX}"))
    if not paths:
        raise ConfigError(
            f"operator {who!r} has nothing to replay; got {str(source)!r}; expected a "
            f"directory with files *{TAPE_SUFFIX}; see whether the capture is complete",
            operator=who,
        )
    return list(paths)


class _Player:
    """The tapes of one operator on one worker, by shard."""

    def __init__(self, reels: list[Reel], *, allow_pickle: bool) -> None:
        self._reels = reels
        self._allow_pickle = allow_pickle
        self._decks: dict[int, _Deck] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decks": {}}

    def on_start(self, shard: Shard) -> None:
        """Open the shard's tapes."""
        codec = tape_codec(allow_pickle=self._allow_pickle)
        mine = self._reels[shard.index :: shard.num_shards]
        num_files = len(self._reels) if isinstance(self._reels[0], Path) else None
        self._decks[shard.index] = _Deck(shard, codec, mine, num_files)
        if "capability" not in shard.state:  # it may be there, with what was played
            shard.state["capability"] = shard.initial_capability()
        shard.activate()

    def on_activate(self, shard: Shard) -> None:
        """Play one event of each tape; follow their progress."""
        capability: Capability | None = shard.state.get("capability")
        if capability is None:
            return
        deck = self._decks[shard.index]
        frontier = deck.frontier
        if frontier is None:
            self._stop(shard)
            return
        capability.downgrade(frontier)
        # By the oldest epoch that may still come, not by that of the next block: what
        # ends that epoch stands behind the block, on the same tape.
        if not shard.can_start_epoch(frontier):
            return
        if deck.play():
            deck.asking.found()
            shard.activate()
        else:
            deck.asking.ask_again(shard)

    def on_message(self, shard: Shard, body: tuple[Any, ...]) -> None:
        """End where it is, if the run is to be drained."""
        if body[0] == "stop":
            self._stop(shard)

    def on_close(self) -> None:
        """Close what is open."""
        for deck in self._decks.values():
            deck.close()

    def _stop(self, shard: Shard) -> None:
        capability: Capability | None = shard.state["capability"]
        if capability is not None:
            shard.state["capability"] = None
            self._decks[shard.index].close()
            capability.release()


class _Track:
    """One tape that is played, and the epochs that its frontier still has."""

    def __init__(self, number: int, tape: Tape, listener: Listener | None) -> None:
        self.number = number
        self.tape = tape
        self.listener = listener
        self.open = Counter({0: 1})  # the minimum, until its progress says otherwise

    def skip(self, num_played: int) -> None:
        """Read over events that were played elsewhere."""
        for _ in range(num_played):
            event = self.tape.next()
            if isinstance(event, Progress):
                self.follow(event)

    def follow(self, progress: Progress) -> None:
        """Move the frontier."""
        for epoch, delta in progress.changes:
            self.open[epoch] += delta
            if not self.open[epoch]:
                del self.open[epoch]


class _Deck:
    """The tapes that one shard plays, and how far they are together."""

    def __init__(
        self, shard: Shard, codec: Codec, reels: list[Reel], num_files: int | None
    ) -> None:
        self.asking = Asking()
        self._shard = shard
        self._num_files = num_files
        self._num_accepted = 0
        self._played = shard.state_of(PLAYED)
        self._tracks: list[_Track] = []
        self._listeners: list[Listener] = []
        for number, reel in enumerate(reels):
            if isinstance(reel, Address):
                if self._played:
                    raise self._error("a connection that was read in part elsewhere")
                self._listeners.append(Listener(codec, reel))
                continue
            tape: Tape
            if isinstance(reel, Path):
                tape = FileTape(codec, reel)
            else:
                tape = BytesTape(codec, f"{number} in memory", reel)
            track = _Track(number, tape, None)
            track.skip(self._played.get(number, 0))
            self._tracks.append(track)

    @property
    def frontier(self) -> int | None:
        """The oldest epoch that may still come; None if none can."""
        if any(not listener.is_over for listener in self._listeners):
            return 0
        return min((min(t.open) for t in self._tracks if t.open), default=None)

    def play(self) -> bool:
        """Play up to one event of each tape; False if there was none."""
        has_played = self._accept()
        for track in list(self._tracks):
            try:
                event = track.tape.next()
            except StopIteration:
                self._end(track)
                has_played = True
                continue
            if event is not None:
                self._take(event, track)
                self._played[track.number] = self._played.get(track.number, 0) + 1
                has_played = True
        return has_played

    def _accept(self) -> bool:
        has_accepted = False
        for listener in self._listeners:
            connected = None if listener.is_over else listener.accept()
            if connected is not None:
                self._num_accepted += 1
                self._tracks.append(_Track(self._num_accepted, connected, listener))
                has_accepted = True
        return has_accepted

    def _end(self, track: _Track) -> None:
        track.tape.close()
        self._tracks.remove(track)
        if track.open:
            raise self._error(
                f"the end of a tape at epoch {min(track.open)}; expected that of the "
                f"stream"
            )

    def _take(self, event: Event, track: _Track) -> None:
        match event:
            case Data(time, payload):
                self._shard.output().send(time, payload)
            case Progress():
                track.follow(event)
            case Label(_, num_shards, _):
                if track.listener is not None:
                    track.listener.learn(event)
                if self._num_files not in (None, num_shards):
                    raise self._error(
                        f"{self._num_files} tape files of {num_shards}; expected all"
                    )

    def close(self) -> None:
        """Close what is open."""
        for track in self._tracks:
            track.tape.close()
        for listener in self._listeners:
            listener.close()

    def _error(self, got: str) -> TapeError:
        who = self._shard.operator
        return TapeError(
            f"operator {who!r} cannot replay; got {got}; capture the stream again, to "
            f"the end",
            operator=who,
        )
