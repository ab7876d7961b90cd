"""Tests for packages that extend this one. They need pytest, which this package does not install."""

import pytest

pytest.register_assert_rewrite(f"{__name__}._storage")  # so that a test that fails shows the values

from ._storage import StorageTests, on_a_page, put_file  # noqa: E402

__all__ = ["StorageTests", "on_a_page", "put_file"]
