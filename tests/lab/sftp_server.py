"""An SFTP server (``python -m tests.lab.sftp_server PORT FOLDER``): one user, from the environment, and one folder."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import asyncssh


class _Server(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return True

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return (username, password) == (os.environ["SFTP_USER"], os.environ["SFTP_PASSWORD"])


class _Files(asyncssh.SFTPServer):
    """The files of the server. Logs the names of the files that clients sync."""

    def fsync(self, file_obj: Any) -> None:
        super().fsync(file_obj)
        name = os.path.basename(os.fsdecode(file_obj.name))
        with open(os.environ["SFTP_SYNCED"], "a") as log:
            log.write(f"{name}\n")


async def main(port: int, folder: str) -> None:
    await asyncssh.listen(
        "127.0.0.1",
        port,
        server_factory=_Server,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        sftp_factory=lambda channel: _Files(channel, chroot=folder.encode()),
        allow_scp=False,
    )
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
