"""The files that lm-eval reads agree with its task files, and score as `is_correct`."""

import json
import re
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from examples.lm_eval import make_dataset
from jaxmoe.tasks import EVALUATION_SETS, evaluation_set, is_correct


FOLDER = Path(make_dataset.__file__).parent
REPOSITORY = FOLDER.parents[1]


def read_task(name: str) -> dict[str, Any]:
    """A task file with what it includes."""
    task = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    base = task.pop("include", None)
    return task if base is None else {**read_task(Path(base).stem), **task}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    paths = make_dataset.write(tmp_path_factory.mktemp("lm_eval") / "data")
    return {path.stem: read_lines(path) for path in paths}


@pytest.mark.parametrize("name", [*EVALUATION_SETS, "choices"])
def test_tasks_read_what_is_written(name, data):
    task = read_task(name)
    assert task["dataset_path"] == "json"
    assert REPOSITORY / task["dataset_kwargs"]["data_files"][task["test_split"]] == (
        make_dataset.DATA_DIR / f"{name}.jsonl"
    )
    fields = set(re.findall(r"{{(\w+)}}", task["doc_to_text"] + task["doc_to_target"]))
    if name == "choices":
        fields |= {task["doc_to_choice"], task["doc_to_target"]}
    assert fields
    assert all(fields <= line.keys() for line in data[name])


def test_group_names_every_set():
    group = read_task("sets")
    assert group["task"] == [read_task(name)["task"] for name in EVALUATION_SETS]


@pytest.mark.parametrize("name", EVALUATION_SETS)
def test_lines_are_the_set_in_its_order(name, data):
    items = evaluation_set(name)
    assert [(line["question"], line["answer"]) for line in data[name]] == [
        (item.question, item.answer) for item in items
    ]


def test_only_the_labelled_choice_is_right(data):
    answers = {item.question: item for item in evaluation_set(make_dataset.CHOICES_SET)}
    lines = data["choices"]
    assert len(lines) > 1000
    for line in lines:
        item = answers[line["question"]]
        assert len(set(line["choices"])) == make_dataset.NUM_CHOICES
        assert line["choices"][line["label"]] == item.solution
        for index, choice in enumerate(line["choices"]):
            assert is_correct(item, choice) == (index == line["label"])
    counts = [sum(line["label"] == label for line in lines) for label in range(4)]
    assert min(counts) > 0.2 * len(lines)


ANSWERS = st.text("0123456789$.,# aB-", max_size=8)


@hypothesis.given(
    before=st.lists(ANSWERS | st.just("#### 7"), max_size=3),
    answer=ANSWERS | st.sampled_from(["12", "$12.", "1,2", "ab"]),
    after=st.sampled_from(["", "\n", "\nmore", " \n\n#"]),
    gap=st.sampled_from(["", " ", "\n", "  \n "]),
)
def test_scores_as_is_correct(before, answer, after, gap):
    text = "\n".join([*before, f"####{gap}{answer}{after}"])
    task = read_task("generate")
    for item in (evaluation_set("new_seeds")[0], make_item("12"), make_item("Ab")):
        assert scored(task, text, item.answer) == is_correct(item, text)


def test_no_mark_is_wrong():
    assert not scored(read_task("generate"), "It is 12.", "12")


def make_item(answer: str) -> make_dataset.Item:
    return make_dataset.Item(question="?", answer=answer, solution="", domain="drills")


def scored(task: dict[str, Any], text: str, target: str) -> bool:
    """What lm-eval makes of an answer: its `regex` filter, then its `exact_match`."""
    pattern = task["filter_list"][0]["filter"][0]
    (metric,) = task["metric_list"]
    found = re.findall(pattern["regex_pattern"], text)
    answer = found[pattern["group_select"]].strip() if found else "[invalid]"
    for ignored in metric["regexes_to_ignore"]:
        answer, target = re.sub(ignored, "", answer), re.sub(ignored, "", target)
    return answer.lower() == target.lower()
