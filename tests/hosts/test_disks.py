"""The disks that other tests mount: what they do is what a real one does."""

import errno
import os
import threading

import pytest

KINDS = pytest.mark.parametrize("kind", ["tmpfs", "ext4"])


@KINDS
def test_a_full_disk(small_disk, kind):
    """Nothing more fits on it, until something is removed."""
    disk = small_disk(16 << 20, kind)
    filler = disk.fill()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        (disk.path / "more").write_bytes(bytes(1 << 16))
    filler.unlink()
    (disk.path / "more").write_bytes(bytes(1 << 16))


@KINDS
def test_a_read_only_disk(small_disk, kind):
    """It can be read, and written again when it is mounted for that."""
    disk = small_disk(16 << 20, kind)
    (disk.path / "file").write_text("here")
    disk.read_only()
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        (disk.path / "more").touch()
    assert (disk.path / "file").read_text() == "here"
    disk.read_only(False)
    (disk.path / "more").touch()


def test_a_broken_disk(small_disk):
    """An open file cannot be written any more."""
    disk = small_disk(16 << 20, "ext4")
    with open(disk.path / "file", "wb", buffering=0) as file:
        file.write(b"here")
        disk.fail()
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.fsync(file.fileno())


def test_a_frozen_disk(small_disk):
    """Who writes waits until it is thawed."""
    disk = small_disk(16 << 20, "ext4")
    disk.freeze()
    writer = threading.Thread(target=(disk.path / "file").write_text, args=["here"], daemon=True)
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    disk.thaw()
    writer.join(30)
    assert (disk.path / "file").read_text() == "here"
