"""Each metric against a number worked out by hand, and the identities between them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgap import metrics
from flashgap.metrics import MetricError

gaps = st.lists(st.floats(1e-4, 10), min_size=1, max_size=50)


@given(st.floats(0, 1e3), st.floats(1e-4, 10), gaps)
def test_ttft_and_itl_add_up_to_e2e_and_tpot_is_the_mean_itl(sent_s, first_s, between_s):
    """If this fails, the parts of a request do not make the whole."""
    times_s = sent_s + first_s + np.concatenate([[0.0], np.cumsum(between_s)])
    ttft_s, e2e_s = metrics.ttft_s(sent_s, times_s[0]), metrics.e2e_s(sent_s, times_s[-1])
    itl_s = metrics.itl_s(times_s)
    assert len(itl_s) == len(times_s) - 1
    assert ttft_s + itl_s.sum() == pytest.approx(e2e_s)
    assert metrics.tpot_s(e2e_s, ttft_s, len(times_s)) == pytest.approx(itl_s.mean())


@given(st.floats(1, 1e15), st.floats(1e-6, 1e3), st.floats(1, 1e15))
def test_utilisation_is_one_exactly_at_the_bound(amount, elapsed_s, factor):
    peak = amount / elapsed_s
    assert metrics.mfu(amount, elapsed_s, peak) == pytest.approx(1)
    assert metrics.mbu(amount, elapsed_s, peak * factor) == pytest.approx(1 / factor)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_percentiles_are_ordered_and_inside_the_data(values):
    found = metrics.percentiles(values, (0, 50, 99, 100))
    assert list(found) == ["p0", "p50", "p99", "p100"]
    assert found["p0"] == min(values)
    assert found["p100"] == max(values)
    assert found["p0"] <= found["p50"] <= found["p99"] * (1 + 1e-9 * np.sign(found["p99"])) + 1e-9


def test_examples():
    assert metrics.throughput_tokens_per_s(120, 60) == 2
    assert metrics.slot_utilization(90, 120) == 0.75
    assert metrics.cost_per_million_tokens(1000, 3.6) == pytest.approx(1.0)  # 0.001 a second, 1000 s
    assert metrics.percentiles([1, 2, 3, 4], (50, 99.9)) == pytest.approx({"p50": 2.5, "p99.9": 3.997})


def test_goodput_counts_only_requests_that_met_both_limits():
    ttft_s, tpot_s = [0.1, 0.1, 0.9, 0.2], [0.01, 0.09, 0.01, 0.02]
    assert metrics.goodput_requests_per_s(ttft_s, tpot_s, 4.0, max_ttft_s=0.2, max_tpot_s=0.05) == 0.5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: metrics.ttft_s(2.0, 1.0), "monotonic"),
        (lambda: metrics.itl_s([0.0, 2.0, 1.0]), "backwards"),
        (lambda: metrics.tpot_s(1.0, 0.5, 1), "at least 2"),
        (lambda: metrics.throughput_tokens_per_s(5, 0), "elapsed_s: must be positive"),
        (lambda: metrics.mfu(1, 1, 0), "peak_flops_per_s"),
        (lambda: metrics.mbu(1, 1, float("nan")), "peak_bytes_per_s"),
        (lambda: metrics.percentiles([]), "no values"),
        (lambda: metrics.slot_utilization(2, 1), "of 1 computed"),
        (lambda: metrics.goodput_requests_per_s([1], [1, 2], 1, 1, 1), "1 ttft values but 2"),
    ],
)
def test_meaningless_inputs_are_refused_in_words(call, words):
    with pytest.raises(MetricError, match=words):
        call()
