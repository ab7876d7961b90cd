"""OpenTelemetry spans of saves and loads: `OpenTelemetrySpans`, a callback for ``on_report``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._loading.report import LoadReport
from .._runtime.spans import PARENTS
from .._saving.report import SaveReport
from ._needed import needed

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["OpenTelemetrySpans"]


class OpenTelemetrySpans:
    """Callback that passes the spans of each report to OpenTelemetry, as one trace for each save and load of a rank.

    The wait before a save and the flush of the save are separate traces, because no other span contains them.

    The callback needs ``opentelemetry-api`` (the extra ``otel``). The program's tracer provider decides where spans go.
    Names are ``checkpoint.save``, ``checkpoint.stage`` and so on. Attributes are ``checkpoint.path``,
    ``checkpoint.save_id``, ``checkpoint.rank``, ``checkpoint.file`` and ``checkpoint.bytes``.

    Args:
        provider: The tracer provider; None for the program's global one.

    Raises:
        ImportError: OpenTelemetry is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        with needed("OpenTelemetrySpans", "dcp_tensorizer[otel]"):
            from opentelemetry import trace

        self._trace = trace
        self._tracer = trace.get_tracer("dcp_tensorizer", tracer_provider=provider)

    def __call__(self, report: SaveReport | LoadReport) -> None:
        common: dict[str, Any] = {
            "checkpoint.path": report.path,
            "checkpoint.save_id": report.save_id,
            "checkpoint.rank": report.rank,
        }
        made: dict[tuple[str, str], Any] = {}
        is_flush = isinstance(report, SaveReport) and report.remote_durable_at is not None
        for span in report.spans[-1:] if is_flush else report.spans:  # an earlier report had the save's other spans
            around = PARENTS.get(span.name, "")
            parent = made.get((around, span.file if around == "file" else ""))
            attributes = common | {"checkpoint.bytes": span.nbytes}
            if span.file:
                attributes["checkpoint.file"] = span.file
            one = self._tracer.start_span(
                f"checkpoint.{span.name.replace(' ', '_')}",
                context=None if parent is None else self._trace.set_span_in_context(parent),
                start_time=int((span.began + report.clock_offset) * 1e9),
                attributes=attributes,
            )
            made[span.name, span.file] = one
            one.end(int((span.ended + report.clock_offset) * 1e9))
