"""The exception tree, and errors as a part of other errors' messages."""

import pickle

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from dcp_tensorizer import errors


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "unwrap"])
def test_errors_survive_pickling(name):
    """DCP hands errors from rank to rank: type and message arrive."""
    error = pickle.loads(pickle.dumps(getattr(errors, name)("rank 3: no space on /data")))
    assert type(error) is getattr(errors, name)
    assert str(error) == "rank 3: no space on /data"
    assert isinstance(error, errors.CheckpointError)


def test_errors_of_ours_speak_for_themselves_and_others_need_their_type():
    """A ``KeyError`` has nothing but the key for a message."""
    assert errors.describe(errors.WriteError("no space on /data")) == "no space on /data"
    assert errors.describe(KeyError("w")) == "KeyError: 'w'"
    assert errors.describe(OSError(28, "No space left on device")) == "OSError: [Errno 28] No space left on device"


def test_what_is_in_an_error_of_dcp():
    """The error of the lowest rank that has one of ours, or else of the lowest; anything else is itself."""
    ours, other = errors.ReadError("rank 3: damaged"), KeyError("w")
    failures = {5: (errors.WriteError("rank 5: full"), None), 3: (ours, None), 1: (other, None)}
    assert errors.unwrap(CheckpointException("load", failures)) is ours
    assert errors.unwrap(CheckpointException("load", {1: (other, None)})) is other
    assert errors.unwrap(other) is other
    assert errors.unwrap(empty := CheckpointException("load", {})) is empty
