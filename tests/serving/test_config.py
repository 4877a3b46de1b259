"""The flags of a group of processes."""

import importlib.util

import pytest

from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.config import ModelConfig
from serving.config import ServerConfig


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("node0:5000", ("node0", 5000)),
        ("[::1]:1", ("::1", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
    ],
)
def test_the_address_of_node_rank_0(address, expected):
    assert ServerConfig(nnodes=2, dist_init_addr=address).dist_init_address == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"nnodes": 0}, "--nnodes must be at least 1, got 0"),
        ({"node_rank": 1}, "--node-rank must be between 0 and 0 with --nnodes 1, got 1"),
        ({"nnodes": 2, "node_rank": -1}, "--node-rank must be between 0 and 1 .* got -1"),
        ({"nnodes": 2}, r"--nnodes \(2\) above 1 needs --dist-init-addr, got none"),
        (
            {"ep_size": 3, "nnodes": 2, "dist_init_addr": "a:1"},
            r"--ep-size \(3\) must be divisible",
        ),
        (
            {"moe_a2a_backend": "reference", "nnodes": 2, "dist_init_addr": "a:1"},
            "--moe-a2a-backend reference moves tokens within one process, --nnodes is 2",
        ),
        (
            {"tbo_min_decode_requests": 8},
            r"--tbo-min-decode-requests \(8\) needs --enable-two-batch-overlap",
        ),
        ({"eplb_rebalance_num_iterations": 5}, r"num-iterations \(5\) needs --enable-eplb, which"),
        (
            {"enable_eplb": True, "eplb_rebalance_num_iterations": 0},
            "--eplb-rebalance-num-iterations must be at least 1, got 0",
        ),
        (
            {"enable_eplb": True, "eplb_rebalance_layers_per_chunk": 0},
            "--eplb-rebalance-layers-per-chunk must be at least 1, got 0",
        ),
        *(
            (
                {"enable_eplb": True, "eplb_min_rebalancing_utilization_threshold": threshold},
                f"threshold must be above 0 and at most 1, got {threshold}$",
            )
            for threshold in (0.0, 1.5)
        ),
        ({"dist_init_addr": "a:1"}, "--dist-init-addr is for --nnodes above 1, got a:1"),
        *(
            ({"nnodes": 2, "dist_init_addr": text}, f"must be HOST:PORT .* got {text}$")
            for text in ("host", "host:", ":5", "host:0", "host:65536", "host:x")
        ),
    ],
)
def test_what_does_not_fit_is_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**flags)


def test_a_transfer_backend_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed: `pip install jaxmoe\[nixl\]`"):
        ServerConfig(disaggregation_transfer_backend="nixl")


def test_the_fingerprint_is_what_all_nodes_share():
    common = {"nnodes": 2, "dist_init_addr": "a:1"}
    first = ServerConfig(**common)
    second = ServerConfig(**common, node_rank=1, model_path="/elsewhere", log_level="error")
    assert first.fingerprint == second.fingerprint
    other = ServerConfig(**common, page_size=32)
    assert set(first.fingerprint.items()) ^ set(other.fingerprint.items()) == {
        ("--page-size", "64"),
        ("--page-size", "32"),
    }


def test_limits_are_divided_over_the_ranks_of_all_nodes():
    model = ModelConfig.load(EMBEDDED_MODEL)
    config = ServerConfig(
        nnodes=2, dist_init_addr="a:1", max_running_requests=24, max_total_tokens=16 * 1024,
        context_length=512,
    )  # fmt: skip
    limits = config.engine_limits(model, num_ranks=16)
    assert (limits.max_running, limits.num_pages) == (2, 1 + 1024 // 64)
