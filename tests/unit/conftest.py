"""These tests run in one process and leave nothing behind: each module is checked for that."""

from ..lab.leak_check import nothing_left_behind

__all__ = ["nothing_left_behind"]
