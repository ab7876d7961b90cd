"""What a checkpoint's parts hold together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorizer import DecryptionParams, EncryptionParams

from dcp_tensorizer._format import encryption
from dcp_tensorizer._format.encryption import encryption_cipher
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tools.checkpoint_view import read_parts, unlock_parts

from .checkpoints import make_checkpoint


def test_a_passphrase_makes_one_key_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each rank saved for itself: to make it takes long on purpose."""
    params = EncryptionParams.from_string("walrus", opslimit=1, memlimit=8192)
    for rank in range(3):
        make_checkpoint(tmp_path, {f"x{rank}": torch.ones(3)}, None, None, encryption_cipher(params), rank=rank)
    made = []
    derive = encryption._decryption_cipher
    monkeypatch.setattr(encryption, "_decryption_cipher", lambda *given: [made.append(1), derive(*given)][1])
    storage = open_storage(tmp_path)
    ciphers = unlock_parts(storage, read_parts(storage), DecryptionParams.from_string("walrus"))
    assert (len(made), len(ciphers), len({cipher.key for cipher in ciphers.values() if cipher})) == (1, 3, 1)
