"""Accuracy on the three evaluation sets: `jaxmoe.evaluation.evaluate(...)` and `jaxmoe eval`.

Greedy answers, scored by exact match, with intervals, and a paired test against an earlier run.
"""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.evaluation.answers import Answerer, EngineAnswerer, TorchAnswerer
from jaxmoe.evaluation.client import ServerAnswerer, ServerError
from jaxmoe.evaluation.expert_load import measure_expert_load
from jaxmoe.evaluation.report import (
    Baseline,
    ItemResult,
    Report,
    SetReport,
    Settings,
    compare_results,
)
from jaxmoe.tasks import EVALUATION_SETS, Item, evaluation_set


__all__ = ["BACKENDS", "Report", "ServerError", "evaluate"]

BACKENDS = ("jax", "torch")


def evaluate(
    model_path: Path | str | None = None,
    *,
    sets: Sequence[str] = EVALUATION_SETS,
    limit: int | None = None,
    backend: str = "jax",
    base_url: str | None = None,
    baseline: Path | str | None = None,
    ep_size: int | None = None,
    num_redundant_experts: int | None = None,
    deepep_mode: str = "auto",
    moe_a2a_backend: str = "reference",
    two_batch_overlap: bool = False,
    single_batch_overlap: bool = False,
    dtype: str = "auto",
    quantization: str | None = None,
    batch_size: int = 32,
    max_new_tokens: int = 128,
    expert_load: bool = False,
    shows_progress: bool = False,
) -> Report:
    """Answer the first `limit` items of each set (None: all) and score them.

    `model_path` None is the embedded model. The answers come from the server at `base_url` if it is
    given, with `batch_size` requests in flight, else from `backend`: "jax", the offline engine, or
    "torch", transformers on the CPU. `baseline` is what an earlier report wrote. `expert_load` adds
    the load of the experts by domain. Progress is shown on stderr.

    Raises ValueError for settings that make no sense, ServerError when the server cannot be
    reached, ReferenceUnavailableError without torch. Items that a server fails to answer are in the
    report.
    """
    items = _items(sets, limit)
    earlier = {} if baseline is None else Baseline(baseline).results(items)
    for_engine = {
        "ep_size": ep_size is not None,
        "num_redundant_experts": num_redundant_experts is not None,
        "deepep_mode": deepep_mode != "auto",
        "moe_a2a_backend": moe_a2a_backend != "reference",
        "two_batch_overlap": two_batch_overlap,
        "single_batch_overlap": single_batch_overlap,
        "quantization": quantization is not None,
        "expert_load": expert_load,
    }
    for_model = {
        "backend": backend != "jax",
        "model_path": model_path is not None,
        "dtype": dtype != "auto",
    }
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if base_url is not None:
        _refuse(for_model | for_engine, "a running server")
    elif backend == "torch":
        _refuse(for_engine, "the torch backend")
    load = None
    if base_url is not None:
        answerer = ServerAnswerer(
            base_url, max_new_tokens=max_new_tokens, num_concurrent=batch_size
        )
    else:
        directory = EMBEDDED_MODEL if model_path is None else model_path
        if backend == "torch":
            answerer = TorchAnswerer(
                directory, dtype=dtype, batch_size=batch_size, max_new_tokens=max_new_tokens
            )
        else:
            answerer = EngineAnswerer(
                directory,
                ep_size=ep_size,
                num_redundant_experts=num_redundant_experts,
                deepep_mode=deepep_mode,
                moe_a2a_backend=moe_a2a_backend,
                two_batch_overlap=two_batch_overlap,
                single_batch_overlap=single_batch_overlap,
                dtype=dtype,
                quantization=quantization,
                batch_size=batch_size,
                max_new_tokens=max_new_tokens,
            )
            if expert_load:
                load = measure_expert_load(answerer.model, answerer.tokenizer)
    num_items = sum(map(len, items.values()))
    with tqdm(total=num_items, unit="item", file=sys.stderr, disable=not shows_progress) as bar:
        reports = {
            name: _run(answerer, name, of_set, earlier.get(name), bar)
            for name, of_set in items.items()
        }
    settings = Settings(
        backend=answerer.backend,
        model="embedded" if model_path is None else str(model_path),
        sets=tuple(items),
        limit=limit,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
    )
    settings = dataclasses.replace(settings, **answerer.settings)
    return Report(settings=settings, sets=reports, expert_load=load)


def _items(sets: Sequence[str], limit: int | None) -> dict[str, dict[str, Item]]:
    """By set and id."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be positive, got {limit}")
    if not sets:
        raise ValueError(f"there must be at least one set of {', '.join(EVALUATION_SETS)}")
    return {
        name: {f"{name}/{idx}": item for idx, item in enumerate(evaluation_set(name)[:limit])}
        for name in sets
    }


def _run(
    answerer: Answerer,
    name: str,
    items: Mapping[str, Item],
    earlier: Sequence[ItemResult] | None,
    bar: tqdm,
) -> SetReport:
    began = time.perf_counter()
    bar.set_postfix_str(name)
    ids = list(items)
    results: dict[str, ItemResult] = {}
    for index, answer in answerer.answers([item.question for item in items.values()]):
        id = ids[index]
        results[id] = ItemResult.of(id, items[id], answer)
        bar.update(1)
    ordered = tuple(results[id] for id in ids)
    seconds = time.perf_counter() - began
    has_failed = any(result.correct is None for result in ordered)
    comparison = None
    if earlier is not None and not has_failed:
        comparison = compare_results(earlier, ordered)
    return SetReport(name=name, results=ordered, seconds=seconds, comparison=comparison)


def _refuse(given: Mapping[str, bool], by: str) -> None:
    if names := [name for name, is_given in given.items() if is_given]:
        raise ValueError(f"{', '.join(names)} cannot be chosen for {by}")
