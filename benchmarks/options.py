"""The cost of single options, each beside the same work without it: `python -m benchmarks.options` (about 20 minutes).

`--only NAME` measures one case of `CASES` anew. The stored results of the others stay, with the commits of their runs.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from dcp_tensorizer import (
    Publish,
    SafetensorsStorageWriter,
    SaveLimits,
    TensorizerStorageWriter,
    apply_delta,
    publish,
)
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.tools import list_versions, verify_versions
from dcp_tensorizer.tools._verify import verify_files
from dcp_tensorizer.tools._view import read_parts
from dcp_tensorizer.writer import SaveReport
from examples.model import batch, python_sources
from tests.lab.faults import TcpProxy
from tests.lab.servers import s3_server

from .case import Case, in_ranks
from .harness import (
    QUICK,
    RESULTS,
    Content,
    Spread,
    cell,
    machine,
    quotient,
    run,
    run_cases,
    spread,
    stored,
    table,
    whole,
)
from .limits import direct_read_seconds, evict, hash_seconds
from .pages import EXPLAINED, LEGEND, Goal, facts, goal_table, medians
from .save_case import anonymous_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

_MIB = 1 << 20
Found = Mapping[str, Any]
"""The values of each figure of each kind of save, on one number of ranks."""


@dataclass(frozen=True)
class Option:
    """A case: its measurement, and its section of the page.

    Attributes:
        how_often: In how many rounds, or with how many saves.
        size: Sizes of the saved state and numbers of saves, for `measure`, which returns them with its results.
        quick: Other sizes for ``--quick``.
        form: Formats the figures of the goals.
        note: A note on the goals.
    """

    title: str
    what: str | Callable[[Content], str]
    how_often: str | Callable[[Content], str]
    size: Mapping[str, Any]
    quick: Mapping[str, Any]
    measure: Callable[[Path, Mapping[str, Any]], Content]
    tables: Callable[[Content], Sequence[str]]
    goals: Callable[[Content], Sequence[Goal]]
    form: Callable[[float], str] = "{:.2f}".format
    note: str = ""


# --- what the cases share ---------------------------------------------------------------------------------------------


def _turns(kinds: Sequence[str], saves: int, warm_up: int) -> Iterator[tuple[int, str]]:
    """Yields the kinds of saves in turns, each turn with another first kind. Turns below number 0 do not count."""
    for number in range(-warm_up, saves):
        first = (number + warm_up) % len(kinds)
        for kind in (*kinds[first:], *kinds[:first]):
            yield number, kind


def _on_ranks(name: str, worlds: Sequence[int]) -> Callable[[Path, Mapping[str, Any]], Content]:
    """Returns a function that measures a case of `_RANKED` on several numbers of ranks, by rank 0's figures."""

    def measure(folder: Path, size: Mapping[str, Any]) -> Content:
        cases = [{"option": name, "ranks": world, **size, "folder": str(folder)} for world in worlds]
        results = whole(run_cases(measure_ranks, cases, 1))
        return {**size, "worlds": {str(r["case"]["ranks"]): r["ranks"][0] for r in results}}

    return measure


def measure_ranks(case: Case, folder: Path) -> list[Any]:
    work, environment = _RANKED[case["option"]]
    given = {name: str(case["ranks"]) for name in environment}
    return in_ranks(work, case["ranks"], case, folder, environment=given)


def _by_ranks(content: Content, kinds: Sequence[str], figures: Mapping[str, tuple[str, Callable[[float], str]]]) -> str:
    header = ("ranks", *(f"{title}: {kind}" for title, _ in figures.values() for kind in kinds))
    rows = [
        [ranks, *(cell(spread(found[name][kind]), form) for name, (_, form) in figures.items() for kind in kinds)]
        for ranks, found in content["worlds"].items()
    ]
    return table(header, rows)


def _ratio(found: Found, figure: str, over: str, under: str) -> Spread | None:
    return quotient(spread(found[figure][over]), spread(found[figure][under]))


def _each(content: Content, of: Callable[[str, Found], Sequence[Goal]]) -> list[Goal]:
    """Returns the goals for each number of ranks, which is part of their names."""
    found = content["worlds"].items()
    return [(f"{name}, {n} rank(s)", wanted, value) for n, some in found for name, wanted, value in of(n, some)]


# --- a writer for every save ------------------------------------------------------------------------------------------

