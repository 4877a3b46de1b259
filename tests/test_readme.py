"""The README keeps up with the code."""

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from custom_calls.deep_ep import sizes
from custom_calls.runtime import EpSpec
from serving.cli import COMMANDS
from serving.config import ServerConfig
from serving.router import cli as router_cli
from serving.router.policy import POLICIES


README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("field", dataclasses.fields(ServerConfig), ids=lambda field: field.name)
def test_every_flag_is_described(field):
    assert f"`--{field.name.replace('_', '-')}`" in README


def test_every_flag_and_policy_of_the_router_is_described():
    parser = argparse.ArgumentParser(add_help=False)
    router_cli.add_arguments(parser)
    (section,) = re.findall(r"(?ms)^### [^\n]*[Tt]he router\n(.*?)^### ", README)
    flags = re.findall(r"--[a-z-]+", parser.format_usage())
    assert flags and all(f"`{name}`" in section for name in [*flags, *POLICIES])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_named(command):
    assert f"jaxmoe {command}" in README or f"`{command}`" in README


def table_after(sentence: str) -> list[list[str]]:
    """The rows, without their heads, of the first table after it."""
    _, text = README.split(sentence)
    rows = text[text.index("\n|") :].strip().split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def numbers(cell: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", cell)]


MIB = 2**20


def test_the_memory_of_loopback_is_what_its_spec_says():
    table = table_after("The group's memory on each rank, two windows for a micro-batch")
    for tokens, shape, *cells in table:
        normal, low_latency = numbers(tokens)
        hidden, top_k, itemsize = numbers(shape)
        specs = [
            EpSpec(
                max_ep_size=ranks,
                slots_per_rank=8,
                hidden_size=hidden,
                top_k=top_k,
                normal_tokens=normal,
                low_latency_tokens=low_latency,
                itemsize=itemsize,
            )
            for ranks in (2, 4, 8, 16)
        ]
        assert [round(spec.bytes_per_rank / MIB) for spec in specs] == list(map(int, cells))
    assert len(table) == 4


def test_the_memory_of_deepep_is_what_its_spec_says():
    table = table_after("With `deepep` on GPUs it is what DeepEP's own size hints say")
    for tokens, shape, *cells in table:
        low_latency = numbers(tokens)[-1]
        hidden, *experts = numbers(shape)
        for ranks, cell in zip((2, 4, 8, 16), cells, strict=True):
            spec = EpSpec(
                max_ep_size=ranks,
                slots_per_rank=experts[0] // ranks if experts else 8,
                hidden_size=hidden,
                top_k=8,
                normal_tokens=0 if experts else 1024,
                low_latency_tokens=low_latency,
                backend="deepep",
            )
            has_kernels = not spec.normal_tokens or ranks in sizes.DISPATCH_SEND_TOKENS
            expected = str(round(spec.bytes_per_rank / MIB)) if has_kernels else ""
            assert cell == expected, (tokens, shape, ranks)
    assert len(table) == 4
