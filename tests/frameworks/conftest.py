"""As in tests/e2e: after every test nothing may be left, neither processes nor shared memory nor temporary files."""

from ..lab.leak_check import nothing_left

__all__ = ["nothing_left"]


def pytest_configure(config):
    """The frameworks warn, of what they and torch will change."""
    config.addinivalue_line("filterwarnings", "default")
