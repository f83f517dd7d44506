"""Versions, commit, hardware and date: what a measured number means nothing without."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("memfit", "torch", "numpy", "scipy")


def describe_machine(packages: Iterable[str] = PACKAGES, num_threads: int = 1) -> dict[str, Any]:
    """The head of a result file. `num_threads`: what PyTorch was told to use."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0] if models else cpu
    return {
        "versions": {"python": platform.python_version()} | {name: _find_version(name) for name in packages},
        "commit": (_git("rev-parse", "--short=12", "HEAD") or "unknown")
        + (" + changes" if _git("status", "--porcelain", "--untracked-files=no") else ""),
        "hardware": {"cpu": cpu, "num_cores": os.cpu_count(), "num_threads": num_threads},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a result file, its folder made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Put the text between two marks of a Markdown page, in place of what stands there."""
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")


def draw_machine(document: dict[str, Any]) -> str:
    """The head of a result file in one line."""
    about = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    hardware = document["hardware"]
    threads = f"{hardware['num_threads']} thread{'s' if hardware['num_threads'] != 1 else ''}"
    environment = "".join(f", {name}={value}" for name, value in document.get("environment", {}).items())
    return f"{about}{environment}; {hardware['cpu']}, {hardware['num_cores']} cores, {threads}; commit {document['commit']}; {document['date']}"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _find_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
