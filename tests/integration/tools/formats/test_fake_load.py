"""``torch.save`` files, read without the elements of their tensors."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dcp_tensorizer import ConversionError
from dcp_tensorizer.tools import ConvertOptions, convert

from ....lab.states import filled

UNREADABLE: dict[str, Callable[[], object]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "without data": lambda: torch.empty(3, device="meta"),
    "in a list": lambda: [torch.eye(3).to_sparse()],
    "tuple": lambda: (torch.ones(2), torch.eye(3).to_sparse()),
    "storage": lambda: torch.ones(2).untyped_storage(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, that some of these are new or old
@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("to", ["dcp_tensorizer", "dcp", "torch"])
def test_what_cannot_be_read_can_be_left_out(tmp_path: Path, kind: str, to: str) -> None:
    """An unreadable value is refused by key before anything is written, and can be excluded."""
    torch.save({"w": torch.arange(3.0), "bad": UNREADABLE[kind](), "n": 5}, tmp_path / "a.pt")
    for options in (ConvertOptions(), ConvertOptions(add_prefix="new.")):  # it is named as it is in the file
        with pytest.raises(ConversionError, match=r"a\.pt: 'bad(\.0)?' is .*, and cannot be converted. Leave it out."):
            convert(tmp_path / "a.pt", tmp_path / "b", to, options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    convert(tmp_path / "a.pt", tmp_path / "b", to, options=ConvertOptions(exclude=["bad*"]))
    convert(tmp_path / "b", tmp_path / "c.pt", "torch")
    assert str(torch.load(tmp_path / "c.pt")) == str({"w": torch.arange(3.0), "n": 5})


@pytest.mark.parametrize("how", ["compressed", "big-endian", "repacked"])
def test_torch_files_that_do_not_hold_the_elements_as_they_are(tmp_path: Path, how: str) -> None:
    """Compressed, repacked and big-endian archives are refused."""
    torch.save({"x": filled(torch.float32, (1000,))}, tmp_path / "stock.pt")
    form = zipfile.ZIP_DEFLATED if how == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "stock.pt") as stock, zipfile.ZipFile(tmp_path / "a.pt", "w", form) as out:
        for name in stock.namelist():
            out.writestr(name, b"big" if name.endswith("byteorder") and how == "big-endian" else stock.read(name))
    with pytest.raises(ConversionError, match=rf"a\.pt cannot be read: it (?:is|was) .*{how}"):
        convert(tmp_path / "a.pt", tmp_path / "b", "safetensors")
    assert not (tmp_path / "b").exists()
