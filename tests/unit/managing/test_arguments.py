"""What users give to the manager is checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcp_tensorizer import SaveLimits
from dcp_tensorizer._managing.arguments import (
    check_metrics,
    check_patterns,
    check_step,
    options_of_reader,
    split_limits,
)


def test_steps() -> None:
    """Any integer will do that is not negative and fits into an index."""
    assert [check_step(step) for step in (0, np.int32(7), 2**63 - 1)] == [0, 7, 2**63 - 1]
    for step, error in ((-1, ValueError), (2**63, ValueError), (True, TypeError), (1.0, TypeError), ("1", TypeError)):
        with pytest.raises(error, match=r"^step"):
            check_step(step)


def test_metrics() -> None:
    """Numbers of any kind become floats; what is no number is named."""
    assert check_metrics({"loss": torch.tensor(0.5), "n": 3}) == {"loss": 0.5, "n": 3.0}
    assert check_metrics(None) == {}
    for metrics in (3, {"loss": torch.zeros(2)}, {"loss": "low"}, {1: 2.0}):
        with pytest.raises(TypeError, match=r"^metrics"):
            check_metrics(metrics)


def test_patterns() -> None:
    """One string is not a list of them."""
    assert check_patterns("include", ["a.*", "b"]) == ("a.*", "b")
    for patterns in ("model.*", [7], 7):
        with pytest.raises(TypeError, match=r"^include must be a list of patterns"):
            check_patterns("include", patterns)


def test_options() -> None:
    """Readers are told what the writer knows, unless the user says otherwise; failures are counted by the manager."""
    limits, failures = split_limits({"limits": SaveLimits(timeout=7.0, max_consecutive_failures=2)})
    assert (limits, failures) == (SaveLimits(timeout=7.0, max_consecutive_failures=None), 2)
    with pytest.raises(TypeError, match=r"^CheckpointManager has no option 'keep_lates'"):
        split_limits({"keep_lates": 2, "sync_files": True})
    writer = {"storage_options": {"key": "k"}}
    expected = {"storage_options": {"key": "k"}, "timeout": 9.0, "verify": False}
    assert options_of_reader(writer, limits, {"timeout": 9.0, "verify": False}) == expected
    with pytest.raises(TypeError, match=r"^reader_options must be a mapping"):
        options_of_reader(writer, limits, 7)
