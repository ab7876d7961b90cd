"""Tests for packages that add a storage to this package. Install pytest to use them."""

import pytest

pytest.register_assert_rewrite(f"{__name__}._storage")  # so that a failed assert shows its values

from ._storage import StorageTests, on_a_page, put_file  # noqa: E402

__all__ = ["StorageTests", "on_a_page", "put_file"]
