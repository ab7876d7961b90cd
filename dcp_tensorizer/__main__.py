"""``dcp-tensorizer``, and ``python -m dcp_tensorizer``."""

from __future__ import annotations

import signal
import sys
from types import FrameType

_INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it


def main() -> None:
    """Runs the command line, if what it needs is installed."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.stderr.write(f"dcp-tensorizer needs {error.name}: pip install 'dcp_tensorizer[cli]'\n")
        sys.exit(2)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    try:
        from ._cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        code = _INTERRUPTED
    sys.exit(code)


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the command by an exception, so that unfinished results are removed."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
