"""Windows of event time, against definitions by brute force."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operators.test_distinct import in_epochs
from timelyml import Dataflow, Session, Sliding, Tumbling
from timelyml.errors import ConfigError, GraphError, PayloadError, TimeError


def run_windows(place, epochs, windows, *, num_shards=2, **options):
    """Records are (key, moment); returns results and late records, with times."""
    flow = Dataflow(num_shards=num_shards)
    stream = flow.source(in_epochs(epochs))
    results, late = stream.window(windows, lambda pair: pair[1], name="w", **options)
    results.collect()
    late.collect("late")
    run = place.start(flow)
    result = run.result()
    for name in ("w", "w-event_time"):
        assert run.metrics()["operators"][name]["state_entries"] == 0, name
    return flatten(result.batches("out")), flatten(result.batches("late"))


def flatten(batches):
    return [(time, record) for time, payload in batches for record in payload]


def test_tumbling_windows_close_when_a_later_moment_was_seen(cluster):
    epochs = [[("a", 1), ("b", 2)], [("a", 4)], [("a", 11)], [("b", 25)]]
    results, late = run_windows(cluster, epochs, Tumbling(10))

    assert sorted(results) == [
        (2, ("a", (0, 10), [1, 4])),
        (2, ("b", (0, 10), [2])),
        (3, ("a", (10, 20), [11])),
        (4, ("b", (20, 30), [25])),
    ]
    assert late == []


def test_the_window_of_a_key_that_never_comes_again_closes_too(cluster):
    epochs = [[("once", 1)], *([("often", 10 * n)] for n in range(1, 6))]
    results, _ = run_windows(cluster, epochs, Tumbling(10))

    assert (1, ("once", (0, 10), [1])) in results


def test_sliding_windows_share_records(cluster):
    results, _ = run_windows(cluster, [[("k", 7), ("k", 12)], []], Sliding(10, 5))

    assert sorted(record for _, record in results) == [
        ("k", (0, 10), [7]),
        ("k", (5, 15), [7, 12]),
        ("k", (10, 20), [12]),
    ]


def test_windows_may_leave_moments_out(cluster):
    results, late = run_windows(cluster, [[("k", 1), ("k", 7)]], Sliding(3, 5))

    assert [record for _, record in results] == [
        ("k", (0, 3), [1]),
        ("k", (5, 8), [7]),
    ]
    assert late == []


def test_sessions_go_on_merge_and_end(cluster):
    epochs = [[("k", 0), ("k", 9)], [("k", 5)], [("k", 30)], [("k", 60)]]
    results, _ = run_windows(cluster, epochs, Session(6), allowed_lateness=5)

    assert [(t, k, w, sorted(v)) for t, (k, w, v) in results] == [
        (2, "k", (0, 15), [0, 5, 9]),
        (3, "k", (30, 36), [30]),
        (4, "k", (60, 66), [60]),
    ]


def test_records_of_one_epoch_are_never_late_for_each_other(cluster):
    results, late = run_windows(cluster, [[("a", 100), ("a", 3)]], Tumbling(10))

    assert late == []
    assert [record for _, record in results] == [
        ("a", (0, 10), [3]),
        ("a", (100, 110), [100]),
    ]


def test_what_comes_after_its_windows_is_late_and_kept_as_it_came(cluster):
    epochs = [[("a", 5)], [("a", 20)], [("a", 6), ("a", 21)]]
    results, late = run_windows(cluster, epochs, Tumbling(10))

    assert late == [(2, ("a", 6))]
    assert (1, ("a", (0, 10), [5])) in results


@pytest.mark.parametrize(("which", "expected"), [("all", [2]), ("any", [8, 2])])
def test_what_only_some_windows_miss_can_be_told_of(cluster, which, expected):
    epochs = [[("a", 5)], [("a", 12)], [("a", 8), ("a", 2), ("a", 13)]]
    results, late = run_windows(
        cluster, epochs, Sliding(10, 5), num_shards=1, late=which
    )

    assert [moment for _, (_, moment) in late] == expected
    assert ("a", (5, 15), [5, 12, 8, 13]) in [record for _, record in results]


def test_which_records_are_late_is_checked():
    with pytest.raises(ConfigError, match="'late' out of range; got 'some'; expected"):
        Dataflow().source([1]).window(Tumbling(1), len, late="some")


def test_allowed_lateness_keeps_windows_open(cluster):
    epochs = [[("a", 5)], [("a", 14)], [("a", 6)], [("a", 15)]]
    results, late = run_windows(cluster, epochs, Tumbling(10), allowed_lateness=5)

    assert late == []
    assert results[0] == (3, ("a", (0, 10), [5, 6]))


def test_values_can_be_combined(cluster):
    epochs = [[("a", n), ("b", n)] for n in range(20)]
    results, _ = run_windows(
        cluster, epochs, Tumbling(10), value=lambda r: 1, combine=lambda a, b: a + b
    )

    assert sorted(record for _, record in results) == [
        ("a", (0, 10), 10),
        ("a", (10, 20), 10),
        ("b", (0, 10), 10),
        ("b", (10, 20), 10),
    ]


def test_event_times_may_be_datetimes(cluster):
    day = dt.datetime(2024, 5, 1, tzinfo=dt.UTC)
    minutes = [1, 59, 61]
    epochs = [[{"at": day + dt.timedelta(minutes=m), "user": "u"}] for m in minutes]
    flow = Dataflow(num_shards=2)
    results, _ = flow.source(in_epochs(epochs)).window(
        Tumbling(dt.timedelta(hours=1)),
        "at",
        key="user",
        value=lambda record: record["at"].minute,
        allowed_lateness=dt.timedelta(minutes=5),
    )
    results.collect()

    hour = dt.timedelta(hours=1)
    assert cluster.run(flow)["out"] == [
        ("u", (day, day + hour), [1, 59]),
        ("u", (day + hour, day + 2 * hour), [1]),
    ]


def test_results_come_before_the_input_ends(cluster):
    flow = Dataflow(num_shards=2)
    results, _ = flow.input("events").window(Tumbling(10), lambda pair: pair[1])
    results.probe("done").collect()

    with cluster.start(flow) as run:
        handle = run.input("events")
        handle.send([("a", 3)])
        handle.advance_to(1)
        handle.send([("b", 12)])
        handle.advance_to(2)
        run.probe("done").wait_until(1, timeout_s=10)
        assert flatten(run.batches("out")) == [(1, ("a", (0, 10), [3]))]
    assert flatten(run.result().batches("out")) == [
        (1, ("a", (0, 10), [3])),
        (2, ("b", (10, 20), [12])),
    ]


def test_a_million_keys_seen_once_leave_no_state(cluster):
    epochs = [[(1000 * n + k, n) for k in range(50)] for n in range(100)]
    flow = Dataflow(num_shards=2)
    results, _ = flow.source(in_epochs(epochs)).window(
        Session(3), lambda pair: pair[1], name="once"
    )
    gate = flow.input("gate")
    results.concat(gate).probe("end")

    run = cluster.start(flow, max_epochs_ahead=4)
    run.input("gate").advance_to(90)
    run.probe("end").wait_until(89, timeout_s=20)
    assert run.metrics()["operators"]["once"]["state_entries"] < 50 * 12
    run.input("gate").close()
    run.result()


@pytest.mark.parametrize("moment", [None, float("nan")])
def test_a_record_without_an_event_time_is_refused(cluster, moment):
    flow = Dataflow()
    flow.source([("a", moment)]).window(Tumbling(1), lambda r: r[1])[0].collect()

    with pytest.raises(TimeError, match="without an event time; got"):
        cluster.run(flow)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Tumbling(0), "'Tumbling' have 'length' out of range; got 0"),
        (lambda: Sliding(5, -1), "'Sliding' have 'step' out of range; got -1"),
        (lambda: Session("x"), "'Session' have 'gap' out of range; got 'x'"),
        (lambda: Session(dt.timedelta(0)), "'Session' have 'gap' out of range"),
    ],
)
def test_windows_without_length_are_refused(make, problem):
    with pytest.raises(ConfigError, match=problem):
        make()


def test_windows_are_refused_inside_scopes():
    def body(stream):
        return stream.window(Tumbling(1), lambda r: r)

    with pytest.raises(GraphError, match="got 'a stream 1 scopes deep'"):
        Dataflow().source([1]).iterate(body)


def test_what_is_no_windows_is_refused():
    with pytest.raises(GraphError, match="needs windows, outside of scopes; got 10"):
        Dataflow().source([1]).window(10, lambda r: r)


def fixed_windows(epochs, length, step, lateness, which):
    """Results and late records, straight from the rules, without any index."""
    clock, values, results, late = None, {}, [], []
    for epoch, records in enumerate(epochs):
        over = None if clock is None else clock - lateness
        for key, moment in records:
            windows = [
                (start, start + length)
                for start in range(-200 // step * step, 200, step)
                if start <= moment < start + length
            ]
            taken = [w for w in windows if over is None or w[1] > over]
            for window in taken:
                values.setdefault((key, window), []).append(moment)
            any_or_all = any if which == "any" else all
            if windows and any_or_all(window not in taken for window in windows):
                late.append((epoch, (key, moment)))
        moments = [moment for _, moment in records]
        clock = max(moments + ([] if clock is None else [clock]), default=None)
        for key, window in list(values):
            if clock is not None and window[1] <= clock - lateness:
                found = values.pop((key, window))
                results.append((epoch, (key, window, sorted(found))))
    rest = [(key, window, sorted(found)) for (key, window), found in values.items()]
    return results, late, rest


def session_windows(epochs, gap, lateness):
    """As above, for sessions: runs of moments of a key less than `gap` apart."""
    clock, moments, results, late = None, {}, [], []

    def is_taken(run, known, over):
        return over is None or run[-1] + gap > over or any(m in known for m in run)

    def runs(of_key):
        found = []
        for moment in sorted(of_key):
            if found and moment - found[-1][-1] < gap:
                found[-1].append(moment)
            else:
                found.append([moment])
        return found

    for epoch, records in enumerate(epochs):
        over = None if clock is None else clock - lateness
        for key in {key for key, _ in records}:
            known = moments.get(key, [])
            new = [moment for k, moment in records if k == key]
            of_runs = [(run, is_taken(run, known, over)) for run in runs(known + new)]
            moments[key] = [m for run, taken in of_runs if taken for m in run]
            late += [
                (epoch, (key, m)) for run, taken in of_runs if not taken for m in run
            ]
        seen = [moment for _, moment in records]
        clock = max(seen + ([] if clock is None else [clock]), default=None)
        for key, mine in moments.items():
            for run in runs(mine):
                if clock is not None and run[-1] + gap <= clock - lateness:
                    results.append((epoch, (key, (run[0], run[-1] + gap), run)))
                    moments[key] = [m for m in moments[key] if m not in run]
    rest = [
        (key, (run[0], run[-1] + gap), run)
        for key, mine in moments.items()
        for run in runs(mine)
    ]
    return results, late, rest


def counted(results):
    """Timed results whose lists may have been in any order."""
    return Counter((time, (k, w, tuple(sorted(v)))) for time, (k, w, v) in results)


some_epochs = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=5), max_size=8
)


def expected_of(epochs, num_shards, shape, lateness, which="all"):
    """Results, late records and what is open at the end, by definition."""
    # Producers in turn, so that the definition's order of records is that of the flow.
    in_order = [
        [r for s in range(num_shards) for r in e[s::num_shards]] for e in epochs
    ]
    if isinstance(shape, int):
        return session_windows(in_order, shape, lateness)
    return fixed_windows(in_order, *shape, lateness, which)


def windows_of(shape):
    return Session(shape) if isinstance(shape, int) else Sliding(*shape)


some_shape = st.tuples(st.integers(1, 12), st.integers(1, 12)) | st.integers(1, 9)


@settings(max_examples=80, deadline=None)
@given(
    epochs=some_epochs,
    num_shards=st.integers(1, 3),
    shape=some_shape,
    lateness=st.integers(0, 10),
    which=st.sampled_from(["all", "any"]),
)
def test_windows_equal_their_definition(epochs, num_shards, shape, lateness, which):
    flow = Dataflow(num_shards=num_shards)
    found, late = flow.source(in_epochs(epochs)).window(
        windows_of(shape),
        lambda pair: pair[1],
        allowed_lateness=lateness,
        late=which,
    )
    found.collect()
    late.collect("late")
    result = flow.run()

    results, expected_late, rest = expected_of(
        epochs, num_shards, shape, lateness, which
    )
    timed = flatten(result.batches("out"))
    last = max([n for n, e in enumerate(epochs) if e], default=-1)
    on_time = [r for r in timed if r[0] <= last]
    assert counted(on_time) == counted(results)
    assert counted((0, r) for t, r in timed if t > last) == counted(
        (0, r) for r in rest
    )
    assert Counter(flatten(result.batches("late"))) == Counter(expected_late)


def columns_in_epochs(epochs, dtype):
    """As `in_epochs`, in columns of keys and moments, two blocks an epoch."""

    def read(shard, num_shards):
        for epoch, records in enumerate(epochs):
            mine = records[shard::num_shards]
            for part in (mine[:2], mine[2:]):
                keys = np.array([key for key, _ in part], int)
                moments = np.array([moment for _, moment in part], int)
                yield epoch, {"k": keys, "at": moments.astype(dtype)}

    return read


AGGREGATES = {"n": "count", "total": ("sum", "w"), "first": ("min", "at")}


def with_weights(columns):
    return {**columns, "w": whole(columns["at"]) * 3}


def whole(column):
    if column.dtype.kind == "M":
        column = column.astype("M8[s]")
    return column.astype(np.int64)


def rows_in_time(batches):
    """Rows of columns with their times, as tuples of plain numbers."""
    return [
        (time, row)
        for time, payload in batches
        for row in zip(
            *(whole(column).tolist() for column in payload.values()),
            strict=True,
        )
    ]


def aggregated(results):
    """What aggregates are of windows that list their moments."""
    return Counter(
        (time, (k, *w, len(v), 3 * sum(v), min(v))) for time, (k, w, v) in results
    )


def check_columns(
    run, epochs, num_shards, shape, lateness, *, dtype="int64", which="all"
):
    flow = Dataflow(num_shards=num_shards)
    rows = flow.source(columns_in_epochs(epochs, dtype)).map_batch(with_weights)
    span = np.timedelta64(lateness, "s") if "M8" in dtype else lateness
    found, late = rows.window(
        in_seconds(windows_of(shape)) if "M8" in dtype else windows_of(shape),
        "at",
        key="k",
        aggregates=AGGREGATES,
        allowed_lateness=span,
        late=which,
        name="w",
    )
    found.collect()
    late.collect("late")
    result = run(flow)

    results, expected_late, rest = expected_of(
        epochs, num_shards, shape, lateness, which
    )
    last = max([n for n, e in enumerate(epochs) if e], default=-1)
    timed = rows_in_time(result.batches("out"))
    assert Counter(r for r in timed if r[0] <= last) == aggregated(results)
    assert Counter((0, r) for t, r in timed if t > last) == aggregated(
        (0, r) for r in rest
    )
    assert Counter((t, row[:2]) for t, row in rows_in_time(result.batches("late"))) == (
        Counter(expected_late)
    )


def in_seconds(windows):
    """The same windows, of datetimes."""
    lengths = {
        each.name: dt.timedelta(seconds=getattr(windows, each.name))
        for each in dataclasses.fields(windows)
        if each.name != "origin"
    }
    return type(windows)(**lengths)


@settings(max_examples=120, deadline=None)
@given(
    epochs=some_epochs,
    num_shards=st.integers(1, 3),
    shape=some_shape,
    lateness=st.integers(0, 10),
    which=st.sampled_from(["all", "any"]),
)
def test_windows_of_columns_equal_their_definition(
    epochs, num_shards, shape, lateness, which
):
    check_columns(
        lambda flow: flow.run(), epochs, num_shards, shape, lateness, which=which
    )


EPOCHS = [[(0, 3), (1, 9), (0, 8)], [(1, 21)], [(0, 12), (1, 1), (0, 30)], [(2, 44)]]


@pytest.mark.parametrize("shape", [(10, 10), (10, 5), (3, 5), 6], ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "M8[s]"])
def test_windows_of_columns_equal_their_definition_everywhere(cluster, shape, dtype):
    check_columns(cluster.run, EPOCHS, 2, shape, 4, dtype=dtype)


def test_open_windows_of_columns_are_state_that_goes_with_them(cluster):
    flow = Dataflow(num_shards=2)
    rows = flow.source(columns_in_epochs([[(1, 5)], [(1, 50)], []], "int64"))
    found, _ = rows.window(
        Tumbling(10), "at", key="k", aggregates={"n": "count"}, name="w"
    )
    found.collect()
    run = cluster.start(flow)

    assert [
        {name: column.tolist() for name, column in payload.items()}
        for _, payload in run.result().batches("out")
    ] == [
        {"k": [1], "start": [0], "end": [10], "n": [1]},
        {"k": [1], "start": [50], "end": [60], "n": [1]},
    ]
    assert run.metrics()["operators"]["w"]["state_entries"] == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"key": None}, "got 'at' and None"),
        ({"event_time": len}, "got <built-in function len> and 'k'"),
        ({"value": len}, "got value or combine"),
        ({"aggregates": {"start": "count"}}, r"two columns of one name: \['start'\]"),
        ({"aggregates": {"n": "median"}}, "cannot make column 'n'; got 'median'"),
    ],
)
def test_aggregates_of_windows_that_do_not_fit_are_refused(options, problem):
    given = {"event_time": "at", "key": "k", "aggregates": {"n": "count"}, **options}
    with pytest.raises(ConfigError, match=problem):
        Dataflow().source([1]).window(Tumbling(1), **given)


@pytest.mark.parametrize(
    ("moments", "error", "problem"),
    [
        (np.array([1.0, np.nan]), TimeError, "without an event time; got .*nan"),
        (np.array(["2024-01-01", "NaT"], "M8[s]"), TimeError, "without an event time"),
        (
            np.array([1, 2**63], np.uint64),
            TimeError,
            f"beyond the last one; got {2**63}",
        ),
        (np.array(["a", "b"]), PayloadError, "cannot take column 'at' as event times"),
        (np.zeros((2, 2)), PayloadError, r"float64 in rows of shape \[2\]"),
    ],
)
def test_columns_without_event_times_are_refused(cluster, moments, error, problem):
    flow = Dataflow()
    rows = flow.source({"k": np.zeros(2, int), "at": moments})
    rows.window(Tumbling(1), "at", key="k", aggregates={"n": "count"})[0].collect()

    with pytest.raises(error, match=problem):
        cluster.run(flow)


def test_records_of_one_epoch_lead_each_other_to_an_open_session(cluster):
    chain = [("k", 41), ("k", 46), ("k", 51), ("k", 20)]
    results, late = run_windows(
        cluster, [[("k", 55)], [("k", 60)], chain], Session(6), num_shards=1
    )

    assert late == [(2, ("k", 20))]
    assert [(t, w, sorted(v)) for t, (_, w, v) in results] == [
        (3, (41, 66), [41, 46, 51, 55, 60])
    ]


@given(st.integers(-50, 50), st.integers(1, 9), st.integers(-5, 5))
def test_tumbling_windows_are_sliding_ones_of_a_whole_step(moment, length, origin):
    tumbling = Tumbling(length, origin).windows_of(moment)

    assert tumbling == Sliding(length, length, origin).windows_of(moment)
    ((start, end),) = tumbling
    assert start <= moment < end
    assert (start - origin) % length == 0
