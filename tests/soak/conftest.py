"""As end-to-end tests: nothing may be left after each."""

from ..lab.leak_check import nothing_left

__all__ = ["nothing_left"]
