"""The fluent API as a whole: building, describing, running anywhere, again and again."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys

import pytest

import timelyml
from timelyml import Cluster, Dataflow, Loop, Stream
from timelyml.errors import ConfigError, DeadlineError, GraphError


def word_count(lines):
    flow = Dataflow("words")
    words = flow.source(lines).flat_map(str.split)
    words.reduce(lambda w: w, lambda a, b: a + b, value=lambda w: 1).collect()
    return flow


def test_a_flow_can_be_run_again_and_again(cluster):
    flow = word_count(["a b", "a"])

    results = [sorted(cluster.run(flow)["out"]) for _ in range(3)]

    assert results == [[("a", 2), ("b", 1)]] * 3


def test_a_flow_can_grow_between_runs(cluster):
    flow = Dataflow()
    stream = flow.source([1, 2]).collect("first")
    assert dict(cluster.run(flow)) == {"first": [1, 2]}

    stream.map(str).collect("second")
    assert dict(cluster.run(flow)) == {"first": [1, 2], "second": ["1", "2"]}


def test_flows_run_side_by_side_on_one_cluster(cluster):
    runs = [cluster.start(word_count(["x " * n])) for n in range(1, 6)]

    assert [run.result()["out"] for run in runs] == [[("x", n)] for n in range(1, 6)]


def test_run_without_workers_stays_in_the_calling_process():
    flow = Dataflow()
    flow.source([0]).map(lambda _: os.getpid()).collect()

    assert flow.run()["out"] == [os.getpid()]


def test_run_with_workers_uses_processes_of_its_own():
    flow = Dataflow()
    here = flow.source(range(2)).exchange(lambda n: n).map(lambda _: os.getpid())
    here.collect()

    pids = set(flow.run(workers=2)["out"])
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_run_may_use_threads_instead():
    flow = word_count(["a a"])

    assert flow.run(workers=3, mode="threads")["out"] == [("a", 2)]


def test_a_started_run_can_be_awaited():
    async def main():
        return await word_count(["a"]).start()

    assert asyncio.run(main())["out"] == [("a", 1)]


def test_options_of_the_run_are_passed_on(cluster):
    flow = Dataflow()
    flow.input("silent").collect()

    run = cluster.start(flow, timeout_s=0.2)
    run.input("silent").advance_to(1)
    with pytest.raises(DeadlineError, match="not complete"):
        run.result()


def test_unknown_options_are_refused(cluster):
    with pytest.raises(ConfigError, match="no option of that name; got 'speed'"):
        cluster.run(word_count([]), speed=9)


def test_a_cluster_and_options_of_another_are_refused():
    cluster = Cluster(1, mode="inline")

    with pytest.raises(ConfigError, match="has its workers already; got mode too"):
        word_count([]).run(cluster=cluster, mode="threads")


def test_a_flow_describes_itself_without_running():
    text = word_count([]).describe()

    assert "reduce" in text
    assert "exchange by key" in text
    assert word_count([]).to_mermaid().startswith("flowchart")


def test_what_is_no_stream_is_refused():
    with pytest.raises(GraphError, match="needs a stream to read; got 'words'"):
        Dataflow().source([1]).concat("words")


def test_results_do_not_depend_on_the_seed_of_hashes():
    code = (
        "from tests.test_fluent import word_count\n"
        "words = ['pear fig plum', 'kiwi fig lime', 'plum pear']\n"
        "flow = word_count(words)\n"
        "flow.builder.num_shards = 3\n"
        "print(flow.run(timeout_s=30)['out'])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize("cls", [Dataflow, Loop, Stream])
def test_every_method_has_a_docstring_of_its_own(cls):
    silent = [
        name
        for name, member in inspect.getmembers(cls, callable)
        if not name.startswith("_") and not inspect.getdoc(member)
    ]
    assert silent == []


def test_the_top_level_exports_exist():
    assert all(hasattr(timelyml, name) for name in timelyml.__all__)
