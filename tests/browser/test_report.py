"""The report in a real browser: its scripts run under its policy, and show what was measured.

`make browser` runs this where Chromium is installed. It is no part of the other suites, which need no browser.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

from dcp_tensorizer import tools

from ..lab.checkpoints import make_checkpoint

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: install the package chromium")

ODD = "model.</script><b>odd"


def drawn(page: Path, part: str = "", width: int = 1440) -> str:
    """The page's document after its scripts have run; ``part``: what of the checkpoint it looks at."""
    command = [
        str(BROWSER),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={page.parent / 'profile'}",
        "--virtual-time-budget=5000",
        f"--window-size={width},900",
        "--enable-logging=stderr",
        "--dump-dom",
        f"file://{page}#{quote(part)}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []  # errors, and what the policy refused
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", done.stdout, flags=re.DOTALL)


def cells(document: str) -> list[list[str]]:
    """The rows of the table of tensors."""
    body = document.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    return [
        [html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<td.*?>(.*?)</td>", row, re.DOTALL)]
        for row in rows
    ]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    for step in (9, 10, 11):
        tensors = {f"model.layers.{n}.weight": torch.full((100, 10), float(step + n)) for n in range(300)}
        tensors[ODD] = torch.tensor([1.0, float("nan")])
        make_checkpoint(tmp_path / f"step-{step}", tensors)
    tools.report([tmp_path / f"step-{step}" for step in (9, 10, 11)], tmp_path / "report.html")
    return tmp_path / "report.html"


def test_what_it_shows(page: Path) -> None:
    """Title, facts, notice, tiles, lines and the first rows, with the values of the last step."""
    document = drawn(page)
    assert re.search("<title>step 9 to step 11 . checkpoint report</title>", document)
    assert "1 tensor has elements that are NaN or infinite: model.&lt;/script&gt;&lt;b&gt;odd" in document
    assert document.count('class="tile"') > 100
    assert document.count('class="line"') == 2 * 2  # in two charts, of the parts of the only one, which is "model"
    rows = cells(document)
    assert len(rows) == 200
    assert rows[0][:5] == ["model.layers.0.weight", "100 \N{MULTIPLICATION SIGN} 10", "float32", "4 kB", "348"]
    assert 'aria-live="polite">301 tensors, 1.2 MB<' in document


def test_a_part_of_the_checkpoint(page: Path) -> None:
    """Chosen by the address: the table has its tensors, and the charts a line for each of the largest parts."""
    document = drawn(page, "model.layers")
    assert document.count('class="line"') == 2 * 24
    assert "the 24 largest of 300 parts" in document
    assert ODD not in {row[0] for row in cells(document)}
    (row,) = cells(drawn(page, ODD))
    assert row[0] == ODD
    assert row[-3] == "1"


def test_no_column_is_cut_off_on_a_laptop(tmp_path: Path) -> None:
    """At 1,200 pixels, with long keys and shapes, and numbers that need an exponent, the table has its width."""
    for step in (1, 2):
        tensors = {
            f"model.layers.{n}.self_attention.query_key_value.weight": torch.linspace(-step, step, 10**6)
            * 10.0 ** (n - 8)
            for n in range(4)
        }
        tensors["model.embed_tokens_and_positions_of_the_decoder.weight"] = torch.ones(64, 3, 14, 14) * 1e-6
        make_checkpoint(tmp_path / f"step-{step}", tensors)
    tools.report([tmp_path / "step-1", tmp_path / "step-2"], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    measured = "const s = document.querySelector('.scroll'); document.title = `${s.scrollWidth} ${s.clientWidth}`"
    text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)  # it refuses scripts of others
    (tmp_path / "measured.html").write_text(text.replace("</body>", f"<script>{measured}</script></body>"))
    needed, has = re.findall(r"\d+", drawn(tmp_path / "measured.html", width=1200).partition("<title>")[2])[:2]
    assert int(needed) <= int(has)


def test_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    """Says so, and shows no chart."""
    make_checkpoint(tmp_path / "step-1", {}, {"lr": 0.5})
    tools.report([tmp_path / "step-1"], tmp_path / "report.html")
    document = drawn(tmp_path / "report.html")
    assert document.count("There are no tensors here.") == 2
    assert cells(document) == []
    assert 'id="steps" aria-labelledby="steps-title" hidden' in document


def test_the_axes_have_round_values(tmp_path: Path) -> None:
    """Two checkpoints whose parts have moved by 12.5 % to 70.3 %: the axis says 20 % and 50 %."""
    for step, moved in ((1, 0.0), (2, 1.0)):
        shares = {"a": 0.125, "b": 0.3, "c": 0.703}
        tensors = {f"model.{name}": torch.full((16,), 1 + moved * share) for name, share in shares.items()}
        make_checkpoint(tmp_path / f"step-{step}", tensors)
    tools.report([tmp_path / "step-1", tmp_path / "step-2"], tmp_path / "report.html")
    chart = drawn(tmp_path / "report.html", "model").partition('id="distances"')[2].partition("</svg>")[0]
    texts = [re.sub(r"<[^>]+>", "", text) for text in re.findall(r"<text[^>]*>.*?</text>", chart)]
    assert [text for text in texts if text.endswith("%")] == ["20%", "50%"]
