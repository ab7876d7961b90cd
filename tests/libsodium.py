"""Gives a virtual environment a libsodium where the system has none (``python -m tests.libsodium``).

libnacl, through which tensorizer finds it, looks for the system's first and beside itself last; and pyzmq's wheels for
Linux bring the library as it is. So a link from the one place to the other is all that a fresh machine needs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Links the library if libnacl finds none; fails if that does not help."""
    if _found():
        return
    spec = importlib.util.find_spec("libnacl")
    assert spec is not None
    assert spec.origin is not None
    link = Path(spec.origin).parent / "libsodium.so"
    files = importlib.metadata.files("pyzmq") or ()
    (library,) = (Path(str(file.locate())) for file in files if file.name.startswith("libsodium"))
    link.unlink(missing_ok=True)
    link.symlink_to(library)
    if not _found():
        raise SystemExit("there is no libsodium: install it with the system's packages")


def _found() -> bool:
    code = "from tensorizer import EncryptionParams; EncryptionParams.random()"
    return not subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode


if __name__ == "__main__":
    main()
