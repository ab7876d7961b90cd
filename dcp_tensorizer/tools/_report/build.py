"""Builds the HTML report of one or several checkpoints."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import resources
from typing import TYPE_CHECKING, Any

from ..._runtime.validation import check_paths
from ..._tensor_file.dtypes import dtype_name
from .._atomic_output import beside, check_apart
from .._find import step_of
from .._formats.registry import open_all
from .._view import CheckpointView, StoredTensor
from .measure import measure
from .statistics import Statistics

if TYPE_CHECKING:
    from ..._tensor_file.encryption import DecryptionParams


@dataclass(frozen=True, slots=True)
class Reported:
    """The result of `report`.

    Attributes:
        path: The path of the page, without credentials.
        checkpoints: The paths of the checkpoints, in the order of the page.
        tensors: Number of tensors on the page.
        nbytes: Size of the page.
        seconds: The time taken.
    """

    path: str
    checkpoints: tuple[str, ...]
    tensors: int
    nbytes: int
    seconds: float


def report(
    checkpoints: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str] = "report.html",
    *,
    storage_options: Mapping[str, Any] | None = None,
    encryption: DecryptionParams | None = None,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Reported:
    """Writes an HTML page about checkpoints: sizes, norms, extremes, histograms, and their changes over the steps.

    The page needs no network. Each block of a tensor is read once, but tensors of a tensorizer file may be read twice,
    to verify their CRC-32. A tensor with the same digests as in the previous checkpoint is not read again.

    Args:
        checkpoints: Checkpoints of any format that `convert` reads. If each name has a step, and no two steps are
            equal, the page sorts the checkpoints by step.
        output: The page: a local path, or a URL. An existing file is replaced.
        storage_options: Options of the storages of URLs, such as credentials.
        encryption: The key, if a checkpoint is encrypted. The page is not encrypted.
        on_progress: Called with the bytes read so far and the total.

    Raises:
        TypeError, ValueError: ``checkpoints`` is not a list of paths, or is empty.
        NotCommitted: there is no checkpoint at one of the paths.
        DecryptionError: the key is missing, wrong, or given although no checkpoint is encrypted.
        WriteError: the page cannot be written.
        ConversionError: ``output`` is a URL that lacks a directory or a file name, or is a checkpoint or inside one.
        CheckpointError: a checkpoint is damaged or cannot be read.
    """
    checkpoints = check_paths("checkpoints", checkpoints)
    if not checkpoints:
        raise ValueError("checkpoints is empty. Name at least one.")
    started = time.monotonic()
    options = storage_options or {}
    views = open_all(checkpoints, options, encryption)
    check_apart(output, checkpoints)
    steps = [step_of(_name(view)) for view in views]
    if None not in steps and len(set(steps)) == len(steps):
        views.sort(key=lambda view: step_of(_name(view)) or 0)
    page = _page(views, on_progress)
    storage, name = beside(os.fspath(output), options)
    storage.make_directory()
    storage.put(name, page, sync=True)
    keys = {key for view in views for key in view.tensors}
    seconds = time.monotonic() - started
    return Reported(f"{storage.path}/{name}", tuple(view.path for view in views), len(keys), len(page), seconds)


def _page(views: Sequence[CheckpointView], on_progress: Callable[[int, int], object]) -> bytes:
    names = [_name(view) for view in views]
    if len(set(names)) < len(names):
        names = [view.path for view in views]
    checkpoints = []
    for name, view in zip(names, views, strict=True):
        saved = None if view.saved is None else datetime.fromtimestamp(view.saved, timezone.utc)
        checkpoints.append(
            {
                "name": name,
                "step": step_of(_name(view)),
                "saved": saved and saved.isoformat(timespec="seconds"),
                "format": view.format,
                "bytes": view.nbytes,
                "objects": len(view.objects),
            }
        )
    return _render({"checkpoints": checkpoints, "tensors": [_tensor_row(*one) for one in measure(views, on_progress)]})


def _name(view: CheckpointView) -> str:
    return view.path.rstrip("/").rpartition("/")[2]


# --- the HTML page ----------------------------------------------------------------------------------------------------
#
# Data, styles and scripts are inline, and the page makes no request. Names come from checkpoints and are untrusted. The
# page has them in a JSON document, which is escaped so that it cannot end its ``script`` element, and the scripts show
# them only as text. The content security policy in the head allows only these scripts, by their digests.

_SCRIPTS = ("data.js", "draw.js", "treemap.js", "charts.js", "table.js", "detail.js", "main.js")
_DIGITS = 5


def _render(data: Mapping[str, Any]) -> bytes:
    style, script = _read("page.css"), "\n".join(map(_read, _SCRIPTS))
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    parts = {
        "POLICY": f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}",
        "STYLE": style,
        "SCRIPT": script,
        "DATA": text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),  # cannot contain a tag
    }
    begin, *rest = _read("page.html").split("{{")
    return (begin + "".join(parts[name] + text for name, _, text in (p.partition("}}") for p in rest))).encode()


def _tensor_row(tensor: StoredTensor, statistics: Sequence[Statistics | None]) -> list[Any]:
    """Returns a row of the page. The statistics of a checkpoint are in the order of FIELDS in ``data.js``."""
    rows = [
        None
        if one is None
        else [
            *(one.elements, one.zeros, one.nans, one.infinities),
            *map(_short, (one.smallest, one.largest, one.mean, one.deviation, one.norm, one.distance)),
            *(_short(one.low), _short(one.high), list(one.histogram)),
        ]
        for one in statistics
    ]
    return [tensor.key, list(tensor.shape), dtype_name(tensor.dtype), tensor.nbytes, rows]


def _short(number: float | None) -> float | None:
    """Rounds to `_DIGITS` digits. JSON has neither NaN nor infinity: for these, returns None."""
    return float(f"{number:.{_DIGITS}g}") if number is not None and math.isfinite(number) else None


def _digest(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
