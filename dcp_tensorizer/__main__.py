"""Entry point of ``dcp-tensorizer`` and of ``python -m dcp_tensorizer``."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from ._version import environment

_INTERRUPTED = 130  # 128 + SIGINT, the convention of shells


def main() -> None:
    """Runs the command line.

    If rich or typer is missing, only ``--version`` works. Any other command prints which extra to install, and exits
    with code 2.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        if sys.argv[1:] == ["--version"]:
            sys.stdout.write(f"{environment()}\n")
            sys.exit()
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
    """Ends the command with an exception, so that ``finally`` blocks remove unfinished results."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
