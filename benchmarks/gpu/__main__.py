"""``python -m benchmarks.gpu --collect FOLDER``: makes the page from the results of a parcel (see `parcel`)."""

from pathlib import Path

from ..harness import run
from .report import collect, render

if __name__ == "__main__":
    options = {"collect": {"type": Path, "metavar": "FOLDER", "help": "with the files that the calls have left"}}
    run("gpu", lambda given, folder: collect(given.collect), render, about=__doc__, options=options)
