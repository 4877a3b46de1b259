import json

import pytest

from jaxmoe.offline.journal import JournalError, open_journal


MADE_FROM = {"input_sha256": "a", "temperature": 0.0}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture
def partial(output):
    return output.with_name("out.jsonl.partial")


def _stop_after(output, *indices):
    """A run that ended early."""
    with open_journal(output, MADE_FROM) as journal:
        journal.append({"index": index, "text": "ü"} for index in indices)


def test_results_are_sorted_into_the_output(output, partial):
    with open_journal(output, MADE_FROM) as journal:
        journal.append([{"index": 7}, {"index": 2}])
        journal.append([{"index": 4}])
        journal.finish([{"index": 3, "error": "e"}])
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == [2, 3, 4, 7]
    assert not partial.exists()


def test_a_run_continues_where_it_stopped(output):
    _stop_after(output, 5, 1)
    with open_journal(output, MADE_FROM) as journal:
        assert journal.done == {1, 5}
        journal.append([{"index": 0, "text": "x"}])
        journal.finish([])
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert lines == [{"index": i, "text": t} for i, t in ((0, "x"), (1, "ü"), (5, "ü"))]


def test_a_torn_last_line_is_dropped(output, partial):
    _stop_after(output, 0, 1)
    whole = partial.read_bytes()
    for kept in range(len(whole)):
        partial.write_bytes(whole[:kept])
        with open_journal(output, MADE_FROM) as journal:
            done = journal.done
            assert done == set(range(max(0, whole[:kept].count(b"\n") - 1)))
            journal.append([{"index": 9}])
        assert partial.read_bytes().count(b"\n") == 1 + len(done) + 1


def test_other_inputs_or_options_are_refused(output, partial):
    _stop_after(output, 0)
    before = partial.read_bytes()
    with pytest.raises(JournalError, match=r"other inputs or options \(temperature\).*overwrite"):
        with open_journal(output, {**MADE_FROM, "temperature": 1.0}):
            pass
    assert partial.read_bytes() == before
    with open_journal(output, {**MADE_FROM, "temperature": 1.0}, overwrite=True) as journal:
        assert not journal.done


def test_a_run_that_did_nothing_leaves_nothing(output, partial):
    with pytest.raises(KeyError):
        with open_journal(output, MADE_FROM):
            raise KeyError
    assert not partial.exists()


def test_an_output_that_exists_is_kept(output):
    output.write_text("mine")
    with pytest.raises(JournalError, match="--overwrite"):
        with open_journal(output, MADE_FROM):
            pass
    assert output.read_text() == "mine"
    with open_journal(output, MADE_FROM, overwrite=True) as journal:
        journal.finish([])
    assert output.read_text() == ""


def test_a_foreign_file_is_not_taken_for_a_journal(output, partial):
    partial.write_text("something else\n")
    with pytest.raises(JournalError, match="not a journal"):
        with open_journal(output, MADE_FROM):
            pass
    assert partial.read_text() == "something else\n"


def test_two_runs_do_not_write_one_journal(output):
    with open_journal(output, MADE_FROM):
        with pytest.raises(JournalError, match="another run"):
            with open_journal(output, MADE_FROM, overwrite=True):
                pass


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(JournalError, match="nowhere"):
        with open_journal(tmp_path / "nowhere" / "out.jsonl", MADE_FROM):
            pass
