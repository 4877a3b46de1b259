"""The generated items are true, reproducible, and kept apart from the evaluation sets."""

import collections
import hashlib
import json
import re

import pytest

from jaxmoe.tasks import (
    DOMAINS,
    EVALUATION_SETS,
    Item,
    drills,
    evaluation_set,
    extract_answer,
    is_correct,
    problems,
    stories,
    train_document,
    train_item,
)
from jaxmoe.tasks.draw import Draw, has_held_out_number, is_held_out
from jaxmoe.tasks.working import add, div, mul, sub


EQUATION = re.compile(r"\(?\d[\d+*/() -]*(?:=[\d+*/()-]*\d)+")
NUM_TRAIN_ITEMS = 200_000

# A change here is a change of the sets: results before and after it cannot be compared.
CHECKSUMS = {
    "new_seeds": "a944c755360569fa",
    "heldout_numbers": "183707e0e176cfbb",
    "heldout_templates": "01af09b8d4815157",
}


@pytest.fixture(scope="module")
def train_items() -> list[Item]:
    return [train_item(0, index) for index in range(NUM_TRAIN_ITEMS)]


def values_of(equation: str) -> set[float]:
    return {eval(side) for side in equation.split("=")}


def assert_true(solution: str) -> int:
    """Every equation of the solution holds; returns how many there are."""
    equations = EQUATION.findall(solution)
    for equation in equations:
        assert len(values_of(equation)) == 1, f"{equation} in {solution}"
    return len(equations)


def test_item_is_a_function_of_its_place() -> None:
    assert train_item(3, 1000) == train_item(3, 1000)
    assert train_item(3, 1000) != train_item(3, 1001)
    assert train_item(3, 1000) != train_item(4, 1000)
    assert train_document(3, 1000) == train_document(3, 1000)


def test_items_are_true(train_items: list[Item]) -> None:
    num_equations = 0
    for item in train_items[:20_000]:
        num_equations += assert_true(item.solution)
        assert item.solution.splitlines()[-1] == f"#### {item.answer}"
        assert is_correct(item, item.solution)
        if item.domain == "problems":
            assert str(int(item.answer)) == item.answer
            worked = item.solution.splitlines()[-2]
            assert re.search(rf"(?<!\d){item.answer}(?!\d)", worked), item
    assert num_equations > 20_000


@pytest.mark.parametrize("held_out_numbers", [False, True])
def test_every_template_is_true(held_out_numbers: bool) -> None:
    """Including those that training never uses."""
    for template in {*problems.TRAINING, *problems.HELD_OUT}:
        for index in range(60):
            draw = Draw(f"{template.__name__}/{index}", prefers_held_out=held_out_numbers)
            question, lines, answer = template(draw)
            assert isinstance(answer, int) and answer >= 0, (template, index)
            assert question[-1] in ".?" and "  " not in question
            assert assert_true("\n".join(lines)), (template, index)
            assert not re.search(r"(?<!\d)-\d", "\n".join(lines)), (template, index)


def test_every_story_has_an_answer_of_one_word() -> None:
    for template in {*stories.TRAINING, *stories.HELD_OUT}:
        for index in range(100):
            question, lines, answer = template(Draw(f"{template.__name__}/{index}"))
            assert re.fullmatch(r"[A-Za-zé]+|\d+", answer), (template, answer)
            assert len(re.findall(r"[.?](?:\s|$)", question)) >= 3
            assert answer in ("yes", "no") or answer in " ".join(lines)


def test_templates_are_many_and_a_part_is_held_out() -> None:
    training, held_out = set(problems.TRAINING), set(problems.HELD_OUT)
    assert 80 <= len(training | held_out) <= 120
    assert 0.1 <= len(held_out) / len(training | held_out) <= 0.15
    assert not training & held_out
    assert not set(stories.TRAINING) & set(stories.HELD_OUT)


def test_all_domains_are_trained(train_items: list[Item]) -> None:
    counts = collections.Counter(item.domain for item in train_items)
    assert set(counts) == set(DOMAINS)
    assert counts["problems"] == pytest.approx(0.6 * NUM_TRAIN_ITEMS, rel=0.02)
    assert counts["stories"] == pytest.approx(0.2 * NUM_TRAIN_ITEMS, rel=0.03)


