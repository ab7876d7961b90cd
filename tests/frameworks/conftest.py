"""As in tests/e2e, no process, shared memory or temporary file may be left after a test."""

from ..lab.leak_check import nothing_left

__all__ = ["nothing_left"]


def pytest_configure(config):
    """Ignores warnings of the frameworks about future changes of theirs and of torch."""
    config.addinivalue_line("filterwarnings", "default")
