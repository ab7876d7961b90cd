"""The pages' processes have a directory of their own for temporary files: suites that run at once look at theirs."""

from ..lab.leak_check import nothing_left_behind, temporary_directory

__all__ = ["nothing_left_behind", "temporary_directory"]
