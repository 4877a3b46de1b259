"""The README keeps up with the code."""

import dataclasses
from pathlib import Path

import pytest

from serving.cli import COMMANDS
from serving.config import ServerConfig


README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("field", dataclasses.fields(ServerConfig), ids=lambda field: field.name)
def test_every_flag_is_described(field):
    assert f"`--{field.name.replace('_', '-')}`" in README


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_named(command):
    assert f"jaxmoe {command}" in README or f"`{command}`" in README
