"""The remote benchmark: `python -m benchmarks.remote` (about 25 minutes; `--main --rounds 1` for a look).

A real S3 server on loopback, fresh in each round, directly and with 20 ms of latency added to each request. Its own
work is the limit on a small machine, so the figures are ratios to transfers of the same bytes in the same round.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tests.proxy import Fault, s3_proxy
from tests.servers import KEY, SECRET, s3_server

from .harness import RESULTS, cell, machine, run_cases, spread, store, table
from .remote_case import CONTENDERS

OURS = "dcp_tensorizer"
_FSSPEC = "torch Fsspec"
_LATENCY = 0.020
_LINKS = ("loopback", "with 20 ms")
_WORKLOAD = "300 x 7 MB"
# The same transfer: its rates differ by a tenth between the two, and the better of two draws would be no yardstick.
_SAVES_ALIKE = ("raw: boto3 transfer", "raw: boto3, 16 ranges")
_RESHARDS = {"rows, 4 -> 2": (4, 2), "rows, 2 -> 4": (2, 4)}


@contextmanager
def servers(folder: Path) -> Iterator[dict[str, dict[str, str]]]:
    """How cases reach one server, by link."""
    with s3_server(folder) as server, s3_proxy(server.endpoint) as proxy:
        proxy.rule = lambda request: Fault(delay=_LATENCY)
        account = {"bucket": server.bucket, "key": KEY, "secret": SECRET}
        yield {
            "loopback": account | {"endpoint": server.endpoint},
            "with 20 ms": account | {"endpoint": proxy.endpoint},
        }


def plan(links: dict[str, dict[str, str]], quick: bool, main: bool) -> list[dict[str, Any]]:
    base = {"workload": _WORKLOAD, "scale": 0.125 if not quick else 0.04, "times": 2}
    cases = [
        {"contender": contender, "link": link, "server": links[link], **base}
        for link in _LINKS
        for contender in CONTENDERS
    ]
    reshards = [
        {"contender": OURS, "reshard": name, "saved": saved, "loaded": loaded, "server": links["loopback"], **base}
        for name, (saved, loaded) in _RESHARDS.items()
    ]
    return cases if main else cases + reshards


def summarise(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        case = result["case"]
        if "error" not in result:
            groups.setdefault((case["contender"], case.get("link", case.get("reshard"))), []).append(result)
    summary = {}
    for (contender, where), runs in groups.items():
        alike = _SAVES_ALIKE if contender in _SAVES_ALIKE else (contender,)
        saves = [run for other in alike for run in groups.get((other, where), [])]
        summary[f"{contender} | {where}"] = _summary(runs, saves)
    return summary


def _summary(runs: list[dict[str, Any]], saves: list[dict[str, Any]]) -> dict[str, Any]:
    ranks = [rank for run in runs for rank in run["ranks"]]
    if "reshard" in runs[0]["case"]:
        return {"moved / needed": sum(r["moved"] for r in ranks) / sum(r["needed"] for r in ranks)}
    return {
        "bytes": ranks[0]["bytes"],
        "save": spread(seconds for run in saves for rank in run["ranks"] for seconds in rank["save"]),
        "load": spread(seconds for rank in ranks for seconds in rank["load"]),
        "intact": all(rank.get("intact", True) for rank in ranks),
        "extra": max((rank["extra_bytes"] for rank in ranks if "extra_bytes" in rank), default=None),
    }


def render(summary: dict[str, dict[str, Any]]) -> str:
    parts = ["# Remote: S3 on loopback"]
    for link in _LINKS:
        rows = []
        for contender in CONTENDERS:
            entry = summary.get(f"{contender} | {link}")
            if entry is None:
                continue

            def rate(seconds: float, size: int = entry["bytes"]) -> str:
                return f"{size / 1e9 / seconds:.3f}"

            name = contender if entry["intact"] else f"{contender} (WRONG VALUES)"
            extra = "-" if entry["extra"] is None else f"{entry['extra'] / 1e6:,.0f}"
            rows.append((name, cell(entry["save"], rate), cell(entry["load"], rate), extra))
        header = ("contender", "save GB/s", "load GB/s", "extra memory of the writer process, MB")
        parts.append(f"## {link}\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def ratios(summary: dict[str, dict[str, Any]]) -> list[tuple[str, str, str]]:
    """The figures that this package promises, from medians of one run."""

    def median(contender: str, figure: str, link: str) -> float:
        entry = summary.get(f"{contender} | {link}")
        return float(entry[figure]["median"]) if entry else float("nan")

    def fastest(figure: str, link: str) -> float:
        return min((median(c, figure, link) for c in CONTENDERS if c.startswith("raw")), default=float("nan"))

    rows = []
    for link, least in ((_LINKS[0], ">= 1.2"), (_LINKS[1], ">= 2")):
        save, load = median(OURS, "save", link), median(OURS, "load", link)
        rows += [
            (f"save / fastest raw transfer, {link}", ">= 0.95", fastest("save", link) / save),
            (f"save / torch FsspecWriter, {link}", least, median(_FSSPEC, "save", link) / save),
            (f"save / s3torchconnector, {link}", "-", median("s3torchconnector", "save", link) / save),
            (f"load / fastest raw transfer, {link}", ">= 0.9", fastest("load", link) / load),
            (f"load / torch FsspecReader, {link}", ">= 3", median(_FSSPEC, "load", link) / load),
            (f"load / s3torchconnector, {link}", "-", median("s3torchconnector", "load", link) / load),
        ]
    for name in _RESHARDS:
        entry = summary.get(f"{OURS} | {name}")
        if entry:
            rows.append((f"{name}: moved / needed", "<= 1.1", entry["moved / needed"]))
    extra = max((s["extra"] for s in summary.values() if s.get("extra")), default=float("nan"))
    rows.append(("extra memory of the writer process, MiB", "<= 256", extra / 2**20))
    return [(name, wanted, f"{value:.3f}") for name, wanted, value in rows]


def plot(summary: dict[str, dict[str, Any]]) -> None:
    """Saves and loads, directly and with latency, side by side."""
    panels = [(kind, link) for kind in ("save", "load") for link in _LINKS]
    names = [n for n in CONTENDERS if all(f"{n} | {link}" in summary for link in _LINKS)]
    figure, axes = plt.subplots(1, len(panels), figsize=(16, 0.45 * len(names) + 1.4), sharey=True)
    for axis, (kind, link) in zip(axes, panels, strict=True):
        entries = [summary[f"{n} | {link}"] for n in names]
        values = [entry["bytes"] / 1e9 / entry[kind]["median"] for entry in entries]
        colors = ["#c2410c" if n == OURS else "#cbd5e1" if n.startswith("raw") else "#94a3b8" for n in names]
        axis.bar_label(axis.barh(names, values, color=colors), fmt="%.2f", padding=3)
        axis.set_title(f"{kind}, {link} (GB/s)", fontsize=10)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(RESULTS / "remote.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--main", action="store_true", help="no resharded loads")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where the server keeps its data", default=None)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as folder, servers(Path(folder)) as links:
            cases = plan(links, options.quick, options.main)
            first = number * len(cases) // options.rounds
            found = run_cases("benchmarks.remote_case", cases[first:] + cases[:first], 1)
            results += [result | {"round": number} for result in found]
    summary = summarise(results)
    text = f"{render(summary)}\n\n## Ratios of medians\n\n{table(('figure', 'wanted', 'measured'), ratios(summary))}"
    name = "remote-quick" if options.quick else "remote"
    store(name, {"machine": machine(), "ratios": ratios(summary), "summary": summary, "results": results}, text)
    if not options.quick:
        plot(summary)


if __name__ == "__main__":
    main()
