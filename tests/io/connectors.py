"""Connectors in the shape of Bytewax's, without Bytewax; files tell what they did."""

from __future__ import annotations

import zlib


class Notes:
    """Lines that workers append to a file, for the test to read."""

    def __init__(self, path):
        self.path = path

    def add(self, line):
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    @property
    def lines(self):
        return self.path.read_text().splitlines() if self.path.exists() else []


class Numbers:
    """A source of `count` numbers in each of some partitions, in batches."""

    def __init__(self, counts, *, batch_size=2, notes=None, awake=None):
        self.counts = counts
        self.batch_size = batch_size
        self.notes = notes
        self.awake = awake

    def list_parts(self):
        return list(self.counts)

    def build_part(self, step_id, for_part, resume_state):
        return NumbersPartition(self, step_id, for_part, resume_state or 0)


class NumbersPartition:
    def __init__(self, source, step_id, part, position):
        self.source, self.step_id, self.part = source, step_id, part
        self.position = position
        self.is_closed = False

    def next_batch(self):
        start, count = self.position, self.source.counts[self.part]
        if start >= count:
            raise StopIteration
        self.position = min(start + self.source.batch_size, count)
        return [f"{self.part}:{n}" for n in range(start, self.position)]

    def next_awake(self):
        return None if self.source.awake is None else self.source.awake()

    def snapshot(self):
        assert not self.is_closed
        return self.position

    def close(self):
        self.is_closed = True
        if self.source.notes is not None:
            self.source.notes.add(f"closed {self.step_id} {self.part}")


class Lines:
    """A sink of values as lines of files; resumes by cutting off what came later."""

    def __init__(self, folder, num_parts, *, notes=None):
        self.folder = folder
        self.num_parts = num_parts
        self.notes = notes

    def list_parts(self):
        return [f"part-{index}" for index in range(self.num_parts)]

    def part_fn(self, key):
        return zlib.adler32(key.encode())

    def build_part(self, step_id, for_part, resume_state):
        return LinesPartition(self, self.folder / for_part, resume_state)

    def written(self):
        return [
            line
            for path in sorted(self.folder.iterdir())
            for line in path.read_text().splitlines()
        ]


class LinesPartition:
    def __init__(self, sink, path, resume_state):
        self.sink = sink
        self.path = path
        with path.open("a") as file:
            file.truncate(resume_state or 0)

    def write_batch(self, values):
        with self.path.open("a") as file:
            file.writelines(f"{value}\n" for value in values)

    def snapshot(self):
        return self.path.stat().st_size

    def close(self):
        if self.sink.notes is not None:
            self.sink.notes.add(f"closed {self.path.name}")


class OnePerShard:
    """A source or sink that is built once for each shard."""

    def __init__(self, notes=None):
        self.notes = notes

    def build(self, step_id, worker_index, worker_count):
        return OnePerShardPartition(self.notes, (step_id, worker_index, worker_count))


class OnePerShardPartition:
    def __init__(self, notes, built):
        self.notes, self.built, self.is_read = notes, built, False

    def next_batch(self):
        if self.is_read:
            raise StopIteration
        self.is_read = True
        return (self.built for _ in range(2))

    def write_batch(self, items):
        for item in items:
            self.notes.add(f"{self.built[1]} of {self.built[2]} got {item}")

    def close(self):
        if self.notes is not None:
            self.notes.add("closed")
