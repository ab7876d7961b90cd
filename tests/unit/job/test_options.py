"""Checks of the manager's arguments."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from dcp_tensorizer import SaveLimits
from dcp_tensorizer._job.options import (
    check_metrics,
    check_state,
    check_survival,
    options_of_reader,
    split_limits,
)


def test_metrics() -> None:
    """Numbers of any kind become floats, and the error for another value names the metric."""
    loss = torch.tensor(0.5, requires_grad=True)  # torch warns if it becomes a number before it is detached
    assert check_metrics({"loss": loss, "n": 3}) == {"loss": 0.5, "n": 3.0}
    assert check_metrics(None) == {}
    for metrics in (3, {"loss": torch.zeros(2)}, {"loss": "low"}, {"loss": "3"}, {"loss": 10**400}, {1: 2.0}):
        with pytest.raises(TypeError, match=r"^metrics"):
            check_metrics(metrics)
    with pytest.raises(ValueError, match=r"^metrics: each name must be valid Unicode, got 'a.ud800'"):
        check_metrics({"a\ud800": 1.0})


@pytest.mark.parametrize(
    ("seconds", "every", "buffers", "writer_options", "words"),
    [
        (60, None, 3, {"staging": "shared"}, "survive cannot be combined with staging='shared'"),
        (60, None, 3, {"cache_staged_state_dict": False}, "survive cannot be combined with cache_staged_state_dict"),
        (60, None, 4, {}, "buffers must be 2 or 3, got 4"),
        (0, 1, 3, {}, "survive_every needs survive="),
        (60, 1, 2, {}, "survive_every needs survive=, buffers=3"),
        (60, 1, 3, {"staging": "device"}, "survive_every needs survive=, buffers=3 and a staging other than 'device'"),
    ],
)
def test_states_in_memory(
    seconds: float, every: int | None, buffers: int, writer_options: dict[str, Any], words: str
) -> None:
    """The error for options that cannot be combined names them."""
    check_survival(60, 1, 3, {"staging": "auto"})
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        check_survival(seconds, every, buffers, writer_options)


def test_states() -> None:
    """The error for a bare module or optimizer shows the dict to pass."""
    check_state({"model": torch.nn.Linear(1, 1)})
    model = torch.nn.Linear(1, 1)
    for state, words in (
        (model, '{"model": model}, got Linear.'),
        (torch.optim.SGD(model.parameters()), '{"optimizer": optimizer}, got SGD.'),
        ([model], '{"model": model}, got list.'),
    ):
        with pytest.raises(TypeError, match="^" + re.escape(f"state must be a dict, such as {words}")):
            check_state(state)


def test_options() -> None:
    """Readers get the writer's options unless the user passes others. The manager counts failures itself."""
    limits, failures = split_limits({"limits": SaveLimits(timeout=7.0, max_consecutive_failures=2)})
    assert (limits, failures) == (SaveLimits(timeout=7.0, max_consecutive_failures=None), 2)
    for slip, words in (
        ("keep_lates", "'keep_lates': did you mean 'keep_latest'? Besides its own"),
        ("sync_file", "'sync_file': did you mean 'sync_files'? Besides its own"),
        ("colour", "'colour'. Besides its own"),
        ("writer_options", "'writer_options': did you mean 'reader_options'? Besides its own"),
    ):
        with pytest.raises(TypeError, match="^" + re.escape(f"CheckpointManager has no option {words}")):
            split_limits(
                {slip: 2, "overwrite": True}, own=["keep_latest", "keep_every", "reader_options", "writer_options"]
            )
    writer = {"storage_options": {"key": "k"}}
    expected = {"page_cache": False, "storage_options": {"key": "k"}, "timeout": 9.0, "verify": False}
    assert options_of_reader("/run", writer, limits, {"timeout": 9.0, "verify": False}) == expected
    with pytest.raises(TypeError, match=r"^reader_options must be a mapping"):
        options_of_reader("/run", writer, limits, 7)
    with pytest.raises(TypeError, match="unexpected keyword argument 'verfy'"):
        options_of_reader("/run", writer, limits, {"verfy": True})
    with pytest.raises(TypeError, match="verify must be True or False"):
        options_of_reader("/run", writer, limits, {"verify": "no"})
