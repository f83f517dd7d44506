"""The pieces: seconds, bars, consoles, files, progress."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from memfit.report import draw_result, draw_text, follow_progress, open_console, write_report
from memfit.report.drawing import Bar, format_percent, format_seconds
from memfit.report.progress import _plain_lines
from report.examples import RESULT


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2e-9, "2.00 ns"),
        (1.3e-6, "1.30 us"),
        (0.0009, "900 us"),
        (0.00099951, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.1234, "123 ms"),
        (0.9999, "1.00 s"),
        (9.996, "10.0 s"),
        (75, "75.0 s"),
        (4321, "4321 s"),
    ],
)
def test_seconds_are_written_with_three_digits(seconds, text):
    assert format_seconds(seconds) == text


def test_a_share_of_nothing_is_a_dash():
    assert format_percent(1, 3) == "33.3 %"
    assert format_percent(1, 0) == "-"


@pytest.mark.parametrize(
    ("part", "whole", "length"),
    [(0, 10, 0), (1, 1000, 1), (5, 10, 5), (10, 10, 10), (11, 10, 10), (3, 0, 1), (0, 0, 0)],
)
def test_a_bar_shows_a_share_and_something_for_every_byte(part, whole, length):
    assert draw_text(Bar(part, whole, 10)) == "█" * length + "\n"


def test_a_terminal_that_knows_only_ascii_gets_ascii():
    raw = io.BytesIO()
    console = open_console(io.TextIOWrapper(raw, encoding="ascii"))
    console.print(draw_result(RESULT))
    console.file.flush()
    assert b"  after   #####################         2.93 GiB" in raw.getvalue()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return monkeypatch


def printed(terminal):
    open_console(terminal).print(draw_result(RESULT))
    return terminal.getvalue()


def test_a_pipe_gets_80_columns_and_no_escape_codes(environment):
    environment.setenv("COLUMNS", "200")
    text = printed(io.StringIO())
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) == 80


def test_a_terminal_gets_colour_unless_no_color_is_set(environment):
    assert "\x1b[32m" in printed(Terminal())
    environment.setenv("NO_COLOR", "1")
    text = printed(Terminal())
    assert "\x1b[32m" not in text
    assert "stayed within 3.00 GiB" in text


def test_a_wide_terminal_is_used_up_to_100_columns(environment):
    environment.setenv("COLUMNS", "200")
    assert open_console(Terminal()).width == 100
    environment.setenv("COLUMNS", "60")
    assert open_console(Terminal()).width == 60


def test_a_text_file_holds_what_is_drawn(tmp_path):
    write_report(draw_result(RESULT), tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text(encoding="utf-8") == draw_text(draw_result(RESULT))


def test_an_html_file_is_a_page_with_names_escaped(tmp_path):
    write_report(draw_result(replace(RESULT, program="<b>.py")), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "&lt;b&gt;.py stayed within 3.00 GiB" in page


def test_progress_is_one_plain_line_a_stage_with_the_seconds_of_the_one_before():
    times = iter((10.0, 12.5))
    stream = io.StringIO()
    on_progress = _plain_lines(Console(file=stream, width=80), clock=lambda: next(times))
    on_progress("measuring step 1")
    on_progress("measuring step 1", 1, 2)
    on_progress("planning")
    assert stream.getvalue() == "memfit: measuring step 1 ...\nmemfit: planning ... (measuring step 1: 2.50 s)\n"


def test_progress_is_plain_in_a_pipe_even_where_a_live_line_was_allowed():
    stream = io.StringIO()
    with follow_progress(open_console(stream), live=True) as on_progress:
        on_progress("planning", 0, None)
    assert stream.getvalue() == "memfit: planning ...\n"


def test_a_live_line_leaves_nothing_behind(environment):
    stream = Terminal()
    with follow_progress(open_console(stream), live=True) as on_progress:
        on_progress("planning [1]", 1, 4)
        on_progress("planning [2]", 2, 4)
    assert "memfit: planning [2]" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")  # the line is wiped


def test_a_name_that_standard_output_cannot_write_does_not_end_the_report(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console = open_console()
    console.print(draw_result(replace(RESULT, program="größe.py")))
    console.file.flush()
    assert raw.getvalue().startswith(b"memfit: gr\\xf6\\xdfe.py stayed within 3.00 GiB")
