"""Benchmarks run, print what they promise, and count what can be counted exactly."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from benchmarks import moe_layer
from benchmarks.pulse import pulse_graph
from benchmarks.report import Report
from benchmarks.simulated import simulate
from timelyml import Cluster


def figures_of(capsys, *argv: str) -> dict:
    assert runner.main([*argv, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_without_a_name_all_benchmarks_are_listed(capsys):
    assert runner.main([]) == 0

    assert {"latency", "progress_traffic"} <= set(runner.names())
    listed = capsys.readouterr().err
    assert all(name in listed for name in runner.names())


def test_every_benchmark_is_described():
    page = (Path(__file__).parent.parent / "docs" / "benchmarks.md").read_text()

    described = re.findall(r"^- \*\*`(\w+)`\*\*:", page, re.MULTILINE)
    assert sorted(described) == runner.names()


def test_an_unknown_name_leaves_with_2_and_lists_all(capsys):
    assert runner.main(["lateness"]) == 2

    assert "no benchmark 'lateness'; benchmarks: " in capsys.readouterr().err


def test_latency_reports_every_mode_beside_the_bare_round_trip(capsys):
    figures = figures_of(capsys, "latency", "--rounds", "1", "--epochs", "5")

    assert figures["bare_round_trip_p50_us"] > 0
    assert figures["bare_round_trip_sleeping_p50_us"] > 0
    for what in ("barrier", "epoch"):
        for where in ("1_worker", "2_processes_broadcast", "2_processes_accumulator"):
            assert figures[f"{what}_{where}_p50_us"] > 0


def test_progress_traffic_reports_real_and_simulated_clusters(capsys):
    sizes = ["--workers", "2", "--simulated", "3", "--epochs", "20"]

    figures = figures_of(capsys, "progress_traffic", *sizes)

    for mode in ("broadcast", "accumulator"):
        assert figures[f"{mode}_2_workers"] > 0
        assert figures[f"{mode}_3_workers_simulated.bytes"] > 0


def test_exchange_reports_transports_and_a_dataflow_beside_bare_zeromq():
    # In a process of its own: what `multiprocessing` starts stays until its program ends.
    program = [sys.executable, "-m", "benchmarks", "exchange_bandwidth", "--json"]
    sizes = ["--rounds", "1", "--mib", "16"]
    done = subprocess.run([*program, *sizes], capture_output=True, check=True)
    figures = json.loads(done.stdout)

    for ways in ("one_way", "both_ways"):
        for name in (f"ipc_{ways}_4_mib", f"tcp_{ways}_4_mib", f"ipc_exchange_{ways}"):
            assert figures[name] > 0
            assert figures[f"{name}.ratio_to_bare"] > 0
    aims = {
        name.removesuffix(".is_met") for name in figures if name.endswith(".is_met")
    }
    assert "ipc_exchange_one_way" in aims
    assert not [name for name in aims if "both_ways" in name]


def test_more_workers_than_cores_do_the_same_work(capsys):
    sizes = ["--rounds", "1", "--blocks", "4", "--epochs", "3", "--times", "1", "2"]

    figures = figures_of(capsys, "oversubscribed", *sizes)

    cores = len(os.sched_getaffinity(0))
    for workers in (cores, 2 * cores):
        assert figures[f"sum_by_key_{workers}_workers_s"] > 0
        assert figures[f"epoch_{workers}_workers_ms.ratio_by_worker"] > 0


def test_bytewax_peers_report_both_engines_on_the_same_work(capsys):
    pytest.importorskip("bytewax", reason="no wheels for this Python")
    cases = ["--case", "word_count", "map_and_redistribute", "--processes", "1"]

    figures = figures_of(
        capsys, "bytewax_peers", "--rounds", "1", "--scale", "0.01", *cases
    )

    for case in ("word_count", "map_and_redistribute"):
        for name in (f"{case}_1_worker.bytewax", f"{case}_1_worker"):
            assert figures[name] > 0
        assert figures[f"{case}_1_worker.ahead"] > 0


def test_engines_that_disagree_are_not_compared():
    pytest.importorskip("bytewax", reason="no wheels for this Python")
    from benchmarks.bytewax_peers import CASES, check_equal
    from benchmarks.peers.runs import Outcome

    check_equal(CASES[0], [Outcome(1.0, {"a": 2}), Outcome(2.0, {"a": 2})])
    for other in ({"a": 3}, {}, {"a": 2, "b": 1}):
        with pytest.raises(ValueError, match="the engines disagree on word_count"):
            check_equal(CASES[0], [Outcome(1.0, {"a": 2}), Outcome(1.0, other)])


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_traffic_is_quadratic_in_broadcast_mode_and_linear_in_accumulator_mode(
    num_workers,
):
    """Twice per epoch each worker has news: it gave the epoch up; it took a record."""

    def per_epoch(mode):
        fewer, more = (
            simulate(pulse_graph(num_epochs=n, senders="all"), num_workers, mode)
            for n in (2, 5)
        )
        return more.per_epoch(fewer, 3)

    broadcast, accumulator = per_epoch("broadcast"), per_epoch("accumulator")

    pairs = num_workers * (num_workers - 1)
    assert broadcast.messages + broadcast.riders == 2 * pairs
    assert (accumulator.messages, accumulator.riders) == (4 * num_workers, 0)


def test_a_pulse_closes_each_epoch_once_on_every_shard():
    with Cluster(2, mode="threads") as cluster:
        result = cluster.run(pulse_graph(num_epochs=7, senders="all"))

    assert sorted((shard, len(times)) for shard, times in result["seconds"]) == [
        (0, 7),
        (1, 7),
    ]


def test_a_report_prints_one_flat_object_with_ratios_and_verdicts(capsys):
    report = Report("title", reference="bare")
    report.add("bare", 2.0, "us")
    report.add("ours", 5.0, "us", target="within 3 x", is_met=True, p99=9.0)
    report.add("bytes", 7.0, "bytes")

    report.show(as_json=True)

    figures = json.loads(capsys.readouterr().out)
    assert figures.pop("machine")
    assert figures == {
        "bare": 2.0,
        "bare.ratio": 1.0,
        "ours": 5.0,
        "ours.p99": 9.0,
        "ours.ratio": 2.5,
        "ours.is_met": True,
        "bytes": 7.0,
    }


def test_columns_across_times_are_measured_beside_records(capsys):
    figures = figures_of(capsys, "over_time", "--rounds", "1", "--rows", "2000")

    for kind in ("tumbling", "sliding", "session", "join"):
        assert figures[f"{kind}_columns"] > 0
        assert figures[f"{kind}_records"] > 0


def test_dispatch_reports_calls_and_programs_beside_plain_jax(capsys):
    sizes = ["--rounds", "1", "--steps", "128", "--devices", "2"]

    figures = figures_of(capsys, "dispatch", *sizes)

    assert figures["jax_2_devices_per_s.ratio_to_jax"] == 1
    for what in ("jax_bare", "op_by_op", "chained", "chained_fuse", "fused"):
        assert figures[f"{what}_2_devices_per_s"] > 0


@pytest.mark.slow
def test_a_moe_layer_is_measured_beside_what_bounds_it(capsys):
    figures = figures_of(capsys, "moe_layer", "--small", "--rounds", "1")

    for kind in ("plain", "bare", "dense", "layer_1_worker", "layer_2_workers"):
        for experts in (2, 4):
            assert figures[f"{kind}_{experts}_experts_ms"] > 0
    assert figures["layer_2_workers_growth_2_to_4"] > 0
    assert figures["layer_1_worker_4_experts_ms.ahead_of_dense"] > 0


@pytest.mark.slow
def test_a_layer_that_is_not_the_dense_one_is_not_measured():
    size = moe_layer.Size(tokens=16, width=4, hidden=4, experts=(2,), workers=(1,))
    with Cluster(1, mode="inline") as cluster:
        layer = moe_layer.Layer.of(size, 2, [cluster])
        other = moe_layer.dense_layer(layer.moe, *moe_layer.draw(size, 2, seed=1))
        wrong = dataclasses.replace(layer, compiled={**layer.compiled, "dense": other})

        with pytest.raises(ValueError, match="moe_layer: layer_1_worker is another"):
            wrong.round(is_first=True)


@pytest.mark.slow
def test_the_share_of_routing_and_progress_is_that_of_a_trace(capsys):
    figures = figures_of(capsys, "routing_fraction", "--small", "--steps", "8")

    parts = ("model", "other_operators", "progress", "routing", "waiting")
    assert sum(figures[part] for part in parts) == pytest.approx(100, abs=0.1)
    together = figures["routing"] + figures["progress"]
    assert figures["routing_and_progress"] == pytest.approx(together)
    busy = 100 - figures["waiting"]
    assert figures["routing_and_progress.of_busy"] == pytest.approx(
        100 * together / busy
    )


def test_pipelines_reports_both_kinds_of_dispatch(capsys):
    figures = figures_of(capsys, "pipelines", "--rounds", "1", "--stages", "2", "3")

    for stages in (2, 3):
        for dispatch in ("parallel", "sequential"):
            assert figures[f"{dispatch}_{stages}_stages_ms"] > 0


@pytest.mark.slow
def test_training_is_measured_beside_plain_jax_and_on_two_islands(capsys):
    sizes = ["--small", "--rounds", "1", "--seconds", "0.05"]

    figures = figures_of(capsys, "training", *sizes)

    for name in ("step_tiny", "two_islands"):
        assert figures[f"{name}_tokens_per_s"] > 0
        assert figures[f"{name}_reference_tokens_per_s.ratio"] == 1


@pytest.mark.slow
def test_pipelines_train_beside_the_model_in_one_piece(capsys):
    sizes = ["--rounds", "1", "--steps", "1", "--stages", "2", "--paced"]

    figures = figures_of(capsys, "training_pipelines", *sizes)

    for what in ("unpipelined", "spmd", "one_island", "islands"):
        assert figures[f"{what}_2_stages_tokens_per_s"] > 0


@pytest.mark.slow
def test_bubbles_on_paced_devices_are_no_smaller_than_their_formulas(capsys):
    figures = figures_of(
        capsys, "training_pipelines", "--stages", "--paced", "2", "--pace-ms", "40"
    )

    for name in ("gpipe", "1f1b", "zb-h1", "interleaved", "interleaved-zb", "zbv"):
        bubble = figures[f"bubble_{name}_2_ranks"]
        assert bubble >= 0.99 * figures[f"bubble_{name}_2_ranks.formula"]
