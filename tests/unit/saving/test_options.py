"""The options of a writer: their checks, defaults and ``repr``."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import pickle
from typing import Any

import numpy as np
import pytest
from tensorizer import EncryptionParams

from dcp_tensorizer import SaveLimits, TensorizerStorageWriter
from dcp_tensorizer._runtime.threads import cores
from dcp_tensorizer._writer_process.options import SaveOptions

KEY = bytes(range(32))


def options(**given: Any) -> SaveOptions:
    """Returns the options of a writer with the given arguments."""
    return TensorizerStorageWriter(**given).saver.options


def test_limits_are_pinned_and_cannot_be_changed() -> None:
    """The defaults are 10 minutes, 256 MiB, 3 failures and 10 reuses, and the limits are frozen."""
    limits = SaveLimits()
    assert dataclasses.astuple(limits) == (600.0, 268_435_456, 3, 10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        limits.timeout = 1.0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(SaveLimits(5.0, 6, None))) == SaveLimits(5.0, 6, None)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"timeout": 0}, ValueError, "timeout must be more than 0 seconds, .*, got 0"),
        ({"timeout": math.inf}, ValueError, "timeout must be more .*, got inf"),
        ({"timeout": "600"}, TypeError, "timeout must be a number of seconds, got str."),
        ({"buffer_bytes": 0}, ValueError, "buffer_bytes must be an int of at least 1, got 0."),
        ({"buffer_bytes": 1e9}, TypeError, "buffer_bytes must be an int of at least 1, got float."),
        ({"max_consecutive_failures": 0}, ValueError, "max_consecutive_failures must be .* or None, got 0."),
        ({"max_reuses": 0}, ValueError, "max_reuses must be an int of at least 1, got 0."),
        ({"max_consecutive_failures": "3"}, TypeError, "max_consecutive_failures must be .* or None, got str."),
    ],
)
def test_limits_that_make_no_sense_are_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    """Invalid limits are refused when `SaveLimits` is constructed."""
    with pytest.raises(error, match=message):
        SaveLimits(**given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"staging": "none"}, ValueError, "staging must be one of 'buffer', 'device', 'shared', got 'none'"),
        ({"thread_count": 0}, ValueError, "thread_count must be an int of at least 1, or None, got 0."),
        ({"storage_options": "key=x"}, TypeError, "storage_options must be a mapping, or None, got str."),
        ({"limits": {"timeout": 5}}, TypeError, "limits must be an instance of SaveLimits, got dict."),
        ({"path": "/a", "local": "/b", "limits": 5}, TypeError, "limits must be an instance of SaveLimits, got int."),
        ({"on_report": 5}, TypeError, "on_report must be"),
        ({"encryption": KEY}, TypeError, "encryption must be tensorizer.EncryptionParams, got bytes"),
        (
            {"encryption": EncryptionParams(KEY), "staging": "shared"},
            ValueError,
            "'shared' and encryption cannot be combined",
        ),
        ({"encryption": EncryptionParams(KEY), "sha256": True}, ValueError, "sha256 and encryption cannot be combined"),
        ({"encryption": EncryptionParams(KEY), "reuse_unchanged": True}, ValueError, "reuse_unchanged and encryption"),
        (
            {"path": "/a", "local": "/b", "reuse_unchanged": True},
            ValueError,
            "reuse_unchanged and local cannot be combined",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each error names the argument and the allowed values."""
    with pytest.raises(error, match=message):
        options(**given)


class OwnLimits(SaveLimits):
    """A subclass, which the writer process cannot import."""


class Odd(enum.IntEnum):
    TWO = 2


class OddStaging(str, enum.Enum):
    SHARED = "shared"


def test_options_are_plain_whatever_was_passed() -> None:
    """The writer process gets no type of the caller's modules, and no number of NumPy."""
    limits = OwnLimits(np.float32(60), Odd.TWO, np.int64(4), Odd.TWO)  # type: ignore[arg-type]
    given = {"limits": limits, "staging": OddStaging.SHARED, "thread_count": Odd.TWO, "storage_options": {"n": Odd.TWO}}
    made = options(**given)
    expected = SaveOptions(
        limits=SaveLimits(60.0, 2, 4, 2), staging="shared", thread_count=2, storage_options={"n": 2}, cipher=None
    )
    assert made == expected
    assert pickle.dumps(made) == pickle.dumps(expected)


def test_device_staging_is_refused_with_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the environment variable, and the alternative."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ValueError, match=r"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.*staging='buffer'"):
        TensorizerStorageWriter(staging="device")
    assert TensorizerStorageWriter(staging="buffer").checkpoint_id is None


def test_threads_are_as_many_as_there_are_cores_up_to_four() -> None:
    """Without a number, there are as many threads as cores, up to four."""
    assert options().thread_count == min(4, cores())
    assert options(thread_count=7).thread_count == 7


def test_an_option_has_one_name_from_the_writer_to_the_writer_process() -> None:
    """The fields have the names of the arguments, except ``cipher`` and ``target``, which are made from arguments."""
    fields = {field.name for field in dataclasses.fields(SaveOptions)}
    arguments = inspect.signature(TensorizerStorageWriter).parameters.keys()
    assert fields - arguments == {"target", "cipher"}
    assert arguments - fields == {"path", "local", "encryption", "on_report", "on_progress"}


def test_storage_options_are_copied() -> None:
    """A later change of the caller's dict changes no save."""
    given = {"anon": True}
    made = options(storage_options=given)
    given["anon"] = False
    assert made.storage_options == {"anon": True}


def test_the_arguments_are_those_of_the_writer_but_for_secrets() -> None:
    """`arguments` has the writer's arguments without secrets: of ``encryption``, only whether it is set."""
    made = options(
        thread_count=2,
        storage_options={"secret": "hunter2-hunter2"},
        encryption=EncryptionParams(KEY),
        limits=SaveLimits(timeout=5.0),
    )
    assert made.arguments() == {
        "cache_staged_state_dict": True,
        "staging": "buffer",
        "overlap_staging": False,
        "overwrite": True,
        "sync_files": True,
        "thread_count": 2,
        "sha256": False,
        "reuse_unchanged": False,
        "encryption": True,
        "limits": SaveLimits(timeout=5.0),
    }
    assert "hunter2" not in repr(made)
