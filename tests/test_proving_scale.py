"""Scaling on paper: links, buckets as DDP fills them, what a schedule saves, and the record of two ranks."""

from __future__ import annotations

import itertools
import json
import socket

import pytest
import torch
from benchmarks.__main__ import RECORDS, main
from benchmarks.distributed import scale_record
from benchmarks.distributed.scale import BUCKET, Cluster, Link, Network, Overhead, save
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]

AT_ONCE = Link(bytes_per_s=1e15, latency_s=0.0)
NO_NETWORK = Cluster(name="none", ranks_per_host=1024, inside=AT_ONCE, between=AT_ONCE)
NOTHING = Overhead(rewrap_s=0.0, hop_s=0.0, num_exchanges=0)
SECONDS = (1.0, 0.8, 0.7)
"""Of an iteration with 0, 1, 2 frozen: 0.15 are the forward pass of these, 0.55 both passes of the last."""


def slow(bytes_per_s=1e6, latency_s=0.0, ranks_per_host=1):
    between = Link(bytes_per_s=bytes_per_s, latency_s=latency_s)
    return Cluster(name="slow", ranks_per_host=ranks_per_host, inside=AT_ONCE, between=between)


def network(tensors=((100_000,), (100_000,), (100_000,)), seconds=SECONDS, **more):
    return Network.measured("three", batch_size=8, seconds=seconds, tensors=tensors, **more)


def test_a_ring_moves_twice_what_there_is_and_a_tree_is_taken_where_many_wait_for_each_other():
    cluster = slow(latency_s=0.0)
    assert cluster.all_reduce_s(1e6, 2) == pytest.approx(1.0)
    assert cluster.all_reduce_s(1e6, 4) == pytest.approx(1.5)
    assert cluster.all_reduce_s(1e6, 1) == 0.0
    far = slow(latency_s=0.01)
    assert far.all_reduce_s(1e6, 1024) == pytest.approx(2.0 + 20 * 0.01)  # a ring would wait 2046 times
    assert far.all_reduce_s(1e6, 2) == pytest.approx(1.0 + 2 * 0.01)


def test_ranks_of_one_host_share_its_cable_and_reduce_among_themselves_first():
    cluster = Cluster(
        name="pairs",
        ranks_per_host=2,
        inside=Link(bytes_per_s=1e7, latency_s=0.0),
        between=Link(bytes_per_s=1e6, latency_s=0.0),
    )
    assert cluster.all_reduce_s(1e6, 2) == pytest.approx(0.1)
    assert cluster.all_reduce_s(1e6, 4) == pytest.approx(0.1 + 1.0)


def test_alone_an_iteration_takes_what_was_measured():
    found = network()
    assert [found.iteration_s(depth, NO_NETWORK, 1) for depth in range(3)] == pytest.approx(SECONDS)
    assert found.rest_s == pytest.approx(0.7 - 0.55 * 2 / 3)


def test_a_measured_time_that_rises_with_the_depth_counts_as_the_one_before():
    found = network(seconds=(1.0, 0.8, 0.9))
    assert [found.iteration_s(depth, NO_NETWORK, 1) for depth in range(3)] == pytest.approx((1.0, 0.8, 0.8))


def test_reducing_hides_behind_the_backward_pass_but_for_the_last_bucket():
    """300 kB are one bucket, full at the end of the backward pass; 3 MB are several, the first of them earlier."""
    cluster = slow()
    assert network().iteration_s(0, cluster, 2) == pytest.approx(1.0 + 0.3)
    assert network().iteration_s(2, cluster, 2) == pytest.approx(0.7 + 0.1)
    large = network(tensors=((100_000,), (100_000,), (2_000_000,)))
    hidden = 0.3  # of the two seconds of the last module, while the two before it have their backward passes
    assert large.iteration_s(0, cluster, 2) == pytest.approx(1.0 + 2.0 - hidden + 0.2)


