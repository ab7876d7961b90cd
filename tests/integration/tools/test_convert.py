"""Conversions in one process, to every format and back."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from tensorizer import TensorDeserializer

from dcp_tensorizer import ConversionError, ReadError, UntrustedObject
from dcp_tensorizer.tools import ConvertOptions, convert
from dcp_tensorizer.tools._formats.registry import FORMATS, open_checkpoint

from ...lab.checkpoints import ODD, make_checkpoint, save_wrapper, tensors_of
from ...lab.states import ALL_DTYPES, filled, same

SAFETENSORS_LACKS = {torch.complex32, torch.complex128}
SAFETENSORS_LACKS |= {dtype for dtype in ALL_DTYPES if "bcomplex" in str(dtype)}  # of torch 2.14


class Custom:
    """An object whose pickle could run code."""


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_in_every_format(tmp_path: Path, dtype: torch.dtype, to: str) -> None:
    """Every dtype survives a conversion to each format and back bit for bit, or is refused by key."""
    state = {"half": filled(dtype, (5, 4)), "columns": filled(dtype, (5, 4), 1), "zero": filled(dtype, (), 2)}
    if to == "safetensors" and dtype == torch.float4_e2m1fn_x2:
        del state["zero"]  # it has no dimension in which its two elements could be counted
    make_checkpoint(tmp_path / "a", state, chunks=ODD)
    if to == "safetensors" and dtype in SAFETENSORS_LACKS:
        with pytest.raises(ConversionError, match="'half'"):
            convert(tmp_path / "a", tmp_path / "b", to)
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        return
    convert(tmp_path / "a", tmp_path / "b", to)
    convert(tmp_path / "b", tmp_path / "c", "dcp_tensorizer")
    found = tensors_of(tmp_path / "c")
    assert found.keys() == state.keys()
    assert all(same(found[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize("to", FORMATS)
def test_tensors_without_elements(tmp_path: Path, to: str) -> None:
    """Empty tensors keep shape and dtype; those that make a tensorizer file unreadable are refused by key."""
    state = {"a": torch.ones(2), "plain": torch.empty(0, 3), "odd": torch.empty(2, 0, dtype=torch.bfloat16)}
    make_checkpoint(tmp_path / "a", state)
    options = ConvertOptions()
    if to == "tensorizer":
        with pytest.raises(ConversionError, match="'odd'"):
            convert(tmp_path / "a", tmp_path / "b", to)
        options = ConvertOptions(include=["a", "plain"])
    convert(tmp_path / "a", tmp_path / "b", to, options=options)
    found = tensors_of(tmp_path / "b")
    assert {key: (tuple(t.shape), t.dtype) for key, t in found.items()} == {
        key: (tuple(t.shape), t.dtype) for key, t in state.items() if key in found
    }
    assert len(found) == (2 if to == "tensorizer" else 3)
    if to == "tensorizer":
        with TensorDeserializer(tmp_path / "b", device="cpu", verify_hash=True) as stock:
            assert stock["plain"].shape == (0, 3)


def test_selecting_renaming_and_casting(tmp_path: Path) -> None:
    """`dtype` casts floating-point tensors as torch does, and leaves others as they are."""
    make_checkpoint(tmp_path / "a", {"m.w": filled(torch.float32, (3, 3)), "m.n": torch.arange(3), "o": torch.ones(1)})
    options = ConvertOptions(include=["m.*"], strip_prefix="m.", dtype=torch.bfloat16)
    done = convert(tmp_path / "a", tmp_path / "b.safetensors", "safetensors", options=options)
    found = tensors_of(tmp_path / "b.safetensors")
    assert (done.tensors, done.nbytes, found.keys()) == (2, 3 * 3 * 2 + 3 * 8, {"w", "n"})
    assert same(found["w"], filled(torch.float32, (3, 3)).bfloat16())
    assert same(found["n"], torch.arange(3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ConvertOptions(include=["none.*"]), "none"),
        (ConvertOptions(strip_prefix="zz."), "zz"),
        (ConvertOptions(strip_prefix="a.b"), "nothing is left"),
        (ConvertOptions(strip_prefix="a."), "would both be 'b'"),
        (ConvertOptions(source_format="torch"), "must be in the format torch, got dcp_tensorizer"),
        (ConvertOptions(tensor_parallel=2, split={"*.w": 0}), "no key matches"),
        (ConvertOptions(dtype=torch.float4_e2m1fn_x2), "'a.b' has dtype torch.float32, which torch cannot convert to"),
        (ConvertOptions(include=["a.b"], tensor_parallel=2, split={"a.b": 0}), "'a.b' of shape .3,. cannot be split"),
        (ConvertOptions(include=["a.b"], tensor_parallel=2, split={"a.b": 1}), "cannot be split"),
    ],
)
def test_what_cannot_be_done_is_said_first(tmp_path: Path, options: ConvertOptions, words: str) -> None:
    """An invalid option is an error before anything is written."""
    make_checkpoint(tmp_path / "a", {"a.b": torch.ones(3), "b": torch.ones(3)})
    with pytest.raises(ConversionError, match=words):
        convert(tmp_path / "a", tmp_path / "b", "tensorizer", options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"include": "a.*"}, "include must be a list of patterns, got 'a.*'."),
        ({"exclude": "b"}, "exclude must be a list of patterns"),
        ({"dtype": torch.int32}, "dtype must be a floating-point dtype"),
        ({"tensor_parallel": 0}, "tensor_parallel must be an int of at least 1, got 0."),
        ({"tensor_parallel": 2, "split": {"a.b": True}}, "split must give the number of a dimension for 'a.b'"),
        ({"split": [("a.b", 0)]}, "split must be an instance of Mapping, got list."),
        ({"rename": [("a", "b")]}, "rename must be an instance of Mapping, got list."),
    ],
)
def test_options_are_checked_when_they_are_made(given: dict[str, Any], words: str) -> None:
    """Each error names the option and its value."""
    with pytest.raises(ConversionError, match=f"^{re.escape(words)}"):
        ConvertOptions(**given)


def test_patterns_may_be_iterable_only_once(tmp_path: Path) -> None:
    """The options hold them as a tuple, so several conversions leave out the same keys."""
    make_checkpoint(tmp_path / "a", {"w": torch.ones(3), "b": torch.ones(3)})
    options = ConvertOptions(exclude=(key for key in ["b"]))  # type: ignore[arg-type]
    for target in ("1.pt", "2.pt"):
        assert convert(tmp_path / "a", tmp_path / target, "torch", options=options).tensors == 1


def test_arguments_of_another_type_are_refused(tmp_path: Path) -> None:
    """The target's format is a name, and the options are `ConvertOptions`."""
    make_checkpoint(tmp_path / "a", {"w": torch.ones(3)})
    with pytest.raises(ConversionError, match=r"^the format must be one of .*, got None$"):
        convert(tmp_path / "a", tmp_path / "b", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^options must be an instance of ConvertOptions, got dict\.$"):
        convert(tmp_path / "a", tmp_path / "b", "torch", options={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("to", "options", "words"),
    [
        (
            "safetensors",
            ConvertOptions(tensor_parallel=4),
            "tensor_parallel (--tensor-parallel) is an option of tensorizer",
        ),
        (
            "torch",
            ConvertOptions(split={"*": 0}),
            "split (--split) is an option of tensorizer, and has no effect on torch",
        ),
        ("dcp", ConvertOptions(buffers=("rotary.*",)), "buffers (--buffer) is an option of tensorizer"),
        ("tensorizer", ConvertOptions(shard_bytes=1000), "shard_bytes (--shard-size) is an option of safetensors"),
        ("safetensors", ConvertOptions(shard_bytes=1000), "shard_bytes (--shard-size) has no effect on a single file"),
        ("tensorizer", ConvertOptions(tensor_parallel=4), "and split (--split FILE) must be used together, got"),
        ("tensorizer", ConvertOptions(split={"*": 0}), "and split (--split FILE) must be used together, got"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_would_change_nothing_are_refused(
    tmp_path: Path, to: str, options: ConvertOptions, words: str
) -> None:
    """An option of another format than the target's is an error before anything is written."""
    make_checkpoint(tmp_path / "a", {"w": torch.ones(4)})
    with pytest.raises(ConversionError, match=re.escape(words)):
        convert(tmp_path / "a", tmp_path / "b.safetensors", to, options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("to", ["dcp_tensorizer", "dcp", "torch"])
def test_values_keep_their_order(tmp_path: Path, to: str) -> None:
    """Tensors and objects keep their order, at every depth, also if only some are selected."""
    model = {"w": torch.ones(2), "name": "m", "b": torch.zeros(1), "layers": [1, torch.ones(1)]}
    torch.save({"step": 3, "model": model, "lr": 0.1, "z": torch.zeros(1), "a": 5}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", to)
    convert(tmp_path / "b", tmp_path / "c.pt", "torch")
    assert str(torch.load(tmp_path / "c.pt")) == str(torch.load(tmp_path / "a.pt"))
    options = ConvertOptions(exclude=["model.w", "lr"], add_prefix="all.", dtype=torch.float64)
    convert(tmp_path / "b", tmp_path / "d", to, options=options)
    keys = ["step", "model.name", "model.b", "model.layers.0", "model.layers.1", "z", "a"]
    assert list(open_checkpoint(tmp_path / "d", {}).paths) == [f"all.{key}" for key in keys]


def test_a_tensor_of_a_subclass_is_refused(tmp_path: Path) -> None:
    """A tensor of a subclass, whose elements only the subclass itself can read, is refused with its path and key."""
    save_wrapper(tmp_path / "a", [b"one", b"two"])
    with pytest.raises(ConversionError, match=r"/a: 'w' is a tensor of a subclass .*, and cannot be converted\. Leave"):
        convert(tmp_path / "a", tmp_path / "b", "dcp")
    assert not (tmp_path / "b").exists()


def test_no_code_is_run(tmp_path: Path) -> None:
    """A conversion runs no code from pickles of torch files, of objects or of torch's metadata."""
    torch.save({"x": Custom()}, tmp_path / "a.pt")
    with pytest.raises(UntrustedObject, match="Custom"):
        convert(tmp_path / "a.pt", tmp_path / "out", "dcp_tensorizer")
    make_checkpoint(tmp_path / "b", {"t": torch.ones(1)}, {"x": Custom()})
    with pytest.raises(UntrustedObject, match=r"'x'.*Custom"):
        convert(tmp_path / "b", tmp_path / "out", "torch")
    convert(tmp_path / "b", tmp_path / "c", "dcp")  # takes the bytes as they are
    assert (
        open_checkpoint(tmp_path / "c", {}).objects["x"].read()
        == open_checkpoint(tmp_path / "b", {}).objects["x"].read()
    )
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(os.path.join))
    with pytest.raises(UntrustedObject, match=r"posixpath\.join"):
        convert(tmp_path / "d", tmp_path / "out", "torch")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", FORMATS)
def test_urls(tmp_path: Path, to: str) -> None:
    """Conversions read from and write to URLs, and a failed one leaves nothing there."""
    state = {"x": filled(torch.float32, (50, 30)), "y": filled(torch.int64, (7,))}
    make_checkpoint(tmp_path / "a", state)
    memory = fsspec.filesystem("memory")
    try:
        convert(tmp_path / "a", f"memory://converted/{to}", to)
        convert(f"memory://converted/{to}", "memory://converted/back", "dcp_tensorizer")
        found = tensors_of("memory://converted/back")
        assert all(same(found[key], tensor) for key, tensor in state.items())
        with pytest.raises(ConversionError, match="exists"):
            convert(tmp_path / "a", f"memory://converted/{to}", to)
        (path,) = (tmp_path / "a").glob("*.tensors")
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(ReadError):
            convert(tmp_path / "a", "memory://converted/failed", to)
        assert not memory.find("/converted/failed")
    finally:
        memory.rm("/converted", recursive=True)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """Progress counts the bytes of tensors, never decreases, and ends at the total."""
    make_checkpoint(tmp_path / "a", {"x": filled(torch.float32, (50, 30)), "y": torch.ones(7)}, {"o": 1})
    seen: list[tuple[int, int]] = []
    convert(tmp_path / "a", tmp_path / "b", "dcp_tensorizer", on_progress=lambda *now: seen.append(now))
    assert seen[-1] == (1507 * 4, 1507 * 4)
    assert seen == sorted(seen)