_TENSORS, _ELEMENTS = 10, 100_000
_HANDLES_WARM_UP = 4
_HANDLES = 500
_WRITERS = ("one writer", "a writer for every save", "torch, a writer for every save")


def _with_writers(case: Case, folder: Path) -> dict[str, Any]:
    """Times each save from the call to the commit, and counts the resources that many writers leave."""
    state = {f"rank{dist.get_rank()}.w{n}": torch.randn(_ELEMENTS) for n in range(_TENSORS)}
    kept = TensorizerStorageWriter(f"{folder}/ours")
    makers: dict[str, Callable[[], Any]] = {
        _WRITERS[0]: lambda: kept,
        _WRITERS[1]: lambda: TensorizerStorageWriter(f"{folder}/ours"),
        _WRITERS[2]: lambda: FileSystemWriter(f"{folder}/torch"),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in _WRITERS}
    for number, kind in _turns(_WRITERS, case["saves"], _HANDLES_WARM_UP):
        dist.barrier()
        started = time.perf_counter()
        dcp.async_save(state, storage_writer=makers[kind]()).result()
        if number >= 0:
            seconds[kind].append(time.perf_counter() - started)
    before = _held()
    writers = [TensorizerStorageWriter(f"{folder}/ours") for _ in range(_HANDLES)]
    for writer in writers[:_HANDLES_WARM_UP]:
        dcp.async_save(state, storage_writer=writer).result()
    held = {name: value - before[name] for name, value in _held().items()}
    kept.close()
    return {"seconds": seconds, "held": held}


