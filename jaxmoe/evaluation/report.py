"""What an evaluation found: items, accuracies, comparisons; as JSON and as a table."""

import collections
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmoe.evaluation.answers import Answer
from jaxmoe.evaluation.expert_load import ExpertLoad
from jaxmoe.evaluation.statistics import McNemar, mcnemar, wilson_interval
from jaxmoe.tasks import DOMAINS, Item, extract_answer, is_correct


@dataclasses.dataclass(frozen=True)
class Settings:
    """How it was run; None where a setting is the server's own.

    Attributes:
      backend: "jax", "torch" or "server".
      model: a directory, "embedded" or the name a server gives.
      batch_size: of a server, the requests in flight.
    """

    backend: str
    model: str
    sets: tuple[str, ...]
    limit: int | None
    max_new_tokens: int
    batch_size: int
    base_url: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    ep_size: int | None = None
    deepep_mode: str | None = None
    moe_a2a_backend: str | None = None
    two_batch_overlap: bool | None = None
    single_batch_overlap: bool | None = None
    num_redundant_experts: int | None = None
    device: str | None = None


@dataclasses.dataclass(frozen=True)
class ItemResult:
    """One item's outcome.

    Attributes:
      predicted: what the text gives as the answer, None if nothing.
      correct, text: None if there was no answer to score; `error` then says why.
    """

    id: str
    domain: str
    answer: str
    predicted: str | None
    correct: bool | None
    text: str | None
    completion_tokens: int
    error: str | None = None

    @classmethod
    def of(cls, id: str, item: Item, answer: Answer) -> "ItemResult":
        text = answer.text
        return cls(
            id=id,
            domain=item.domain,
            answer=item.answer,
            predicted=None if text is None else extract_answer(text),
            correct=None if text is None else is_correct(item, text),
            text=text,
            completion_tokens=answer.completion_tokens,
            error=answer.error,
        )


@dataclasses.dataclass(frozen=True)
class Score:
    """Of the items that were answered."""

    num_items: int
    num_correct: int

    @classmethod
    def of(cls, results: Iterable[ItemResult]) -> "Score":
        correct = [result.correct for result in results if result.correct is not None]
        return cls(len(correct), sum(correct))

    @property
    def accuracy(self) -> float | None:
        """None without items."""
        return self.num_correct / self.num_items if self.num_items else None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, 95%."""
        return wilson_interval(self.num_correct, self.num_items)

    def to_dict(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "num_items": self.num_items,
            "num_correct": self.num_correct,
        }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The same items in an earlier run.

    Attributes:
      test: b was right before and is wrong now, c the other way round.
      agreement: share of items with the same answer, right or wrong.
      same_text: share of items with the same text.
    """

    test: McNemar
    agreement: float
    same_text: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "b": self.test.b,
            "c": self.test.c,
            "p_value": self.test.p_value,
            "agreement": self.agreement,
            "same_text": self.same_text,
        }


