"""OpenTelemetry's SDK receives the spans of each save and load."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._runtime.spans import PARENTS
from dcp_tensorizer.integrations.opentelemetry import OpenTelemetrySpans


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_spans_are_exported(tmp_path):
    """A save and a load are one trace each, in which spans nest."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    export = OpenTelemetrySpans(provider)
    state = {"weight": torch.ones(1000)}
    with TensorizerStorageWriter(tmp_path, on_report=export) as writer:
        dcp.async_save(state, storage_writer=writer).result()
        report = writer.last_report
    reader = TensorizerStorageReader(tmp_path, on_report=export)
    dcp.load(state, storage_reader=reader)
    spans = exporter.get_finished_spans()
    assert len(spans) == len(report.spans) + len(reader.last_report.spans)
    by_id = {span.context.span_id: span for span in spans}
    for span in spans:
        parent = "" if span.parent is None else by_id[span.parent.span_id].name
        expected = PARENTS[span.name.removeprefix("checkpoint.").replace("_", " ")]
        assert parent == (f"checkpoint.{expected}" if expected else "")
        assert span.attributes["checkpoint.path"] == str(tmp_path)
        assert span.attributes["checkpoint.rank"] == 0
    (saved,) = [span for span in spans if span.name == "checkpoint.save"]
    assert saved.start_time / 1e9 == pytest.approx(report.started_at, abs=0.1)
    assert (saved.end_time - saved.start_time) / 1e9 == pytest.approx(report.spans[0].seconds, abs=1e-5)
    assert saved.attributes["checkpoint.bytes"] == 4000
    (file,) = [span for span in spans if span.name == "checkpoint.file"]
    assert (tmp_path / file.attributes["checkpoint.file"]).exists()
    of_load = {span.context.trace_id for span in spans if span.name in ("checkpoint.load", "checkpoint.read_file")}
    assert len(of_load) == 1
    assert saved.context.trace_id not in of_load


def test_a_flush_is_exported_once(tmp_path):
    """The second report of a save adds only its last span."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    export = OpenTelemetrySpans(provider)
    with TensorizerStorageWriter(tmp_path / "remote", local=tmp_path / "local", on_report=export) as writer:
        dcp.save({"weight": torch.ones(10)}, storage_writer=writer)
        assert writer.wait_remote(60)
    names = [span.name for span in exporter.get_finished_spans()]
    assert (names.count("checkpoint.save"), names.count("checkpoint.flush")) == (1, 1)
