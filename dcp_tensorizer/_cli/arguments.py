"""Command-line arguments shared by several commands, and their parsers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._runtime.validation import did_you_mean
from .._storage.urls import protocols_of
from ..errors import ConversionError, DecryptionError

if TYPE_CHECKING:
    import torch

    from .._tensor_file.encryption import DecryptionParams


_KEY_BYTES = 32

Checkpoint = Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint: local path, or URL that fsspec opens.")]
Published = Annotated[
    str, typer.Argument(metavar="PUBLISHED", help="The directory of a model's versions: local path or URL.")
]
KeyFile = Annotated[
    Path | None, typer.Option("--key-file", metavar="FILE", help="The key of an encrypted checkpoint: 32 bytes.")
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", metavar="FILE", help="The passphrase; a newline at its end is ignored."),
]


def _here_or_before(context: typer.Context, given: bool) -> bool:
    """Returns whether ``--json`` was given: after the command, before the command, or before its group."""
    above = context.parent
    while above is not None:
        given = given or bool(above.params.get("as_json"))
        above = above.parent
    return given


def _show_version(wanted: bool) -> None:
    if wanted:
        from .._version import environment

        typer.echo(environment())
        raise typer.Exit


Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, for scripts.", callback=_here_or_before)
]
Version = Annotated[
    bool,
    typer.Option(
        "--version",
        help="Show the version and the environment, and exit.",
        callback=_show_version,
        is_eager=True,
    ),
]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option", metavar="KEY=VALUE", help="For the fsspec filesystem; VALUE may be JSON; repeatable."
    ),
]


def read_options(given: list[str] | None, *paths: str | None) -> dict[str, Any]:
    if given and not any(path and protocols_of(path) for path in paths):
        raise typer.BadParameter("has no effect on local paths. Leave it out.", param_hint="--storage-option")
    options = {}
    for option in given or []:
        key, equals, text = option.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"must have the form KEY=VALUE, got {key!r}.", param_hint="--storage-option")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options


def read_key(key_file: Path | None, passphrase_file: Path | None) -> DecryptionParams | None:
    """Reads a key or a passphrase from a file, because other users of the machine can see the command line."""
    if key_file is None and passphrase_file is None:
        return None
    if key_file is not None and passphrase_file is not None:
        raise typer.BadParameter(
            "cannot be combined with --passphrase-file. Give one of them.", param_hint="--key-file"
        )
    from .._tensor_file.encryption import decryption_key

    try:
        key = None if key_file is None else key_file.read_bytes()
        if key is not None and len(key) != _KEY_BYTES:
            raise ValueError(
                f"a key must have {_KEY_BYTES} bytes, got {len(key):,}. Pass a passphrase with --passphrase-file."
            )
        passphrase = None if passphrase_file is None else passphrase_file.read_text(encoding="utf-8").removesuffix("\n")
        return decryption_key(key=key, passphrase=passphrase)
    except (OSError, ValueError) as error:
        raise DecryptionError(f"cannot read a key from {key_file or passphrase_file}: {error}") from None


def read_dtype(name: str | None) -> torch.dtype | None:
    import torch

    dtypes = {key: value for key, value in vars(torch).items() if isinstance(value, torch.dtype)}
    floats = {key: value for key, value in dtypes.items() if value.is_floating_point}
    if name is not None and name not in floats:
        meant = did_you_mean([name], floats)
        raise typer.BadParameter(f"must be a floating-point dtype of torch, got {name!r}{meant}", param_hint="--dtype")
    return floats[name] if name else None


def read_split(file: str | None) -> dict[str, int]:
    return {} if file is None else _read_rules(file, int, 'patterns and dimensions, like {"*.q_proj.weight": 0}')


def read_renaming(file: str | None) -> dict[str, str]:
    return {} if file is None else _read_rules(file, str, 'patterns and new keys, like {"layers.*.wq": "blocks.*.q"}')


def _read_rules(file: str, kind: type, what: str) -> dict[str, Any]:
    try:
        with open(file, encoding="utf-8") as stream:
            rules = json.load(stream)
    except (OSError, ValueError) as error:
        raise ConversionError(f"cannot read the rules in {file}: {error}") from error
    if not isinstance(rules, dict) or not all(type(value) is kind for value in rules.values()):
        raise ConversionError(f"{file} is not a JSON object of {what}")
    return rules


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"  # a longer one may be infinite as a float
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def read_nbytes(text: str) -> int:
    match = re.fullmatch(rf"{_NUMBER}\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS or not (nbytes := int(float(match[1]) * _UNITS[match[2]])):
        raise typer.BadParameter(f"must be a size like 5GB, got {text!r}.", param_hint="--shard-size")
    return nbytes


def read_seconds(text: str) -> float:
    match = re.fullmatch(rf"{_NUMBER}([smhdw])", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"must be an age like 12h or 7d, got {text!r}.", param_hint="--older-than")
    return float(match[1]) * _SECONDS[match[2]]