def test_buckets_are_those_that_data_parallel_training_fills():
    model = nn.Sequential(*(nn.Linear(1200, 1200) for _ in range(9)))  # 5.8 MB each
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        wrapped, sizes = DistributedDataParallel(model), []

        def count(_, bucket):
            sizes.append(bucket.buffer().numel() * 4)
            return default_hooks.allreduce_hook(None, bucket)

        count.__annotations__ = {}
        wrapped.register_comm_hook(None, count)
        for _ in range(3):  # the first lays them out anew
            sizes.clear()
            wrapped(torch.randn(2, 1200)).sum().backward()
    finally:
        distributed.destroy_process_group()
    tensors = [[entry.numel() * 4 for entry in layer.parameters()] for layer in model]
    found = network(tensors=tensors, seconds=(1.0, 0.9, 0.8))
    assert [size for _, size in found._buckets(0)] == sizes
    assert max(sizes) >= BUCKET and len(sizes) == 3
    full = [now for now, _ in found._buckets(0)]
    assert full == sorted(full) and full[-1] == pytest.approx(sum(piece.backward_s for piece in found.pieces))


def test_a_schedule_saves_for_as_long_as_it_freezes_and_pays_for_what_egeria_does():
    given = {"schedule": ((0.5, 1), (0.8, 2)), "num_steps": 1000}
    free = save(network(), NO_NETWORK, 4, overhead=NOTHING, **given)
    assert free.saved == pytest.approx(0.3 * 0.2 + 0.2 * 0.3, abs=1e-6)
    assert free.by_depth == pytest.approx((0.0, 0.2, 0.3), abs=1e-6)
    own = Overhead(rewrap_s=5.0, hop_s=0.1, num_exchanges=100)
    dear = save(network(), NO_NETWORK, 4, overhead=own, **given)
    assert dear.overhead == pytest.approx((2 * 5.0 + 100 * 0.1 * 3) / 1000, abs=1e-6)
    assert dear.saved == pytest.approx(free.saved - dear.overhead)


def test_a_cache_spares_what_was_measured_and_a_smaller_batch_all_in_proportion():
    found = network(cached={2: 0.6})
    assert found.iteration_s(2, NO_NETWORK, 1, is_cached=True) == pytest.approx(0.6)
    assert found.iteration_s(1, NO_NETWORK, 1, is_cached=True) == pytest.approx(0.8)
    half = found.with_batch(4)
    assert half.iteration_s(2, NO_NETWORK, 1, is_cached=True) == pytest.approx(0.3)
    assert half.bytes_that_train(1) == 200_000


def test_what_reduces_much_for_its_time_saves_more_where_the_network_is_slow_and_less_the_other_way():
    front, back = ((9_000_000,), (100_000,), (100_000,)), ((100_000,), (100_000,), (9_000_000,))
    for tensors, gains in ((front, True), (back, False)):
        saved = [
            save(network(tensors=tensors), cluster, 2, schedule=((0.5, 2),), num_steps=10, overhead=NOTHING).saved
            for cluster in (NO_NETWORK, slow())
        ]
        assert (saved[1] > saved[0]) is gains


def test_all_that_was_measured_on_two_ranks_is_simulated_within_15_percent():
    points = list(scale_record.two_rank_points(RECORDS / scale_record.TWO_RANKS))
    assert len(points) == 24
    assert max(abs(point.error) for point in points) <= 0.15
    slow_cable = [point for point in points if point.place == scale_record.SLOW_CABLE]
    assert max(abs(point.error) for point in slow_cable) <= 0.08, "these took no part in what the rest is taken from"


def test_the_command_writes_a_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scale_record, "measure_exchange", lambda: {"one host": 2e-4})
    assert main(["scale", "--steps", "1000", "--out", str(tmp_path)]) == 0
    assert "24 of 24 within 15%" in capsys.readouterr().out
    kept = json.loads((tmp_path / "results.json").read_text())
    ranks = [[saving["num_ranks"] for saving in curve["savings"]] for curve in kept["curves"]]
    assert len(ranks) == 8 and all(row == [2**power for power in range(1, 11)] for row in ranks)
    for curve in kept["curves"]:
        shares = [saving["overhead"] for saving in curve["savings"]]
        assert all(after > before for before, after in itertools.pairwise(shares))
    assert {entry.name for entry in tmp_path.iterdir()} == {"README.md", "results.json", "weak.svg", "strong.svg"}


def test_the_command_says_what_it_needs(tmp_path, capsys):
    assert main(["scale", "--records", str(tmp_path)]) == 2
    assert scale_record.TWO_RANKS in capsys.readouterr().err
