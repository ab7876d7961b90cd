"""The page of the GPU benchmark."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..harness import cell, spread, table
from ..junit import outcomes

_UNITS = {"gb_per_s": "GB/s", "s_per_gb": "s/GB"}
_NOTES = """
- `torch DefaultStager` is torch's own stager with pinned, shared memory and copies that do not block. In torch 2.11 it
  closes its inner stager after each save, and fails in the next one: here that is kept until the end. Its stream does
  not wait for the training stream.
- `torch_checkpointing` has its pinned memory and its copies that do not block.
- `in chunks` is what this package does: 1 GiB a registration. The longest latencies are of a kernel's launch with its
  result, and of a `cudaMalloc` of 64 MiB, in a thread of the process that registers, and in another process.
"""


def collect(folder: Path) -> dict[str, Any]:
    """Reads the results in and below a folder. If two files have the same step, the newer one counts."""
    files = sorted(folder.rglob("*"), key=lambda path: path.stat().st_mtime)
    content: dict[str, Any] = {"machines": {}, "ended": {}, "steps": {}, "tests": {}}
    for file in files:
        if file.name.startswith("call-") and file.suffix == ".json":
            call = json.loads(file.read_text())
            content["machines"][file.stem] = call["machine"]
            content["ended"] |= call["ended"]
            content["steps"] |= call["steps"]
        elif file.suffix == ".xml" and file.stem.startswith("test_"):
            content["tests"][file.stem] = _counts(file)
    return content


def _counts(file: Path) -> dict[str, Any]:
    found = outcomes(file)
    failed = [f"{one.where.rpartition('.')[2]}::{one.name}" for one in found if one.is_bad]
    skipped = sum(one.outcome == "skipped" for one in found)
    properties = ElementTree.parse(file).getroot().iter("property")
    recorded = {one.get("name"): one.get("value") for one in properties}
    return {"tests": len(found), "failed": failed, "skipped": skipped, "recorded": recorded}


def render(content: dict[str, Any]) -> str:
    machines = {call: found for call, found in content["machines"].items() if isinstance(found, dict)}
    named = {call: _machine(found) for call, found in machines.items()}
    where = list(named.values())[:1] if len(set(named.values())) == 1 else [f"{c}: {named[c]}" for c in sorted(named)]
    rehearsed = any(found.get("rehearsal") for found in machines.values())
    what = "**A rehearsal on a CPU: these figures say nothing.** " if rehearsed else ""
    parts = [f"{what}{'. '.join(where)}. Each figure is the median, and in brackets the least and the greatest."]
    rows = [(name, *_test_row(found)) for name, found in content["tests"].items()]
    if rows:
        parts += ["## Tests", table(("file", "run", "failed", "recorded"), rows)]
    for name, results in content["steps"].items():
        places = sorted({result["files"] for result in results})
        parts += [f"## {name}", f"Files in `{'`, `'.join(places)}`.", _table_of(results)]
    left = {name: word for name, word in content["ended"].items() if word != "done"}
    if left:
        parts += ["## Not whole", table(("step", "how it ended"), sorted(left.items()))]
    return "\n\n".join([*parts, _NOTES.strip()])


def _machine(found: dict[str, Any]) -> str:
    about = (
        f"{found.get('gpu', 'CPU')}, torch {found.get('torch')}, CUDA {found.get('cuda')}, {found.get('cores')} cores"
    )
    return f"{about}, commit {found['commit']}" if "commit" in found else about


def _test_row(found: dict[str, Any]) -> tuple[str, str, str]:
    recorded = ", ".join(f"{name}: {value}" for name, value in found["recorded"].items())
    return str(found["tests"] - found["skipped"]), ", ".join(found["failed"]) or "none", recorded


def _table_of(results: Sequence[dict[str, Any]]) -> str:
    fields = list(dict.fromkeys(field for result in results for field in result.get("values", {})))
    rows = []
    for result in results:
        failed = [f"failed: {result['error'].splitlines()[-1]}", *[""] * (len(fields) - 1)] if "error" in result else []
        rows.append(
            (result["name"].replace(" | ", ": ") or result["what"], *(failed or _cells(result["values"], fields)))
        )
    return table(("", *(_UNITS.get(field, field) for field in fields or ["result"])), rows)


def _cells(values: dict[str, list[float]], fields: Iterable[str]) -> list[str]:
    return [cell(spread(values.get(field, [])), "{:.3g}".format) for field in fields]