def _held() -> dict[str, int]:
    process = psutil.Process()
    mapped = sum(m.size for m in process.memory_maps() if "memfd:dcp_tensorizer" in m.path)
    return {
        "processes": len(process.children()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "bytes of staging buffers": mapped,
    }


def _writers_goals(_: str, found: Found) -> list[Goal]:
    one, each = (spread(found["seconds"][kind]) for kind in _WRITERS[:2])
    assert one and each
    return [
        ("ms that a writer for every save costs", "<= 10", 1000 * (each["median"] - one["median"])),
        ("time of a save by a writer of its own / torch's", "", _ratio(found, "seconds", *_WRITERS[1:])),
        *((f"{name} that {_HANDLES} more writers leave", "<= 0", value) for name, value in found["held"].items()),
    ]


# --- only what has changed --------------------------------------------------------------------------------------------

_BASE_TENSORS, _ADAPTER_TENSORS = 64, 32
_REUSE_WARM_UP = 3  # the third save is the first that reuses files
_NEVER = 1_000_000
_THREADS = 2
_REUSES = ("reuse_unchanged", "everything is written")


def _reusing(case: Case, folder: Path) -> dict[str, Any]:
    """Saves in both ways in turn, each to separate directories, and retains the last of each."""
    rank, world = dist.get_rank(), case["ranks"]
    frozen = _tensors(f"rank{rank}.base", _BASE_TENSORS, case["base"] * _MIB // world)
    trained = _tensors(f"rank{rank}.adapter", _ADAPTER_TENSORS, case["adapter"] * _MIB // world)
    limits = SaveLimits(max_reuses=_NEVER)
    writers = {kind: TensorizerStorageWriter(reuse_unchanged=kind == _REUSES[0], limits=limits) for kind in _REUSES}
    found: dict[str, Any] = {figure: {kind: [] for kind in _REUSES} for figure in ("seconds", "bytes", "staging")}
    for number, kind in _turns(_REUSES, case["saves"], _REUSE_WARM_UP):
        for tensor in trained.values():
            tensor.add_(1)
        path = Path(folder, f"{_REUSES.index(kind)}-{number}")
        dist.barrier()
        started = time.perf_counter()
        dcp.async_save(frozen | trained, storage_writer=writers[kind], checkpoint_id=path).result()
        seconds = time.perf_counter() - started
        dist.barrier()
        if rank == 0:
            shutil.rmtree(Path(folder, f"{_REUSES.index(kind)}-{number - 1}"), ignore_errors=True)
        if rank == 0 and number >= 0:
            report = writers[kind].last_report
            assert report is not None
            found["seconds"][kind].append(seconds)
            found["staging"][kind].append(report.stage_seconds)
            found["bytes"][kind].append(sum(_new_bytes(file) for file in path.iterdir()))
        dist.barrier()
    found["digests"] = [_digest_seconds(frozen | trained) for _ in range(5)]
    for writer in writers.values():
        writer.close()
    return found


def _tensors(name: str, count: int, nbytes: int) -> dict[str, torch.Tensor]:
    return {f"{name}.{n}": torch.rand(nbytes // count // 4) for n in range(count)}


def _new_bytes(file: Path) -> int:
    """Returns the bytes of a file that this save has written: linked files are read-only."""
    state = file.stat()
    return 0 if not state.st_mode & 0o200 else state.st_size


def _digest_seconds(state: dict[str, torch.Tensor]) -> float:
    """Returns the seconds for XXH3-128 of all tensors, with as many threads as a save has."""
    started = time.perf_counter()
    with ThreadPoolExecutor(max(1, _THREADS // int(os.environ["LOCAL_WORLD_SIZE"]))) as pool:
        list(pool.map(lambda tensor: xxhash.xxh3_128(tensor.numpy()).digest(), state.values()))
    return time.perf_counter() - started


def _reuse_goals(content: Content) -> list[Goal]:
    def of(ranks: str, found: Found) -> list[Goal]:
        seconds, least = (spread(found[figure][_REUSES[0]]) for figure in ("seconds", "bytes"))
        staging, digests = spread(found["staging"][_REUSES[0]]), spread(found["digests"])
        assert least and staging and digests
        return [
            ("time / time of a save that writes everything", "<= 0.15", _ratio(found, "seconds", *_REUSES)),
            ("or: seconds", f"<= {staging['median'] + digests['median'] + 0.1:.3f}", seconds),
            (
                "MiB a rank written beyond what has changed",
                "<= 0.5",
                (least["median"] / _MIB - content["adapter"]) / int(ranks),
            ),
            ("seconds of XXH3-128 of everything", "", digests["median"]),
        ]

    return _each(content, of)


# --- a local disk first -----------------------------------------------------------------------------------------------

_FLUSHED = 50  # tensors
_TIERS = ("local disk alone", "local disk first, then the remote")


def _tiers(folder: Path, size: Mapping[str, Any]) -> Content:
    (folder / "remote").mkdir()
    with s3_server(folder / "remote") as server, closing(SlowProxy(server.endpoint, size["remote"] * 1e9)) as proxy:
        reached = {"bucket": server.bucket, "options": server.options(f"http://127.0.0.1:{proxy.port}")}
        cases = [{"kind": kind, "scale": size, "folder": str(folder), "server": reached} for kind in _TIERS]
        results = whole(run_cases(measure_tier, cases, 1))
    found = {result["case"]["kind"]: result["ranks"] for result in results}
    return {**size, "worlds": {"1": {name: {kind: found[kind][name] for kind in _TIERS} for name in found[_TIERS[0]]}}}


class SlowProxy(TcpProxy):
    """A proxy that forwards this many bytes per second, over all connections and in both directions."""

    def __init__(self, endpoint: str, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._turn = threading.Lock()
        self._free_at = 0.0
        super().__init__(int(endpoint.rpartition(":")[2]))

    def _pump(self, source: socket.socket, target: socket.socket, number: int) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._turn:
                    self._free_at = max(time.monotonic(), self._free_at) + len(data) / self._rate
                    wait = self._free_at - time.monotonic()
                time.sleep(max(0.0, wait))
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


def measure_tier(case: Case, folder: Path) -> dict[str, Any]:
    scale = case["scale"]
    reports: list[SaveReport] = []
    elements = int(scale["gigabytes"] * 1e9 / 4 / _FLUSHED)
    state = {f"t{n}": torch.rand(elements) for n in range(_FLUSHED)}
    path, options = f"{folder}/local", dict[str, Any]()
    if case["kind"] == _TIERS[1]:
        path, local = f"s3://{case['server']['bucket']}/{uuid.uuid4().hex}", path
        options = {"local": local, "max_unflushed": scale["saves"], "storage_options": case["server"]["options"]}
    with TensorizerStorageWriter(path, on_report=reports.append, **options) as writer:
        writer.prewarm(state)
        stalls = [_save_and_train(writer, f"{path}/step-{n}", state, scale["every"]) for n in range(scale["saves"])]
        last = time.time()
        assert writer.wait_remote()
    durable = [report.seconds for report in reports if report.remote_durable_at is None]
    arrived = [report for report in reports if report.remote_durable_at is not None]
    order = sorted(arrived, key=lambda report: report.remote_durable_at or 0.0)
    numbers = [int(report.path.rpartition("-")[2]) for report in order]
    assert numbers == list(range(len(arrived))), "they arrived in another order"
    lags = [(report.remote_durable_at or 0.0) - report.durable_at for report in arrived]
    return {"stalls": stalls[2:], "durable": durable[2:], "lags": lags, "drained": [time.time() - last]}


def _save_and_train(writer: TensorizerStorageWriter, path: str, state: dict[str, Any], every: float) -> float:
    started = time.perf_counter()
    dcp.async_save(state, storage_writer=writer, checkpoint_id=path)
    stall = time.perf_counter() - started
    matrix = torch.rand(256, 256)
    while time.perf_counter() - started < every:
        matrix = matrix @ matrix / 256
    return stall


# --- models for inference ---------------------------------------------------------------------------------------------

_COLUMNS, _WEIGHTS = 1024, 60
_MODELS = ("a model, in place", "a checkpoint", "torch, with consolidation")
_FOLLOWERS = ("not published", "published", "not published, beside sha256sum")
_OF_FOLLOWERS = {"stall": "training waits", "durable": "until it is durable"}


def _exporting(case: Case, folder: Path) -> dict[str, Any]:
    """Saves in each way in turn, and measures each save from the call until it is durable.

    ``seconds``: how long it takes; ``megabytes``: how much more private memory the trainer has at its peak.
    """
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = case["megabytes"] * 1_000_000 // (_WEIGHTS * _COLUMNS * 2)
    state = {
        f"layers.{n}.weight": distribute_tensor(torch.randn(rows, _COLUMNS).to(torch.bfloat16), mesh, [Shard(0)])
        for n in range(_WEIGHTS)
    }
    model, checkpoint = SafetensorsStorageWriter(overwrite=True), TensorizerStorageWriter()
    mapping = dict.fromkeys(state, 1)

    def torchs(path: str) -> object:
        return dcp.save(
            state,
            storage_writer=HuggingFaceStorageWriter(
                path, fqn_to_index_mapping=mapping, save_distributed=True, enable_consolidation=True
            ),
        )

    ways: dict[str, Callable[[str], object]] = {
        _MODELS[0]: lambda path: dcp.async_save(state, storage_writer=model, checkpoint_id=path).result(),
        _MODELS[1]: lambda path: dcp.async_save(state, storage_writer=checkpoint, checkpoint_id=path).result(),
        _MODELS[2]: torchs,
    }
    found: dict[str, Any] = {figure: {kind: [] for kind in _MODELS} for figure in ("seconds", "megabytes")}
    for number, kind in _turns(_MODELS, case["saves"], 1):  # the first save allocates the buffer
        path = folder / f"{number}-{_MODELS.index(kind)}"
        dist.barrier()
        gc.collect()
        with _PeakMemory() as memory:
            started = time.perf_counter()
            ways[kind](str(path))
            dist.barrier()
            elapsed = time.perf_counter() - started
        if number >= 0:
            found["seconds"][kind].append(elapsed)
            found["megabytes"][kind].append(memory.nbytes / 1e6)
        if dist.get_rank() == 0:
            shutil.rmtree(path)
    model.close()
    checkpoint.close()
    return found | _following(state, case["saves"], folder)


def _following(state: dict[str, Any], saves: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Saves a model repeatedly into one directory: with and without publishing each, and beside another process.

    The other process has the publisher's priority. As the publisher does, it reads and hashes files, but without end.

    ``stall``: how long training waits; ``durable``: how long the save takes. The saves do not overlap.
    """
    figures: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in _FOLLOWERS} for name in _OF_FOLLOWERS}
    for kind in _FOLLOWERS:
        following = Publish(folder / "versions") if kind == _FOLLOWERS[1] else None
        beside = _hashing(folder / _FOLLOWERS[0]) if kind == _FOLLOWERS[2] and dist.get_rank() == 0 else nullcontext()
        writing = SafetensorsStorageWriter(folder / kind, overwrite=True, max_shard_bytes=10**9, publish=following)
        with beside, writing as writer:
            for number in range(1 + saves):
                dist.barrier()
                started = time.perf_counter()
                saved = dcp.async_save(state, storage_writer=writer)
                stalled = time.perf_counter()
                saved.result()
                if number:
                    figures["stall"][kind].append(stalled - started)
                    figures["durable"][kind].append(time.perf_counter() - started)
            writer.wait_published()
        dist.barrier()
    if dist.get_rank() == 0:
        for kind in _FOLLOWERS:
            shutil.rmtree(folder / kind)
    return figures


@contextmanager
def _hashing(folder: Path) -> Iterator[None]:
    """Hashes the files of a folder repeatedly while the block runs, at the lowest priority."""
    command = ["nice", "-n", "19", "sh", "-c", 'while :; do cat "$0"/*.safetensors | sha256sum; done', str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()  # the hash in progress is over within a second or two


class _PeakMemory:
    """The peak of this process's private memory beyond its start. The staging buffer is shared."""

    def __enter__(self) -> Self:
        self._process = psutil.Process()
        self._before = anonymous_bytes(self._process)
        self.nbytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.01):
            self.nbytes = max(self.nbytes, anonymous_bytes(self._process) - self._before)


def _export_goals(content: Content) -> list[Goal]:
    def of(ranks: str, found: Found) -> list[Goal]:
        pairs = zip(*(found["megabytes"][kind] for kind in _MODELS[:2]), strict=True)
        more = spread(100 * (model - checkpoint) / (content["megabytes"] / int(ranks)) for model, checkpoint in pairs)
        wanted: list[Goal] = [
            ("time of a model / of a checkpoint", "<= 1.15", _ratio(found, "seconds", *_MODELS[:2])),
            ("torch's time / that of a model", ">= 3", _ratio(found, "seconds", _MODELS[2], _MODELS[0])),
            ("% of a rank's bytes: trainer's memory beyond a checkpoint's", "<= 1", more),
        ]
        for name, words in _OF_FOLLOWERS.items():
            goal = "<= 1.1" if name == "stall" else ""  # the cores are shared, and so the save itself may take longer
            alone, published, beside = _FOLLOWERS
            wanted.append((f"{words}: published / not", goal, _ratio(found, name, published, alone)))
            wanted.append((f"{words}: published / beside sha256sum", goal, _ratio(found, name, published, beside)))
        return wanted

    return _each(content, of)


def _export_tables(content: Content) -> list[str]:
    return [
        _by_ranks(content, _MODELS, {"seconds": ("seconds", "{:.2f}".format)}),
        _by_ranks(content, _MODELS, {"megabytes": ("MB", "{:.0f}".format)}),
        "Below, a model is saved again and again in one directory, each save when the one before is over. A process "
        "publishes the models meanwhile, as fast as it can, and no save waits for it. For comparison, `sha256sum` "
        "reads and hashes such a model again and again with the same priority: any process beside training costs this.",
        _by_ranks(content, _FOLLOWERS, {name: (f"{w}, s", "{:.3f}".format) for name, w in _OF_FOLLOWERS.items()}),
    ]


# --- versions for inference -------------------------------------------------------------------------------------------

_CONFIG = {"vocabulary": 256, "context": 128, "width": 128, "heads": 4, "blocks": 2}
_RATES = (1e-6, 3e-6, 1e-5, 1e-4, 3e-4)
_TRAINING_RATE = 2e-3  # the maximum: the rate rises to it, and then falls to zero
_BATCH = 4
_WINDOW = 100  # the mean loss of so many steps is compared with that of as many steps before them
_SETTLED = 0.005  # less progress than this, relative to the loss
_STEPS = 1200
_MAIN_RATE, _WANTED = 3e-6, 3.5  # per cent


class Transformer(nn.Module):
    """A decoder-only transformer over bytes with this configuration."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, blocks, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss, in nats per byte."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        x = self.byte(inputs) + self.position(torch.arange(inputs.shape[1]))
        return cross_entropy(self.head(self.layers(x, mask, is_causal=True)).flatten(0, 1), targets.flatten())


def _deltas(folder: Path, size: Mapping[str, Any]) -> Content:
    torch.manual_seed(0)
    text = python_sources()
    model, optimizer, loss = _trained(text)
    return {
        "config": _CONFIG,
        "steps": _STEPS,
        "loss": loss,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **size,
        "rates": [_published(folder / f"{rate:g}", model, optimizer, text, rate, size["versions"]) for rate in _RATES],
    }


def _trained(text: torch.Tensor) -> tuple[Transformer, torch.optim.AdamW, float]:
    model = Transformer(**_CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), _TRAINING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _TRAINING_RATE, _STEPS)
    losses = []
    for step in range(_STEPS):
        losses.append(_step(model, optimizer, text, step))
        schedule.step()
    before, after = (sum(losses[-n * _WINDOW :][:_WINDOW]) / _WINDOW for n in (2, 1))
    if after < (1 - _SETTLED) * before:
        raise SystemExit(f"the loss has not settled: it was {before:.3f}, and is {after:.3f}")
    return model, optimizer, after


def _step(model: Transformer, optimizer: torch.optim.AdamW, text: torch.Tensor, step: int) -> float:
    loss = model(batch(text, step, _BATCH, 0, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _published(
    folder: Path,
    model: Transformer,
    optimizer: torch.optim.AdamW,
    text: torch.Tensor,
    rate: float,
    versions: int,
) -> dict[str, Any]:
    """Continues at a learning rate, publishes each step, and applies each version to a copy."""
    state = copy.deepcopy(optimizer.state_dict())
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        group["lr"] = rate
    previous, same, expected = None, 0, ""
    for number in range(1 + versions):
        if number:
            _step(model, optimizer, text, _STEPS + number)
        exported = _export(folder / f"export-{number}", model)
        publish(exported, folder / "published", previous=previous, max_deltas=versions)
        apply_delta(folder / "copy", folder / "published")
        expected = _sha256(exported / "model.safetensors")
        (file,) = (folder / "copy").glob("*.safetensors")
        same += _sha256(file) == expected
        previous = exported
    apply_delta(folder / "late", folder / "published")
    (file,) = (folder / "late").glob("*.safetensors")
    deltas = [info for info in list_versions(folder / "published") if info.is_delta]
    return {
        "rate": rate,
        "percent": spread(100 * info.nbytes / info.model_nbytes for info in deltas),
        "deltas": len(deltas),
        "same": same - 1,  # the first version is whole
        "late_is_same": _sha256(file) == expected,
        "damages": len(verify_versions(folder / "published").damages),
    }


def _export(path: Path, model: Transformer) -> Path:
    path.mkdir(parents=True)
    weights = {key: value.to(torch.bfloat16).contiguous() for key, value in model.state_dict().items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(_CONFIG))
    return path


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _deltas_tables(content: Content) -> list[str]:
    rows = [
        (
            f"{found['rate']:g}",
            cell(found["percent"], "{:.2f}".format),
            f"{found['same']} of {found['deltas']}",
            "yes" if found["late_is_same"] and not found["damages"] else "no",
        )
        for found in content["rates"]
    ]
    return [table(("learning rate", "% of the weights", "versions with the export's SHA-256", "all at once too"), rows)]


def _deltas_goals(content: Content) -> list[Goal]:
    by_rate = {found["rate"]: found for found in content["rates"]}
    return [
        (f"% of the weights at {_MAIN_RATE:g}", f"<= {_WANTED}", by_rate[_MAIN_RATE]["percent"]),
        *(
            (f"versions at {rate:g} with the export's SHA-256", f">= {content['versions']}", found["same"])
            for rate, found in by_rate.items()
        ),
    ]


# --- verifying --------------------------------------------------------------------------------------------------------

_VERIFIED = 1_790_000  # elements of a tensor
_READERS = 8
_SPEEDS = {
    "O_DIRECT read": "raw reads: O_DIRECT, by 8 threads",
    "verify": "`dcp-tensorizer verify`: all tensors, by the checksums that this package keeps for blocks",
    "hashes": "tensorizer's checksums alone, on all cores, of data in memory",
    "verify --full": "`dcp-tensorizer verify --full`: every byte, and tensorizer's own checksums too",
}


def _verifying(folder: Path, size: Mapping[str, Any]) -> Content:
    state = {f"layer.{n}": torch.rand(_VERIFIED) for n in range(size["tensors"])}
    seconds: dict[str, list[float]] = {name: [] for name in _SPEEDS}
    with TensorizerStorageWriter(folder / "checkpoint") as writer:
        dcp.save(state, storage_writer=writer, no_dist=True)
    (path,) = folder.glob("*/*.tensors")
    nbytes = path.stat().st_size
    storage = open_storage(folder / "checkpoint")
    parts = read_parts(storage)
    for _ in range(size["rounds"]):
        evict(folder)
        seconds["O_DIRECT read"].append(direct_read_seconds(path, nbytes, _READERS))
        evict(folder)
        seconds["verify"].append(verify_files(storage, parts).seconds)
        seconds["hashes"].append(hash_seconds(state, os.cpu_count() or 1))
        evict(folder)
        seconds["verify --full"].append(verify_files(storage, parts, full=True).seconds)
    speeds = {name: spread(nbytes / 1e9 / value for value in values) for name, values in seconds.items()}
    return {**size, "summary": speeds, "seconds": seconds}


def _verify_goals(content: Content) -> list[Goal]:
    found = content["summary"]
    slower = min((found["O_DIRECT read"], found["hashes"]), key=lambda speed: speed["median"])
    return [
        ("verify / raw reads", ">= 0.9", quotient(found["verify"], found["O_DIRECT read"])),
        ("verify --full / the slower of raw reads and checksums", ">= 0.9", quotient(found["verify --full"], slower)),
    ]


# --- the cases, and the page ------------------------------------------------------------------------------------------

_RANKED: dict[str, tuple[Callable[[Case, Path], Any], tuple[str, ...]]] = {
    "handles": (_with_writers, ()),
    "reuse": (_reusing, ("LOCAL_WORLD_SIZE",)),
    "export": (_exporting, ()),
}
"""Cases of several ranks: the function of each rank, and the variables with the number of ranks."""

CASES: dict[str, Option] = {
    "handles": Option(
        "A writer for every save",
        f"how long an asynchronous save of {_TENSORS * _ELEMENTS * 4 / 1e6:.0f} MB a rank takes, from the call to the "
        f"commit: by one writer for all saves, by a new one for every save, as frameworks make them and do not close "
        f"them, and by a new one of torch's.",
        lambda c: f"{c['saves']} saves of each kind, in turns, after {_HANDLES_WARM_UP} that do not count.",
        {"saves": 20},
        {"saves": 2},
        _on_ranks("handles", (1, 4)),
        lambda c: [_by_ranks(c, _WRITERS, {"seconds": ("ms", lambda seconds: f"{1000 * seconds:.0f}")})],
        lambda c: _each(c, _writers_goals),
    ),
    "reuse": Option(
        "Only what has changed",
        lambda c: (
            f"asynchronous saves of {c['base']} MiB that stay as they are and {c['adapter']} MiB that change "
            f"before each save, of all ranks together, from the call to the commit. Each goes to a new directory, and "
            f"the one before is deleted. Files are reused without a limit."
        ),
        lambda c: f"{c['saves']} saves of each kind, in turns, after {_REUSE_WARM_UP} that do not count.",
        {"saves": 10, "base": 1024, "adapter": 16},
        {"saves": 2, "base": 64},
        _on_ranks("reuse", (1, 2)),
        lambda c: [
            _by_ranks(
                c,
                _REUSES,
                {
                    "seconds": ("durable after, s", "{:.3f}".format),
                    "bytes": ("MiB written", lambda nbytes: f"{nbytes / _MIB:.1f}"),
                    "staging": ("staging, s", "{:.3f}".format),
                },
            )
        ],
        _reuse_goals,
        "{:.3f}".format,
        "The second goal is the sum of the staging copy, of XXH3-128 of everything, and of 0.1 s: a save has to copy "
        "and to hash what it does not write. With the default `SaveLimits(max_reuses=10)` every eleventh save writes "
        "everything.",
    ),
    "tiers": Option(
        "A local disk first",
        "what a local disk in front of a slow remote costs a save: how long training waits, and how long it takes "
        "until the save is durable. The same saves go to the local disk alone in the same run. The remote is SeaweedFS "
        "behind a proxy that limits its speed.",
        lambda c: (
            f"{c['saves']} saves of {c['gigabytes']:g} GB, one every {c['every']:g} s, to a remote that takes "
            f"{c['remote']:g} GB/s. The first two of each kind do not count."
        ),
        {"gigabytes": 0.08, "every": 2.0, "remote": 0.05, "saves": 15},
        {"gigabytes": 0.01, "every": 0.5, "saves": 4},
        _tiers,
        lambda c: [
            _by_ranks(
                c,
                _TIERS,
                {
                    "stalls": ("stall, s", "{:.3f}".format),
                    "durable": ("until durable, s", "{:.3f}".format),
                    "lags": ("then until on the remote, s", "{:.3f}".format),
                },
            )
        ],
        lambda c: [
            (f"{words}: with the remote / the local disk alone", "", _ratio(c["worlds"]["1"], name, *_TIERS[::-1]))
            for name, words in (("stalls", "stall"), ("durable", "time until durable"))
        ],
        "{:.3f}".format,
    ),
    "export": Option(
        "Models for inference",
        lambda c: (
            f"how long it takes until {c['megabytes']} MB of bfloat16, sharded over the ranks, are durable: as a "
            f"model of Hugging Face that all ranks write in place, as a checkpoint of this package, and by torch's "
            f"`HuggingFaceStorageWriter` with consolidation, whose files are not fsynced. And how much memory "
            f"the trainer of rank 0 takes meanwhile, beyond the staging buffer."
        ),
        lambda c: f"{c['saves']} saves of each kind, in turns, after one that does not count.",
        {"saves": 5, "megabytes": 2000},
        {"saves": 1, "megabytes": 60},
        _on_ranks("export", (1, 2)),
        _export_tables,
        _export_goals,
    ),
    "deltas": Option(
        "Versions for inference",
        "the bytes of what `publish` writes for each step of a small transformer, in per cent of its weights in "
        "bfloat16, and whether a copy that follows has the SHA-256 of each export. A copy that begins at the end "
        "applies all deltas at once.",
        lambda c: (
            f"{c['versions']} steps of AdamW at each learning rate. Before that, {c['parameters']:,} parameters "
            f"were trained from their configuration for {c['steps']:,} steps, at most at {_TRAINING_RATE:g}, until the "
            f"loss fell by less than half a per cent in {_WINDOW} steps: to {c['loss']:.2f} nats per byte."
        ),
        {"versions": 100},
        {"versions": 2},
        _deltas,
        _deltas_tables,
        _deltas_goals,
    ),
    "verify": Option(
        "Verifying",
        lambda c: (
            f"how fast a checkpoint of {c['tensors'] * _VERIFIED * 4 / 1e9:.1f} GB ({c['tensors']} tensors of "
            f"7 MB) is verified. Its files are not in the page cache, so the disk is read. No peer is measured here. "
            f"The raw reads and the checksums alone are the machine's own limits."
        ),
        lambda c: f"{c['rounds']} rounds, each with one of every kind.",
        {"rounds": 5, "tensors": 300},
        {"rounds": 1, "tensors": 10},
        _verifying,
        lambda c: [table(("", "GB/s"), [(t, cell(c["summary"][n], "{:.2f}".format)) for n, t in _SPEEDS.items()])],
        _verify_goals,
    ),
}


def measure(options: argparse.Namespace, folder: Path) -> Content:
    name = "options-quick" if options.quick else "options-draft" if options.draft else "options"
    known = stored(name)["cases"] if options.only and (RESULTS / f"{name}.json").exists() else {}
    for case in options.only or CASES:
        option = CASES[case]
        where = folder / case
        where.mkdir()
        size = {**option.size, **(option.quick if options.quick else {})}
        known[case] = {"machine": machine(folder), **option.measure(where, size)}
        shutil.rmtree(where)
    cases = {case: known[case] for case in CASES if case in known}
    ratios = [ratio for case, found in cases.items() for ratio in medians(CASES[case].goals(found))]
    return {"ratios": ratios, "cases": cases}


def render(content: Content) -> str:
    sections = []
    for case, found in content["cases"].items():
        option = CASES[case]
        what, how_often = (t if isinstance(t, str) else t(found) for t in (option.what, option.how_often))
        head = facts(found["machine"], what, how_often, f"python -m benchmarks.options --only {case}")
        wanted = goal_table(option.goals(found), option.form)
        sections += [f"## {option.title}", head, *option.tables(found), wanted, option.note]
    return "\n\n".join(
        filter(
            None,
            [
                "# What options cost",
                "Each section is one case, with the machine and the commit of its run. "
                "`python -m benchmarks.options` measures all cases. "
                "`python -m benchmarks.options --redraw` makes this page again from `options.json`.",
                LEGEND,
                EXPLAINED,
                *sections,
            ],
        )
    )


OPTIONS = {
    "quick": QUICK,
    "only": {"nargs": "+", "choices": CASES, "help": "measure these cases; the stored results of the others stay"},
}

if __name__ == "__main__":
    run("options", measure, render, about=__doc__, options=OPTIONS)
