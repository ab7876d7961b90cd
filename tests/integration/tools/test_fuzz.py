"""Mutated files of every format (see `tests.soak.fuzz`) give data or a CheckpointError, in bounded time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ...soak.fuzz import KINDS, TARGETS, Change, run_case

CHANGES = st.lists(
    st.builds(
        Change,
        st.sampled_from(KINDS),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 2**64 - 1),
        st.integers(1, 128),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module", params=TARGETS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, bytes]:
    """Returns a kind of file, a folder with such a file, and the values in it."""
    folder = tmp_path_factory.mktemp("fuzz")
    target = TARGETS[request.param]
    target.make(folder)
    return request.param, folder, (folder / target.file).read_bytes()


@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(changes=CHANGES)
def test_changed_files(kind: tuple[str, Path, bytes], changes: list[Change]) -> None:
    """A mutated file gives the saved values, if the format has digests, or a CheckpointError."""
    name, folder, original = kind
    run_case(folder, TARGETS[name], original, changes)
