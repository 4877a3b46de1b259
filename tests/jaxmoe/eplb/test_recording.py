"""Recordings: their file, their law, adding up members, and what `jaxmoe eplb` makes of them."""

import dataclasses
import json

import numpy as np
import pytest

from jaxmoe.checkpoint import RANDOM_CONFIGS
from jaxmoe.config import ModelConfig
from jaxmoe.eplb.algorithm import balancedness, rank_load
from jaxmoe.eplb.location import initial_slots
from jaxmoe.eplb.placement import trivial_placement
from jaxmoe.eplb.recording import Recording, RecordingMode, load, merge
from serving.cli import main


LAYERS, EXPERTS, RANKS, TOP_K, SLOTS = 2, 8, 4, 2, 12


def make(mode=RecordingMode.PER_TOKEN, tokens=(5, 0, 7), member=0, num_members=1, seed=0):
    """Skewed choices of distinct experts, on slots in order."""
    rng = np.random.default_rng([seed, member])
    skew = np.arange(1, EXPERTS + 1) ** 2.0
    chosen = np.asarray(
        [
            [rng.choice(EXPERTS, TOP_K, replace=False, p=skew / skew.sum()) for _ in range(LAYERS)]
            for _ in range(sum(tokens))
        ],
        np.int32,
    ).reshape(-1, LAYERS, TOP_K)
    slots = trivial_placement(LAYERS, EXPERTS, SLOTS).physical_to_logical
    of_pass = np.split(chosen, np.cumsum(tokens)[:-1])
    counts = np.stack(
        [
            [np.bincount(of[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)]
            for of in of_pass
        ]
    )
    of_rank = np.zeros((len(tokens), LAYERS, RANKS), np.int64)
    of_rank[:, :, 0] = counts.sum(-1)  # whoever got them
    if mode is RecordingMode.STAT:
        counts, of_rank = counts.sum(0)[None], of_rank.sum(0)[None]
        tokens = (sum(tokens),)
    return Recording(
        mode, counts, of_rank, np.asarray(tokens), slots, TOP_K,
        chosen if mode is RecordingMode.PER_TOKEN else None, member, num_members,
    )  # fmt: skip


def same(one, other):
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(Recording)
    )


@pytest.mark.parametrize("mode", RecordingMode)
def test_file_gives_the_recording_back(tmp_path, mode):
    recording = make(mode, member=1, num_members=3)
    recording.save(tmp_path / "a.npz")
    assert same(load(tmp_path / "a.npz"), recording)


def test_members_add_up(tmp_path):
    parts = [make(member=member, num_members=2) for member in (1, 0)]
    merged = merge(parts)
    assert np.array_equal(merged.total, parts[0].total + parts[1].total)
    assert merged.num_tokens.tolist() == [10, 0, 14]
    # Pass by pass, by member.
    assert np.array_equal(merged.topk_idx[:5], parts[1].topk_idx[:5])
    assert np.array_equal(merged.topk_idx[5:10], parts[0].topk_idx[:5])


def test_members_must_all_be_there():
    with pytest.raises(ValueError, match=r"one recording of each of 3 members, got .* \[0, 2\]"):
        merge([make(member=member, num_members=3) for member in (0, 2)])


def test_counts_are_tokens_times_top_k():
    recording = make()
    counts = recording.counts.copy()
    counts[2, 1, 0] += 1
    with pytest.raises(ValueError, match="pass 2, layer 1 has 15, not 14"):
        dataclasses.replace(recording, counts=counts)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04"])
def test_what_is_no_recording(tmp_path, content):
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.npz is no recording"):
        load(path)


def test_an_archive_of_something_else(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="is no recording"):
        load(tmp_path / "a.npz")


@pytest.fixture
def tiny_config():
    return ModelConfig.from_hf(RANDOM_CONFIGS["tiny"])


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"m{member}.npz" for member in range(2)]
    for member, path in enumerate(paths):
        make(RecordingMode.PER_PASS, (50, 60, 70), member, 2).save(path)
    return [str(path) for path in paths]


def test_plan_is_what_a_server_starts_with(files, tmp_path, capsys, tiny_config):
    output = tmp_path / "placement.json"
    assert main(["eplb", "plan", *files, "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert "--ep-size 4 --ep-num-redundant-experts 4" in said
    config = dataclasses.replace(
        tiny_config, n_routed_experts=EXPERTS, num_hidden_layers=3, first_k_dense_replace=1
    )
    slots = initial_slots(str(output), config, SLOTS, RANKS)
    counts = merge([load(tmp_path / f"m{member}.npz") for member in range(2)]).total
    planned = balancedness(rank_load(counts, slots, RANKS))
    assert f"{planned:.3f} as planned" in said
    with pytest.raises(ValueError, match="places 2 x 12 layers and slots, there are 2 x 16"):
        initial_slots(str(output), config, 16, RANKS)


def test_simulate_up_to_many_ranks(files, capsys):
    arguments = ["--ep-size", "2", "4", "320", "--ep-num-redundant-experts", "0", "8", "312"]
    assert main(["eplb", "simulate", *files, *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_tokens"] == 360
    by_size = {(one["ep_size"], one["redundant"]): one for one in found["simulated"]}
    assert set(by_size) == {(2, 0), (2, 8), (2, 312), (4, 0), (4, 8), (4, 312), (320, 312)}
    assert len(found["refused"]) == 2
    for one in by_size.values():
        assert one["trivial"] <= one["planned"] <= 1
        assert 0 < one["unseen"] <= 1
    assert by_size[4, 8]["planned"] > by_size[4, 0]["planned"]
    assert main(["eplb", "simulate", *files]) == 0
    assert "planned" in capsys.readouterr().out


def test_heatmap_is_a_picture(files, tmp_path):
    picture = tmp_path / "load.svg"
    assert main(["eplb", "heatmap", *files, "--output", str(picture)]) == 0
    assert "<svg" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--output", "x.txt"], "must end in .json, got x.txt"),
        (["plan", "--output", "x.json", "--ep-size", "5"], "must be divisible by ep_size (5)"),
        (["simulate", "--ep-size", "0"], "--ep-size must be at least 1, got 0"),
        (["heatmap", "--output", "x.nothing"], "not supported"),
    ],
)
def test_refused_in_words(files, capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["eplb", arguments[0], *files, *arguments[1:]]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no placement file"),
        ("[]", "must be an object with physical_to_logical_map or logical_count"),
        ('{"physical_to_logical_map": [[0.5]]}', "must be a table of whole numbers"),
        ('{"logical_count": [[1, 2]]}', "it counts 1 x 2 layers and experts, the model has"),
        ('{"physical_to_logical_map": [[0, 1]]}', "places 1 x 2 layers and slots"),
    ],
)
def test_placement_files_refused(tmp_path, tiny_config, content, message):
    path = tmp_path / "placement.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        initial_slots(str(path), tiny_config, 64, 4)


def test_no_file(tiny_config):
    with pytest.raises(ValueError, match="must be trivial or a file, got nowhere"):
        initial_slots("nowhere", tiny_config, 64, 4)
    assert initial_slots("trivial", tiny_config, 64, 4) is None
