"""Charts and pages: what is drawn, and that nothing is lost or let through."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from horovod_spark_runner import formatting
from horovod_spark_runner.observe.report.charts import (
    MOST_COLUMNS,
    Part,
    Scale,
    Series,
    Whole,
    bounds,
    groups,
    legend,
    line_chart,
    spans_decades,
    stacked_columns,
    stacked_rows,
    thin,
)
from horovod_spark_runner.observe.report.page import (
    Markup,
    Section,
    element,
    facts,
    figure,
    grid,
    page,
    table,
)

from .browser import DESKTOP, PHONE, Browser

HOSTILE = "<script>alert('x')</script>&\"\ud800"
MILLION = 10**6
PARTS = [
    Part("waiting for data", 0, "the reader was not ready"),
    Part("computing", 2),
    Part("exchanging", 1),
]


def wholes(count: int, name: str) -> list[Whole]:
    return [
        Whole(
            f"{name} {i + 1}",
            {"waiting for data": 0.1 * (i % 5), "computing": 2.0, "exchanging": 0.5 + i % 3},
        )
        for i in range(count)
    ]


def drawn_values(chart: str) -> tuple[list[float], list[float]]:
    """Return the x and y of the first curve that a chart tells under the pointer."""
    x, y = re.search(r'data-x="([^"]*)" data-y="([^"]*)"', chart).groups()  # type: ignore[union-attr]
    return [float(v) for v in x.split()], [float(v) for v in y.split()]


# -- thinning ----------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=400),
    st.integers(1, 20),
)
def test_thinning_keeps_what_can_be_seen(values: list[float], columns: int) -> None:
    x, y = np.arange(len(values), dtype=float), np.asarray(values)
    kept = thin(x, y, columns)
    assert np.all(np.diff(kept) > 0)
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert len(kept) <= 5 * columns
    edges = np.minimum((x / max(x[-1], 1) * columns).astype(int), columns - 1)
    for column in range(columns):
        inside = y[edges == column]
        shown = y[kept][edges[kept] == column]
        if np.isfinite(inside).any():
            assert np.nanmin(shown) == np.nanmin(inside)
            assert np.nanmax(shown) == np.nanmax(inside)
        assert np.isnan(shown).any() == np.isnan(inside).any()


def test_a_million_points_are_fast_and_small_and_keep_their_extremes() -> None:
    rng = np.random.default_rng(0)
    x = np.arange(MILLION)
    y = 1 / (1 + x / 1e4) + rng.normal(0, 0.01, MILLION)
    y[123_456], y[777_777] = 50.0, -40.0
    begin = time.process_time()
    chart = line_chart([Series("loss", x, y)], x_title="step", y_title="loss")
    seconds = time.process_time() - begin
    shown = drawn_values(chart)[1]
    assert (max(shown), min(shown)) == (50.0, -40.0)
    assert len(chart) < 60_000
    assert seconds < 1.5


def test_groups_make_up_the_whole() -> None:
    for count, limit in ((0, 5), (3, 5), (5, 5), (1000, 7)):
        found = groups(count, limit)
        assert [i for one in found for i in one] == list(range(count))
        assert len(found) == min(count, limit)
        assert not found or max(map(len, found)) - min(map(len, found)) <= 1


# -- scales and numbers ------------------------------------------------------------------------


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 8))
@example(low=1.0, span=800800801.0, count=4)
def test_ticks_are_inside_and_about_as_many_as_asked_for(
    low: float, span: float, count: int
) -> None:
    high = low + max(span, abs(low) * 1e-6)
    ticks = Scale(low, high, 0.0, 1.0).ticks(count)
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert count / 3 <= len(ticks) <= count + 1
    assert ticks == sorted(set(ticks))


def test_log_ticks_are_round() -> None:
    assert Scale(1e-5, 1.0, 0.0, 1.0, log=True).ticks(3) == pytest.approx([1e-4, 1e-2, 1.0])
    assert Scale(0.9, 12.0, 0.0, 1.0, log=True).ticks(4) == pytest.approx([1, 2, 5, 10])
    assert len(Scale(0.31, 0.34, 0.0, 1.0, log=True).ticks(4)) > 1


def test_a_log_scale_has_no_place_for_what_is_not_positive() -> None:
    scale = Scale(0.1, 10.0, 0.0, 100.0, log=True)
    assert scale.at(1.0) == pytest.approx(50)
    assert not np.isfinite(scale([0.0, -1.0])).any()  # type: ignore[arg-type]


def test_bounds_are_never_equal() -> None:
    for values in ([], [0.0], [3.0, 3.0], [float("nan")], [-2.0]):
        for log in (False, True):
            low, high = bounds(np.asarray(values, float), log=log)
            assert low < high
    assert bounds(np.asarray([2.0, 4.0]), log=False, from_zero=True)[0] == 0


@pytest.mark.parametrize("value", [0.001, 1.0, -3.0])
def test_what_is_constant_but_for_rounding_is_a_line_between_zero_and_more(value: float) -> None:
    rounded = float(np.float32(value)) * (1 + 1e-7)
    low, high = bounds(np.asarray([value, rounded, value]), log=False)
    assert sorted([abs(low), abs(high)]) == pytest.approx([0, 1.25 * abs(value)], rel=1e-4)
    chart = line_chart([Series("rate", [1, 2], [value, rounded])], x_title="x", y_title="y")
    labels = re.findall(r'text-anchor="end">([^<]*)<', chart)
    assert len(labels) == len(set(labels)) > 2
    assert "0" in labels
    changing = np.asarray([2.30, 2.3005])
    low, high = bounds(changing, log=False)
    assert low > 2.2
    assert high < 2.4


def test_curves_are_named_above_the_chart_and_not_within() -> None:
    names = ["loss", "a_very_long_name_of_a_metric"]
    series = [Series(name, [1, 2], [1, 2], about="last 2") for name in names]
    legend_above, svg = line_chart(series, x_title="epoch", y_title="loss").split("<svg")
    assert legend_above.count("<li>") == 2
    assert all(f"{name} <span>last 2</span>" in legend_above for name in names)
    assert names[1] not in re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    alone = line_chart([Series("loss", [1, 2], [1, 2])], x_title="epoch", y_title="loss")
    assert alone.startswith("<svg")


def test_numbers_for_people() -> None:
    told = [formatting.number(v) for v in (0.0, 0.012341, 12345.6, 2.5, -3, 1.23e-7, float("nan"))]
    assert told == ["0", "0.01234", "12,346", "2.5", "−3", "1.23e-07", "NaN"]
    spans = [formatting.duration(v) for v in (0, 0.0123, 3.21, 125, 7380, 100_000)]
    assert spans == ["0 s", "12 ms", "3.21 s", "2 min 5 s", "2 h 3 min", "1 d 3 h"]
    assert [formatting.short(v) for v in (0, 20_000, 1.5e6, 1e-5, 0.25)] == [
        "0",
        "20k",
        "1.5M",
        "1e-5",
        "0.25",
    ]
    assert formatting.size(3 * 2**20) == "3 MiB"
    assert [formatting.size(n) for n in (999, 1000, 1023 * 2**10)] == [
        "999 B",
        "1000 B",
        "1023 KiB",
    ]
    assert [formatting.duration(s) for s in (0.0994, 0.0996)] == ["99 ms", "0.0996 s"]
    assert formatting.share(1, 4) == "25 %"
    assert formatting.share(1, 0) == ""
    assert formatting.shortened("a_very_long_name", 9) == "a_ver…ame"
    assert formatting.moment(0) == "1970-01-01 00:00:00 UTC"


def test_values_that_span_decades_are_told() -> None:
    assert spans_decades([0.01, 1.0])
    assert not spans_decades([0.5, 1.0])
    assert not spans_decades([0.0, 1.0])
    assert not spans_decades([])


# -- markup ------------------------------------------------------------------------------------


def test_all_that_is_no_markup_is_escaped() -> None:
    chart = line_chart(
        [Series(HOSTILE, [1, 2], [1, 2], about=HOSTILE)],
        x_title=HOSTILE,
        y_title=HOSTILE,
    )
    others = [
        stacked_rows([Whole(HOSTILE, {HOSTILE: 1})], [Part(HOSTILE, 0, HOSTILE)], title=HOSTILE),
        legend([Part(HOSTILE, 0, HOSTILE)], [Whole("", {HOSTILE: 1})]),
        stacked_columns(
            [Whole(HOSTILE, {HOSTILE: 1})], [Part(HOSTILE, 0)], x_title=HOSTILE, y_title=HOSTILE
        ),
        table([HOSTILE], [[HOSTILE]]),
        facts({HOSTILE: HOSTILE}),
        figure(HOSTILE, HOSTILE, about=HOSTILE),
    ]
    section = Section(HOSTILE, [chart, *others], HOSTILE)
    whole = page(HOSTILE, HOSTILE, [section], HOSTILE, [section])
    assert "<script>alert" not in whole
    assert whole.count("&lt;script&gt;alert") > 20
    whole.encode()  # also where a name is no text that can be written


def test_markup_goes_in_as_it_is() -> None:
    assert element("p", element("b", "1 < 2"), " & ", [Markup("<br>")]) == (
        "<p><b>1 &lt; 2</b> &amp; <br></p>"
    )
    assert element("a", class_="x", data_n=1.50, title=None) == '<a class="x" data-n="1.5"></a>'


# -- charts ------------------------------------------------------------------------------------


def test_a_curve_is_broken_where_it_is_no_number() -> None:
    nan = float("nan")
    chart = line_chart(
        [Series("loss", [1, 2, 3, 4, 5], [1.0, 2.0, nan, 4.0, float("inf")])],
        x_title="epoch",
        y_title="loss",
    )
    path = re.search(r'<path d="([^"]*)"', chart)
    assert path
    assert path[1].count("M") == 1  # the point by itself is a dot
    assert chart.count("<circle") == 1
    broken = re.search(r'class="broken" d="([^"]*)"', chart)
    assert broken
    assert broken[1].count("M") == 2
    assert drawn_values(chart)[0] == [1, 2, 3, 4, 5]


def test_curves_may_come_in_any_order_and_be_empty() -> None:
    chart = line_chart(
        [Series("a", [3, 1, 2], [30, 10, 20]), Series("b", [], [])], x_title="x", y_title="y"
    )
    assert drawn_values(chart) == ([1, 2, 3], [10, 20, 30])
    assert "no values" in line_chart([Series("b", [], [])], x_title="x", y_title="y")


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        stacked_rows([Whole("w", {"a": -1})], [Part("a", 0)], title="")
    with pytest.raises(ValueError, match="'b'"):
        stacked_rows([Whole("w", {"b": 1})], [Part("a", 0)], title="")
    with pytest.raises(ValueError, match="nan"):
        stacked_rows([Whole("w", {"a": float("nan")})], [Part("a", 0)], title="")
    with pytest.raises(ValueError, match=r"1 .*\b2"):
        table(["a", "b"], [["1"]])


def test_what_is_left_out_is_told() -> None:
    columns = stacked_columns(wholes(1000, "epoch"), PARTS, x_title="epoch", y_title="s")
    assert "the mean of up to 12" in columns
    assert columns.count("<rect") <= MOST_COLUMNS * len(PARTS)
    assert "and 7 more" in table(["a"], [["1"]] * 507)


def test_columns_are_as_high_as_what_they_stand_for() -> None:
    chart = stacked_columns(
        [Whole("a", {"computing": 1.0}), Whole("b", {"computing": 3.0, "exchanging": 1.0})],
        PARTS,
        x_title="epoch",
        y_title="s",
    )
    heights = [float(h) for h in re.findall(r'<rect [^>]*height="([\d.]+)"', chart)]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.01)
    assert heights[2] == pytest.approx(heights[0], rel=0.01)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_stand_out_from_the_page() -> None:
    style = page("", "", [])
    for card, colours in re.findall(
        r"--card: (#\w{6});.*?((?:--c\d: #\w{6};\s*)+)", style, re.DOTALL
    ):
        behind = luminance(card)
        for colour in re.findall(r"#\w{6}", colours):
            low, high = sorted([luminance(colour), behind])
            assert (high + 0.05) / (low + 0.05) >= 3, (card, colour)
    assert len(re.findall(r"--c\d: #", style)) == 16


# -- to the eye --------------------------------------------------------------------------------


def sample() -> str:
    rng = np.random.default_rng(1)
    epochs = np.arange(1, 31)
    train, held = np.exp(-epochs / 9) + 0.05, np.exp(-epochs / 8) + 0.12
    curves = [
        Series("loss", epochs, train, dashed=True),
        Series("val_loss", epochs, held),
    ]
    million = rng.normal(0, 1, MILLION).cumsum()
    steps = line_chart([Series("walk", np.arange(MILLION), million)], x_title="s", y_title="w")
    return page(
        "A training with a long name " + "x" * 60,
        "of no importance",
        [
            Section(
                "Curves",
                [
                    grid(
                        figure("Loss", line_chart(curves, x_title="epoch", y_title="loss")),
                        figure("Walk", steps),
                    )
                ],
            ),
            Section(
                "Wide",
                [
                    grid(
                        figure(
                            "Epochs",
                            legend(PARTS, wholes(1, "e")),
                            stacked_columns(
                                wholes(200, "epoch"), PARTS, x_title="epoch", y_title="s"
                            ),
                        ),
                        figure("Ranks", stacked_rows(wholes(6, "rank"), PARTS, title="seconds")),
                    ),
                    table(["name", "value"], [["x" * 300, "1"]], numeric=[1]),
                ],
            ),
            Section("Nothing", []),
        ],
    )


@pytest.mark.thorough
def test_a_page_is_readable_light_dark_and_on_a_phone(browser: Browser) -> None:
    whole = sample()
    assert len(whole.encode()) < 200_000
    light = browser.look(whole)
    light.check()
    assert light.headings == ["Curves", "Wide"]
    assert light.charts == 4
    assert re.fullmatch(r"at \d+:  loss [\d.]+,  val_loss [\d.]+", light.told)
    assert light.background == "rgb(255, 255, 255)"
    dark = browser.look(whole, dark=True)
    dark.check()
    assert dark.background == "rgb(20, 23, 27)"
    assert dark.ink == "rgb(232, 234, 237)"
    phone = browser.look(whole, width=PHONE)
    phone.check()
    assert phone.height > light.height
    assert DESKTOP > PHONE
