"""Output to lines."""

from __future__ import annotations

from horovod_spark_runner.cluster.protocol.channel import (
    MAX_LINE_BYTES,
    AbortNoticeFilter,
    LineSplitter,
)


def test_characters_cut_between_reads_stay_whole() -> None:
    data = "grüße 🙂 日本\nzweite".encode()
    for cut in range(len(data)):
        splitter = LineSplitter(5)
        lines = splitter.feed(data[:cut]) + splitter.feed(data[cut:]) + splitter.finish()
        assert lines == ["grüße 🙂 日本", "zweite"]


def test_carriage_returns_end_lines() -> None:
    assert LineSplitter(5).feed(b"10%\r20%\r\nend\n") == ["10%", "20%", "end"]


def test_a_line_that_ends_by_two_characters_stays_one_where_they_are_read_apart() -> None:
    splitter = LineSplitter(5)
    assert splitter.feed(b"a\r") == ["a"]
    assert splitter.feed(b"\nb\r") == ["b"]
    assert splitter.feed(b"\n") == []
    assert splitter.feed(b"\nc\n") == ["", "c"]


def test_bytes_that_are_no_text_do_not_harm() -> None:
    assert LineSplitter(5).feed(b"\xff\xfe\n") == ["\ufffd\ufffd"]


def test_very_long_lines_are_cut_between_characters_and_lose_nothing() -> None:
    text = "é" * MAX_LINE_BYTES
    splitter = LineSplitter(5)
    lines = splitter.feed(text.encode()) + splitter.finish()
    assert len(lines) > 1
    assert "".join(lines) == text


def test_the_tail_keeps_the_last_lines() -> None:
    splitter = LineSplitter(2)
    splitter.feed(b"a\nb\n\nc\n")
    assert list(splitter.tail) == ["b", "c"]


def test_what_mpi_prints_of_the_end_of_another_rank_is_dropped() -> None:
    notice = [
        "[host-1:00042] *** An error occurred in PMIx Event Notification",
        "[host-1:00042] *** reported by process [2678652929,0]",
        "[host-1:00042] *** on a NULL communicator",
        "[host-1:00042] *** Unknown error (this should not happen!)",
        "[host-1:00042] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,",
        "[host-1:00042] ***    and MPI will try to terminate your MPI job as well)",
    ]
    error = [
        "[host-1:00042] *** An error occurred in MPI_Recv",
        "[host-1:00042] *** on communicator MPI_COMM_WORLD",
        "[host-1:00042] *** MPI_ERR_TRUNCATE: message truncated",
    ]
    lines = ["[1] *** own stars", *error, "between", *notice, "after", *error]
    for cut in range(len(lines)):
        filtering = AbortNoticeFilter()
        kept = filtering.filter(lines[:cut]) + filtering.filter(lines[cut:])
        assert kept == ["[1] *** own stars", *error, "between", "after", *error]
