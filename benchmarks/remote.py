"""The remote benchmark: `python -m benchmarks.remote` (about 6 minutes; `--main --rounds 1` for a quick look).

A real S3 server on loopback, fresh in each round, is reached directly and with 20 ms of latency added to each request.
On a small machine the server's own work is the limit, so the figures are ratios to transfers of the same bytes in the
same round.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lab.faults import Fault, s3_proxy
from tests.lab.servers import KEY, SECRET, s3_server

from . import remote_case
from .charts import Bar, Panel, draw
from .harness import QUICK, Content, Spread, cell, figure, quotient, rates, run, run_cases, spread, table
from .pages import Comparison, Goal, ahead, glossary, goals, machine_line, medians, page, round_count
from .remote_case import CONTENDERS

Summary = dict[str, dict[str, Any]]

OURS = "dcp_tensorizer"
_FSSPEC = "torch Fsspec"
_LATENCY = 0.020
_LINKS = ("loopback", "with 20 ms")
_WORKLOAD = "300 x 7 MB"
# Both upload in the same way. Their rates differ by a tenth, and the better of two draws would not be a yardstick.
_SAVES_ALIKE = ("raw: boto3 transfer", "raw: boto3, 16 ranges")
_RESHARDS = {"rows, 4 -> 2": (4, 2), "rows, 2 -> 4": (2, 4)}


@contextmanager
def servers(folder: Path) -> Iterator[dict[str, dict[str, str]]]:
    with s3_server(folder) as server, s3_proxy(server.endpoint) as proxy:
        proxy.rule = lambda request: Fault(delay=_LATENCY)
        account = {"bucket": server.bucket, "key": KEY, "secret": SECRET}
        yield {
            "loopback": account | {"endpoint": server.endpoint},
            "with 20 ms": account | {"endpoint": proxy.endpoint},
        }


def plan(links: dict[str, dict[str, str]], quick: bool, main: bool) -> list[dict[str, Any]]:
    base = {"workload": _WORKLOAD, "scale": 0.125 if not quick else 0.04, "times": 3}
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


def render(content: dict[str, Any]) -> str:
    summary, rounds = content["summary"], round_count(content["results"])
    title = "Saving to and loading from an object store"
    return page(
        content,
        title,
        _what(summary),
        _how_often(content["results"]),
        f"remote --rounds {rounds}",
        "![Saving to and loading from an object store](remote.png)",
        ahead(comparisons(summary), _AHEAD_NOTE),
        glossary("Who was measured", _WHO),
        *_links(summary),
        goals(ratios(summary), _GOALS_NOTE),
    )


_TITLES = {"loopback": "direct", "with 20 ms": "with 20 ms of latency"}
_WHO = {
    "dcp_tensorizer": "this package: an asynchronous save until it is durable, and a load that checks all checksums.",
    "torch Fsspec": "torch's own writer and reader, with s3fs.",
    "s3torchconnector": "Amazon's writer and reader.",
    "raw: boto3 transfer": "`upload_fileobj` and `download_fileobj` of the same bytes. No checkpoint, no checksums.",
    "raw: s3fs pipe, cat": "the same with s3fs, from memory and back.",
    "raw: s3fs put, get": "the same with s3fs, from a file in memory and back.",
    "raw: boto3, 16 ranges": "boto3's upload, and a download in ranges by 16 threads.",
}
_AHEAD_NOTE = (
    "Raw transfers are in this table, too. They are what the machine can do, not checkpoints. "
    "The memory that peers need was not measured."
)
_GOALS_NOTE = (
    "The fastest raw transfer is the one with the best median. boto3's transfer and boto3's 16 ranges upload in the "
    "same way. So their saves count as one."
)
_HEADER = ("contender", "save (GB/s)", "load (GB/s)", "extra memory of the writer process (MB)")
_THREE = "{:.3f}".format


def _what(summary: Summary) -> str:
    size = next(entry["bytes"] for entry in summary.values() if "bytes" in entry)
    return (
        f"saves to and loads from an S3 server, of {size / 1e9:.2f} GB in tensors of 7 MB. The server runs on the same "
        "machine and uses the same cores. It is reached directly, and through a proxy that adds 20 ms to each request."
    )


def _how_often(results: list[dict[str, Any]]) -> str:
    rounds = round_count(results)
    times = results[0]["case"]["times"]
    return (
        f"{rounds} rounds, each with a fresh server. In a round each contender saves {times} times and loads {times} "
        "times, after once that is not measured."
    )


def _links(summary: Summary) -> list[str]:
    parts = []
    for link, title in _TITLES.items():
        entries = ((name, summary.get(f"{name} | {link}")) for name in CONTENDERS)
        rows = [_row(name, entry) for name, entry in entries if entry is not None]
        parts += [f"## The server reached {title}", table(_HEADER, rows)]
    return parts


def _row(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    shown = name if entry["intact"] else f"{name} (WRONG VALUES)"
    save, load = (cell(rates(entry[kind], entry["bytes"]), _THREE) for kind in ("save", "load"))
    return (shown, save, load, "-" if entry["extra"] is None else f"{entry['extra'] / 1e6:,.0f}")


def comparisons(summary: Summary) -> list[Comparison]:
    found = []
    for link, title in _TITLES.items():
        ours = summary.get(f"{OURS} | {link}")
        for name in CONTENDERS:
            theirs = summary.get(f"{name} | {link}")
            if name == OURS or ours is None or theirs is None:
                continue
            for kind in ("save", "load"):
                values = [rates(entry[kind], entry["bytes"]) for entry in (theirs, ours)]
                found.append(Comparison(title, f"{kind} (GB/s)", name, values[0], OURS, values[1], _THREE))
    return found


def ratios(summary: Summary) -> list[Goal]:
    def over(contender: str, what: str, link: str) -> Spread | None:
        return quotient(figure(summary, f"{contender} | {link}", what), figure(summary, f"{OURS} | {link}", what))

    def fastest(what: str, link: str) -> str:
        raw = [name for name in CONTENDERS if name.startswith("raw") and figure(summary, f"{name} | {link}", what)]
        return min(raw, key=lambda name: summary[f"{name} | {link}"][what]["median"], default="")

    rows: list[Goal] = []
    for link, least in ((_LINKS[0], ">= 1.2"), (_LINKS[1], ">= 2")):
        for what, raw, torchs, kind in (("save", ">= 0.95", least, "Writer"), ("load", ">= 0.9", ">= 3", "Reader")):
            speed = f"{_TITLES[link]}: speed of a {what}"
            rows += [
                (f"{speed} / the fastest raw transfer's", raw, over(fastest(what, link), what, link)),
                (f"{speed} / torch Fsspec{kind}'s", torchs, over(_FSSPEC, what, link)),
                (f"{speed} / s3torchconnector's", "", over("s3torchconnector", what, link)),
            ]
    for name, (saved, loaded) in _RESHARDS.items():
        entry = summary.get(f"{OURS} | {name}")
        if entry:
            title = f"rows on {saved} ranks, then rows on {loaded}: bytes read / needed"
            rows.append((title, "<= 1.1", entry["moved / needed"]))
    extra = [entry["extra"] / 2**20 for entry in summary.values() if entry.get("extra")]
    return [*rows, ("extra memory of the writer process, MiB", "<= 256", max(extra, default=None))]


def plot(content: dict[str, Any]) -> None:
    summary = content["summary"]
    kinds = {name: "ours" if name == OURS else "raw" if name.startswith("raw") else "peer" for name in CONTENDERS}

    def panel(kind: str, link: str) -> Panel:
        entries = {name: summary.get(f"{name} | {link}") for name in CONTENDERS}
        bars = [Bar(name, e and rates(e[kind], e["bytes"]), kinds[name]) for name, e in entries.items()]
        return Panel(f"{kind.capitalize()}, {_TITLES[link]}", {"": bars}, OURS, _THREE)

    rounds, times = round_count(content["results"]), content["results"][0]["case"]["times"]
    size = next(entry["bytes"] for entry in summary.values() if "bytes" in entry)
    notes = [
        "Longer is better. Peers are compared with dcp_tensorizer. The server runs on the same machine and shares its "
        "cores. The plain transfers show what the machine can do: no checkpoint, no checksums. The two of boto3 upload "
        f"in the same way and share their values. {rounds} rounds of {times} saves and {times} loads each. These are "
        "few values: a gap between two ranges is a strong hint, not a proof. All figures: remote.md.",
        f"Machine: {machine_line(content['machine'])}",
    ]
    panels = [panel(kind, link) for kind in ("save", "load") for link in _LINKS]
    title = f"Saving to and loading from an S3 server, {size / 1e9:.2f} GB (GB/s)"
    draw("remote", title, notes, panels, columns=2, size=(8, 6.6))


def measure(options: argparse.Namespace, folder: Path) -> Content:
    results: list[dict[str, Any]] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=folder) as data, servers(Path(data)) as links:
            cases = plan(links, options.quick, options.main)
            first = number * len(cases) // options.rounds
            found = run_cases(remote_case.measure, cases[first:] + cases[:first], 1)
            results += [result | {"round": number} for result in found]
    summary = summarise(results)
    return {"ratios": medians(ratios(summary)), "summary": summary, "results": results}


OPTIONS = {
    "quick": QUICK,
    "main": {"action": "store_true", "help": "no resharded loads"},
    "rounds": {"type": int, "default": 1},
}

if __name__ == "__main__":
    run("remote", measure, render, about=__doc__, options=OPTIONS, plot=plot)
