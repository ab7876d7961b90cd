"""New keys of a conversion: without a prefix, renamed, with another prefix."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dcp_tensorizer.errors import ConversionError
from dcp_tensorizer.tools import ConvertOptions
from dcp_tensorizer.tools._formats.registry import new_paths
from dcp_tensorizer.tools._view import Path

PATHS: dict[str, Path] = {
    "app.model.layers.0.wq": ("app", "model", "layers.0.wq"),
    "app.model.layers.1.wq": ("app", "model", "layers.1.wq"),
    "app.optim.groups.0.lr": ("app", "optim", "groups", 0, "lr"),
}


def renamed(**options: Any) -> list[Path]:
    return list(new_paths(PATHS, ConvertOptions(**options), "run/step-1").values())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, list(PATHS.values())),
        ({"strip_prefix": "app."}, [path[1:] for path in PATHS.values()]),
        ({"strip_prefix": "app.model.layers."}, [("0.wq",), ("1.wq",), PATHS["app.optim.groups.0.lr"]]),
        ({"add_prefix": "net."}, [("net", *path) for path in PATHS.values()]),
        ({"add_prefix": "net.my_"}, [("net", "my_app", *path[1:]) for path in PATHS.values()]),
        (
            {"strip_prefix": "app.model.", "rename": {"layers.*.wq": "blocks.*.q_proj"}, "add_prefix": "net."},
            [("net", "blocks.0.q_proj"), ("net", "blocks.1.q_proj"), ("net", *PATHS["app.optim.groups.0.lr"])],
        ),
        (
            {"rename": {"app.model.layers.1.wq": "app.model.last", "*.wq": "*.q"}},
            [("app", "model", "layers.0.q"), ("app", "model", "last"), PATHS["app.optim.groups.0.lr"]],
        ),
        (
            {"rename": {"app.*.lr": "rate"}},
            [*list(PATHS.values())[:2], ("rate",)],
        ),
    ],
    ids=["nothing", "strip", "strip a part", "add", "add a part", "all three", "first that matches", "no star"],
)
def test_new_places(options: dict[str, Any], expected: list[Path]) -> None:
    """Prefixes remove or add dicts, and a renamed key stays in the dicts whose keys it begins with."""
    assert renamed(**options) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strip_prefix": "zz."}, "no selected key of run/step-1 begins with 'zz.'"),
        ({"strip_prefix": "app.model.layers.0.wq"}, "nothing is left of the key 'app.model.layers.0.wq'"),
        ({"rename": {"*.wk": "*.k"}}, "no selected key of run/step-1 matches '*.wk'"),
        ({"rename": {"*.wq": "q"}}, "'app.model.layers.0.wq' and 'app.model.layers.1.wq' of run/step-1 would both be"),
        ({"rename": {"*.wq": "*.q.*"}}, "'*.wq' cannot become '*.q.*'"),
        ({"rename": {"*.wq": ""}}, "'*.wq' cannot become ''"),
    ],
)
def test_what_cannot_be_named_so(options: dict[str, Any], words: str) -> None:
    """An invalid rule is an error that names the key or the pattern."""
    with pytest.raises(ConversionError, match=re.escape(words)):
        renamed(**options)