@dataclasses.dataclass(frozen=True)
class SetReport:
    """One evaluation set; `comparison` is None without a baseline or if items failed."""

    name: str
    results: tuple[ItemResult, ...]
    seconds: float
    comparison: Comparison | None = None

    @property
    def score(self) -> Score:
        return Score.of(self.results)

    @property
    def num_failed(self) -> int:
        return sum(result.error is not None for result in self.results)

    @property
    def domains(self) -> dict[str, Score]:
        """Of the domains that the set has."""
        by_domain: dict[str, list[ItemResult]] = collections.defaultdict(list)
        for result in self.results:
            by_domain[result.domain].append(result)
        return {name: Score.of(by_domain[name]) for name in DOMAINS if name in by_domain}

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.score.to_dict(),
            "num_failed": self.num_failed,
            "seconds": self.seconds,
            "domains": {name: score.to_dict() for name, score in self.domains.items()},
            **({} if self.comparison is None else {"baseline": self.comparison.to_dict()}),
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """All sets. `seconds` is the time to answer them, without loading the model."""

    settings: Settings
    sets: Mapping[str, SetReport]
    expert_load: ExpertLoad | None = None

    @property
    def seconds(self) -> float:
        return sum(of_set.seconds for of_set in self.sets.values())

    @property
    def generated_tokens(self) -> int:
        return sum(result.completion_tokens for result in self._results())

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def failures(self) -> list[ItemResult]:
        return [result for result in self._results() if result.error is not None]

    def _results(self) -> Iterable[ItemResult]:
        return (result for of_set in self.sets.values() for result in of_set.results)

    def to_dict(self, *, with_items: bool = False) -> dict[str, Any]:
        values = {
            "settings": dataclasses.asdict(self.settings),
            "sets": {name: of_set.to_dict() for name, of_set in self.sets.items()},
            "num_failed": len(self.failures),
            "generated_tokens": self.generated_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }
        if self.expert_load is not None:
            values["expert_load"] = self.expert_load.to_dict()
        if with_items:
            values["items"] = [vars(result) for result in self._results()]
        return values

    def write(self, path: Path | str) -> None:
        """With the items, in one piece: an older file stays until this one is complete."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        text = json.dumps(self.to_dict(with_items=True), ensure_ascii=False)
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, path)

    def format_table(self) -> str:
        settings = self.settings
        described = (
            settings.base_url,
            settings.model,
            settings.quantization,
            settings.dtype,
            settings.device,
        )
        ranks = [] if settings.ep_size is None else [f"EP {settings.ep_size}"]
        lines = [
            ", ".join([settings.backend, *filter(None, described), *ranks]),
            f"{self.generated_tokens} tokens in {self.seconds:.1f} s, "
            f"{self.tokens_per_second:.0f} tokens/s",
            "",
            f"{'set':<18}{'items':>6}{'correct':>9}{'accuracy':>10}{'95% interval':>18}"
            + "".join(f"{domain:>10}" for domain in DOMAINS),
        ]
        for name, of_set in self.sets.items():
            score, (low, high) = of_set.score, of_set.score.interval
            domains = (of_set.domains.get(domain, Score(0, 0)).accuracy for domain in DOMAINS)
            lines.append(
                f"{name:<18}{score.num_items:>6}{score.num_correct:>9}"
                f"{_percent(score.accuracy):>10}{f'{low:.1%} to {high:.1%}':>18}"
                + "".join(f"{_percent(accuracy):>10}" for accuracy in domains)
            )
        if self.failures:
            lines.append(f"{len(self.failures)} items got no answer and are not counted")
        lines += self._comparison_lines()
        if self.expert_load is not None:
            lines += ["", self.expert_load.format_table()]
        return "\n".join(lines)

    def _comparison_lines(self) -> list[str]:
        compared = {name: s.comparison for name, s in self.sets.items() if s.comparison is not None}
        if not compared:
            return []
        lines = [
            "",
            f"{'against baseline':<18}{'b (lost)':>10}{'c (gained)':>12}{'p':>10}"
            f"{'same answer':>13}{'same text':>11}",
        ]
        for name, comparison in compared.items():
            test = comparison.test
            lines.append(
                f"{name:<18}{test.b:>10}{test.c:>12}{test.p_value:>10.4f}"
                f"{comparison.agreement:>13.1%}{comparison.same_text:>11.1%}"
            )
        return lines


def compare_results(before: Sequence[ItemResult], now: Sequence[ItemResult]) -> Comparison:
    """Of the same items, all answered."""
    pairs = list(zip(before, now, strict=True))
    return Comparison(
        test=mcnemar([bool(r.correct) for r in before], [bool(r.correct) for r in now]),
        agreement=sum(a.predicted == b.predicted for a, b in pairs) / len(pairs),
        same_text=sum(a.text == b.text for a, b in pairs) / len(pairs),
    )


class Baseline:
    """The items of an earlier `--output`."""

    def __init__(self, path: Path | str):
        """Raises ValueError with the path if it is no such file."""
        self._path = path
        try:
            items = json.loads(Path(path).read_text(encoding="utf-8"))["items"]
            self._results = {item["id"]: ItemResult(**item) for item in items}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a file of jaxmoe eval --output: {error!r}") from error

    def results(self, items: Mapping[str, Mapping[str, Item]]) -> dict[str, list[ItemResult]]:
        """Those of each set's items, which are given by id.

        Raises ValueError unless the baseline has answers to exactly these items of these sets.
        """
        return {name: self._of_set(name, of_set) for name, of_set in items.items()}

    def _of_set(self, name: str, items: Mapping[str, Item]) -> list[ItemResult]:
        earlier = {id for id in self._results if id.partition("/")[0] == name}
        missing, extra = items.keys() - earlier, earlier - items.keys()
        if missing or extra:
            raise ValueError(
                f"the baseline {self._path} has other items of {name}: {len(missing)} of "
                f"{len(items)} are missing and {len(extra)} are too many, such as "
                f"{min(missing or extra)}; it must be of the same sets and limit"
            )
        results = [self._results[id] for id in items]
        for result, item in zip(results, items.values(), strict=True):
            if result.answer != item.answer:
                raise ValueError(
                    f"the baseline {self._path} is of another version of the sets: the answer of "
                    f"{result.id} is {result.answer!r} there and {item.answer!r} here"
                )
            if result.correct is None:
                raise ValueError(f"the baseline {self._path} has no answer to {result.id}")
        return results


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
