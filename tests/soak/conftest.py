"""As end-to-end tests: nothing may be left after each."""

from ..e2e.conftest import _leftovers_before, _mark, _nothing_left

__all__ = ["_leftovers_before", "_mark", "_nothing_left"]
