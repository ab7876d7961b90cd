"""``dcp-tensorizer``, and ``python -m dcp_tensorizer``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line, if what it needs is installed."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.stderr.write(f"dcp-tensorizer needs {error.name}: pip install 'dcp_tensorizer[cli]'\n")
        sys.exit(2)
    from ._cli.app import app

    app(prog_name="dcp-tensorizer")


if __name__ == "__main__":
    main()
