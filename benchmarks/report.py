"""What the results of all benchmarks say of where they come from, and how they are written."""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


REPOSITORY = Path(__file__).resolve().parent.parent


def origin(commit: str | None = None) -> dict[str, str | None]:
    """What was run: the command, and `commit` or else the one that git says."""
    return {
        "commit": commit or _commit(),
        "command": shlex.join(["python", *sys.argv]),
    }


def machine() -> dict[str, Any]:
    return {"cpu": _cpu_name(), "cores": os.cpu_count()}


def versions(*packages: str) -> dict[str, str]:
    """Of Python and of those that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write(path: Path | None, document: dict[str, Any]) -> None:
    """Nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Four digits of each float in it, None for what is no number."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def _commit() -> str | None:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
