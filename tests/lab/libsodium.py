"""Gives a virtual environment a libsodium if the system has none (``python -m tests.lab.libsodium``).

tensorizer needs the library through libnacl, which looks for the system's first and in its own folder last. pyzmq's
wheels for Linux contain the library. So a fresh machine only needs a link from one folder to the other.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Links the library if libnacl finds none. Fails if that does not help."""
    if _is_there():
        return
    spec = importlib.util.find_spec("libnacl")
    assert spec is not None
    assert spec.origin is not None
    link = Path(spec.origin).parent / "libsodium.so"
    files = importlib.metadata.files("pyzmq") or ()
    (library,) = (Path(str(file.locate())) for file in files if file.name.startswith("libsodium"))
    link.unlink(missing_ok=True)
    link.symlink_to(library)
    if not _is_there():
        raise SystemExit("there is no libsodium: install it with the system's packages")


def _is_there() -> bool:
    code = "from tensorizer import EncryptionParams; EncryptionParams.random()"
    return not subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode


if __name__ == "__main__":
    main()
