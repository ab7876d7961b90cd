"""A path's file system is that of the nearest mount above it, whatever the mounts' names are made of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dcp_tensorizer._storage.local import file_system

LINE = b"%d 27 0:%d / %s rw,relatime shared:1 - %s server:/export rw\n"


def listed(tmp_path: Path, *mounts: tuple[bytes, bytes]) -> Path:
    """Writes a list of mounts and their types, as the kernel does."""
    path = tmp_path / "mountinfo"
    path.write_bytes(b"".join(LINE % (n, n, mount, kind) for n, (mount, kind) in enumerate(mounts, 30)))
    return path


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("plain", b"plain"),
        ("Läufe-実験", "Läufe-実験".encode()),
        ("a b\tc\nd\\e", rb"a\040b\011c\012d\134e"),
        ("\\040", rb"\134040"),
        ("no\u00a0break\u3000\x0b\r\x85", "no\u00a0break\u3000\x0b\r\x85".encode()),
        (os.fsdecode(b"latin-\xe9"), b"latin-\xe9"),
    ],
)
def test_a_mount_is_found_by_its_name(tmp_path: Path, name: str, escaped: bytes) -> None:
    """Mount points have any encoding. The list escapes white space and backslashes."""
    at = b"/mnt/" + escaped
    mounts = listed(tmp_path, (b"/", b"ext4"), (b"/mnt", b"xfs"), (at, b"nfs4"), (b"/\xff", b"fuse"))
    inside, beside = Path("/mnt", name, "run", "step"), Path("/mnt", f"{name}2")
    assert [file_system(path, mounts) for path in (inside, inside.parents[1], beside)] == ["nfs4", "nfs4", "xfs"]
    assert file_system(Path("/elsewhere"), mounts) == "ext4"


def test_the_last_mount_at_a_place_counts(tmp_path: Path) -> None:
    """A later mount hides those below its path."""
    assert file_system(Path("/a/b"), listed(tmp_path, (b"/a", b"ext4"), (b"/a", b"nfs"))) == "nfs"


def test_without_a_list_nothing_is_known(tmp_path: Path) -> None:
    """Without a list of mounts, as on systems other than Linux, the type is unknown."""
    assert file_system(Path("/a"), tmp_path / "missing") == ""
