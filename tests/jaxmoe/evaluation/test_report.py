import json

import pytest

from jaxmoe.evaluation.answers import Answer
from jaxmoe.evaluation.report import (
    Baseline,
    ItemResult,
    Report,
    SetReport,
    Settings,
    compare_results,
)
from jaxmoe.tasks import evaluation_set


ITEMS = {f"new_seeds/{idx}": item for idx, item in enumerate(evaluation_set("new_seeds")[:8])}
RIGHT = [item.solution for item in ITEMS.values()]


def results(texts):
    return tuple(
        ItemResult.of(id, item, Answer(None, error="gone") if text is None else Answer(text, 3))
        for (id, item), text in zip(ITEMS.items(), texts, strict=True)
    )


def report(texts, *, earlier=None, seconds=2.0):
    now = results(texts)
    comparison = None if earlier is None else compare_results(results(earlier), now)
    settings = Settings("jax", "embedded", ("new_seeds",), 8, max_new_tokens=128, batch_size=4)
    return Report(settings, {"new_seeds": SetReport("new_seeds", now, seconds, comparison)})


def test_exact_matches_are_counted_in_all_and_by_domain():
    found = report([*RIGHT[:5], "no answer", "#### 1000001", RIGHT[7]]).to_dict()["sets"]
    assert (found["new_seeds"]["num_items"], found["new_seeds"]["num_correct"]) == (8, 6)
    assert found["new_seeds"]["accuracy"] == 0.75
    low, high = found["new_seeds"]["interval"]
    assert 0 < low < 0.75 < high < 1
    domains = found["new_seeds"]["domains"].values()
    assert sum(domain["num_items"] for domain in domains) == 8
    assert sum(domain["num_correct"] for domain in domains) == 6


def test_a_failed_item_is_neither_right_nor_wrong():
    found = report([*RIGHT[:6], None, None])
    in_set = found.to_dict()["sets"]["new_seeds"]
    assert (in_set["num_items"], in_set["num_failed"], in_set["accuracy"]) == (6, 2, 1.0)
    assert [result.id for result in found.failures] == ["new_seeds/6", "new_seeds/7"]
    assert "2 items got no answer and are not counted" in found.format_table()


def test_nothing_answered_has_no_accuracy():
    found = report([None] * 8)
    assert found.to_dict()["sets"]["new_seeds"]["accuracy"] is None
    found.format_table()


def test_the_items_are_written_and_read_as_a_baseline(tmp_path):
    found = report([*RIGHT[:7], "#### 1,000,001."])
    path = tmp_path / "out.json"
    path.write_text("what was there")
    found.write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
    items = json.loads(path.read_text())["items"]
    assert items[7] == {
        "id": "new_seeds/7",
        "domain": ITEMS["new_seeds/7"].domain,
        "answer": ITEMS["new_seeds/7"].answer,
        "predicted": "1,000,001.",
        "correct": False,
        "text": "#### 1,000,001.",
        "completion_tokens": 3,
        "error": None,
    }
    assert "items" not in found.to_dict()
    assert Baseline(path).results({"new_seeds": ITEMS})["new_seeds"] == list(
        found.sets["new_seeds"].results
    )


def test_a_comparison_tells_lost_from_gained():
    wrong = "#### 1000001"
    before = [*RIGHT[:6], wrong, wrong]
    now = [wrong, wrong, *RIGHT[2:6], RIGHT[6], "Well.\n" + wrong]
    found = report(now, earlier=before)
    assert found.to_dict()["sets"]["new_seeds"]["baseline"] == {
        "b": 2,
        "c": 1,
        "p_value": 1.0,
        "agreement": 5 / 8,
        "same_text": 4 / 8,
    }
    assert "b (lost)" in found.format_table()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda items: items[1:], "1 of 8 are missing and 0 are too many, such as new_seeds/0"),
        (
            lambda items: [*items, items[0] | {"id": "new_seeds/8"}],
            "0 of 8 are missing and 1 are too many, such as new_seeds/8",
        ),
        (lambda items: [], "8 of 8 are missing"),
        (
            lambda items: [items[0] | {"answer": "other"}, *items[1:]],
            "another version of the sets: the answer of new_seeds/0 is 'other' there",
        ),
        (
            lambda items: [items[0] | {"correct": None, "error": "gone"}, *items[1:]],
            "has no answer to new_seeds/0",
        ),
        (lambda items: [{"id": "new_seeds/0"}], "is not a file of jaxmoe eval --output"),
        (lambda items: None, "is not a file of jaxmoe eval --output"),
    ],
)
def test_a_baseline_of_other_items_is_refused(tmp_path, change, message):
    path = tmp_path / "baseline.json"
    items = report(RIGHT).to_dict(with_items=True)["items"]
    path.write_text(json.dumps({"items": change(items)}))
    with pytest.raises(ValueError, match=message):
        Baseline(path).results({"new_seeds": ITEMS})


def test_a_baseline_may_have_more_sets(tmp_path):
    path = tmp_path / "baseline.json"
    items = report(RIGHT).to_dict(with_items=True)["items"]
    path.write_text(json.dumps({"items": [*items, items[0] | {"id": "heldout_numbers/0"}]}))
    assert len(Baseline(path).results({"new_seeds": ITEMS})["new_seeds"]) == 8
