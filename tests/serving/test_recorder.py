"""The expert distribution recorder in a running loop: what it counts, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest

from jaxmoe.eplb.recording import RecordingMode, load, load_merged
from serving.lockstep import Record
from serving.peers import Alone
from serving.recorder import RecorderOptions
from serving.request import SamplingParams
from tests.serving.conftest import shut_down


NEW_TOKENS = 6
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 40, list(range(2, 30))]
# The last token of an answer is never computed.
NUM_TOKENS = sum(len(prompt) + NEW_TOKENS - 1 for prompt in PROMPTS)


@pytest.fixture
def recording(new_client, running, engine, tmp_path):
    """`recording(mode, ...)`: `running` a loop whose files are in `tmp_path`."""

    def run(mode=RecordingMode.STAT, **options):
        chosen = RecorderOptions(mode, directory=tmp_path, **options)
        return running(new_client(Alone(), engine, prefix_cache=False, recorder_options=chosen))

    return run


def serve(client):
    return client.run(PROMPTS, [GREEDY] * len(PROMPTS))


def dump(client):
    (path,) = client.loop.record(Record.DUMP)
    return load(Path(path))


@pytest.mark.parametrize("mode", RecordingMode)
def test_counts_of_what_was_served(recording, mode):
    with recording(mode) as client:
        serve(client)
        client.loop.record(Record.START)
        serve(client)
        client.loop.record(Record.STOP)
        serve(client)
        found = dump(client)
    assert found.mode is mode
    assert found.num_tokens.sum() == NUM_TOKENS
    if mode is RecordingMode.STAT:
        assert len(found.counts) == 1
    else:
        assert len(found.counts) > NEW_TOKENS
        assert (found.num_tokens > 0).all()
    if mode is RecordingMode.PER_TOKEN:  # the choices, not the counters of slots
        for of_pass, chosen in zip(
            found.counts, np.split(found.topk_idx, np.cumsum(found.num_tokens)[:-1]), strict=True
        ):
            for layer, counts in enumerate(of_pass):
                counted = np.bincount(chosen[:, layer].ravel(), minlength=found.num_experts)
                np.testing.assert_array_equal(counted, counts)


def test_modes_count_the_same(recording):
    totals = []
    for mode in RecordingMode:
        with recording(mode) as client:
            client.loop.record(Record.START)
            serve(client)
            totals.append(dump(client).total)
    np.testing.assert_array_equal(totals[0], totals[1])
    np.testing.assert_array_equal(totals[0], totals[2])


@pytest.mark.parametrize("mode", RecordingMode)
def test_a_dump_begins_anew(recording, mode):
    with recording(mode) as client:
        client.loop.record(Record.START)
        serve(client)
        first = dump(client)
        serve(client)
        second = dump(client)
        with pytest.raises(RuntimeError, match="no step has been recorded"):
            dump(client)
    assert first.num_tokens.sum() == second.num_tokens.sum() == NUM_TOKENS
    np.testing.assert_array_equal(first.total, second.total)


def test_what_is_refused(recording):
    with recording() as client:
        for what, message in ((Record.STOP, "no recording is under way"),
                              (Record.DUMP, "no step has been recorded")):  # fmt: skip
            with pytest.raises(RuntimeError, match=message):
                client.loop.record(what)
        client.loop.record(Record.START)
        with pytest.raises(RuntimeError, match="stop it first"):
            client.loop.record(Record.START)
        serve(client)
        assert dump(client).num_tokens.sum() == NUM_TOKENS
    with pytest.raises(RuntimeError, match="shutting down"):
        client.loop.record(Record.STOP)


def test_last_passes_are_kept(recording):
    with recording(RecordingMode.PER_PASS, buffer_size=3) as client:
        client.loop.record(Record.START)
        serve(client)
        found = dump(client)
    assert len(found.counts) == 3
    assert (found.num_tokens <= len(PROMPTS)).all()  # only decode steps are left


def test_nothing_is_lost_when_a_file_cannot_be_written(recording, tmp_path, monkeypatch):
    with recording() as client:
        client.loop.record(Record.START)
        serve(client)
        with monkeypatch.context() as patch:
            patch.setattr(
                "jaxmoe.eplb.recording.Recording.save",
                lambda *_: (_ for _ in ()).throw(OSError("no space left")),
            )
            with pytest.raises(OSError, match=r"members \[0\] could not write .*no space left"):
                dump(client)
        assert dump(client).num_tokens.sum() == NUM_TOKENS


@pytest.mark.parametrize("mode", RecordingMode)
def test_a_failed_step_counts_neither_tokens_nor_choices(recording, engine, monkeypatch, mode):
    run, failures = engine.run, iter([False] * 4 + [True])

    def fail_once(batch, size):
        results = run(batch, size)
        if next(failures, False):
            raise RuntimeError("injected")
        return results

    with recording(mode) as client:
        client.loop.record(Record.START)
        monkeypatch.setattr(engine, "run", fail_once)
        serve(client)
        serve(client)
        found = dump(client)  # checks that counts are tokens times top-k
    assert found.num_tokens.sum() >= NUM_TOKENS
    if mode is not RecordingMode.STAT:
        assert (found.num_tokens == 0).sum() == 1


@pytest.mark.parametrize("mode", RecordingMode)
def test_members_record_the_same_passes(
    new_client, engine, other_engine, thread_group, tmp_path, mode
):
    clients = [
        new_client(
            peers, member_engine, prefix_cache=False,
            recorder_options=RecorderOptions(
                mode, directory=tmp_path, member=peers.member, num_members=2
            ),
        )
        for member_engine, peers in zip((engine, other_engine), thread_group.members, strict=True)
    ]  # fmt: skip
    for client in clients:
        client.loop.start()
    clients[0].loop.record(Record.START)
    for client in clients:  # one after the other: the other takes part with nothing
        serve(client)
    paths = [Path(path) for path in clients[1].loop.record(Record.DUMP)]
    shut_down([client.loop for client in clients])
    assert len(paths) == 2
    for path in paths:
        assert load(path).num_tokens.sum() == NUM_TOKENS
    assert load_merged(paths).num_tokens.sum() == 2 * NUM_TOKENS
