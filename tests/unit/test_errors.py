"""The exception tree."""

import pickle

import pytest

from dcp_tensorizer import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_survive_pickling(name):
    """DCP hands errors from rank to rank: type and message arrive."""
    error = pickle.loads(pickle.dumps(getattr(errors, name)("rank 3: no space on /data")))
    assert type(error) is getattr(errors, name)
    assert str(error) == "rank 3: no space on /data"
    assert isinstance(error, errors.CheckpointError)