@pytest.mark.parametrize("name", EVALUATION_SETS)
def test_evaluation_set_never_changes(name: str) -> None:
    items = evaluation_set(name)
    assert len(items) == 1319
    assert len({item.question for item in items}) == 1319
    text = json.dumps([[item.question, item.solution] for item in items], ensure_ascii=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == CHECKSUMS[name]


@pytest.mark.parametrize("name", EVALUATION_SETS)
def test_evaluation_items_are_true(name: str) -> None:
    for item in evaluation_set(name):
        assert_true(item.solution)
        assert is_correct(item, item.solution)


def test_training_has_no_evaluation_question(train_items: list[Item]) -> None:
    questions = {item.question for item in train_items}
    for name in EVALUATION_SETS:
        assert not questions & {item.question for item in evaluation_set(name)}


def test_training_has_no_held_out_number(train_items: list[Item]) -> None:
    assert not any(has_held_out_number(item.question) for item in train_items)
    assert all(has_held_out_number(item.question) for item in evaluation_set("heldout_numbers"))
    for name in ("new_seeds", "heldout_templates"):
        assert not any(has_held_out_number(item.question) for item in evaluation_set(name))
    everyday = (*range(10), 12, 24, 25, 75, *range(10, 101, 10))
    assert not any(map(is_held_out, everyday))


def test_training_uses_no_held_out_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "HELD_OUT", ())
    monkeypatch.setattr(stories, "HELD_OUT", ())
    for index in range(2000):
        train_item(1, index)


def test_unknown_set_is_refused() -> None:
    with pytest.raises(ValueError, match="'old_seeds' is not one of new_seeds"):
        evaluation_set("old_seeds")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 12", "12"),
        ("3*4=12\n#### 12\n", "12"),
        ("#### 5\nno, wait\n####  12 \nmore", "12"),
        ("12", None),
        ("####", None),
        ("", None),
        ("#### the hall.", "the hall."),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("answer", ["1200", "1,200", "$1200", " 1200.", "$1,200."])
def test_is_correct_overlooks_how_a_number_is_written(answer: str) -> None:
    item = Item(question="", answer="1200", solution="", domain="drills")
    assert is_correct(item, f"#### {answer}")
    assert not is_correct(item, f"#### {answer}1".replace(".", ""))
    assert not is_correct(item, answer)


def test_working() -> None:
    assert add(12, 7, 5) == "12+7+5=19+5=24"
    assert sub(31, 12) == "31-12=19"
    assert mul(3, 12) == "3*12=36"
    assert mul(24, 13) == "24*13=24*10+24*3=240+72=312"
    assert mul(123, 4) == "123*4=4*100+4*20+4*3=400+80+12=480+12=492"
    assert div(96, 4) == "96/4=24"
    assert div(432, 6) == "432/6=420/6+12/6=70+2=72"
    for first in range(0, 400, 7):
        for second in range(0, 120):
            assert values_of(mul(first, second)) == {first * second}
            if second:
                assert values_of(div(first * second, second)) == {first}


def test_drills_are_true() -> None:
    for held_out_numbers in (False, True):
        for index in range(3000):
            draw = Draw(f"drill/{index}", prefers_held_out=held_out_numbers)
            _, lines, answer = drills.make(draw)
            assert_true("\n".join(lines))
            assert re.fullmatch(r"\d+|even|odd", answer)


def test_documents_are_chats_or_plain_text() -> None:
    kinds = collections.Counter()
    for index in range(2000):
        document = train_document(0, index)
        roles = [role for role, _ in document]
        kinds["text" if roles == ["text"] else "chat"] += 1
        kinds["system"] += roles[0] == "system"
        kinds["turns"] += roles.count("user") > 1
        if roles[0] == "system":
            roles = roles[1:]
        if roles != ["text"]:
            assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
        assert all(text for _, text in document)
    assert 0.03 < kinds["text"] / 2000 < 0.07
    assert 0.1 < kinds["system"] / 2000 < 0.2
    assert kinds["turns"] > 100
