"""``python -m benchmarks.gpu --collect FOLDER``: the page of what the calls of a parcel have left (see `parcel`)."""

from .report import main

main()
