"""One formula for each metric, and nothing else computes it.

The one idea: a serving number is only comparable if its formula is. Times are seconds, counts are
tokens, and each function's name carries the unit of what it returns. Definitions follow NVIDIA's
"LLM inference benchmarking: metrics" guide and MLPerf Inference (TTFT, TPOT), PaLM (MFU) and the
DistServe paper (goodput). Pure numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class MetricError(RuntimeError):
    """Inputs for which a metric has no meaning; the message says which."""


def ttft_s(sent_s: float, first_token_s: float) -> float:
    """Time to first token: from sending the request to holding its first token."""
    return _not_negative("ttft_s", first_token_s - sent_s)


def itl_s(token_times_s: Sequence[float]) -> np.ndarray:
    """Inter-token latencies: gaps between consecutive tokens [n] -> [n - 1]. The first token is not in it."""
    gaps = np.diff(np.asarray(token_times_s, dtype=float))
    if gaps.size and gaps.min() < 0:
        raise MetricError("itl_s: token times run backwards; use one monotonic clock")
    return gaps


def e2e_s(sent_s: float, last_token_s: float) -> float:
    """End-to-end latency: from sending the request to holding its last token."""
    return _not_negative("e2e_s", last_token_s - sent_s)


def tpot_s(e2e_s: float, ttft_s: float, generated_tokens: int) -> float:
    """Time per output token after the first: (e2e - ttft) / (tokens - 1), the mean of the ITLs.

    Raises `MetricError` below two tokens, where there is no second token to time.
    """
    if generated_tokens < 2:
        raise MetricError(f"tpot_s: needs at least 2 generated tokens, got {generated_tokens}")
    return _not_negative("tpot_s", e2e_s - ttft_s) / (generated_tokens - 1)


def throughput_tokens_per_s(generated_tokens: float, elapsed_s: float) -> float:
    """Generated tokens (all requests) over wall time. Prompt tokens are not counted."""
    return generated_tokens / _positive("elapsed_s", elapsed_s)


def goodput_requests_per_s(
    ttft_s: Sequence[float], tpot_s: Sequence[float], elapsed_s: float, max_ttft_s: float, max_tpot_s: float
) -> float:
    """Requests per second that met *both* limits (Zhong et al., DistServe, OSDI 2024)."""
    first, rest = np.asarray(ttft_s, dtype=float), np.asarray(tpot_s, dtype=float)
    if first.shape != rest.shape:
        raise MetricError(f"goodput: {first.size} ttft values but {rest.size} tpot values")
    good = int(np.count_nonzero((first <= max_ttft_s) & (rest <= max_tpot_s)))
    return good / _positive("elapsed_s", elapsed_s)


def mfu(flops: float, elapsed_s: float, peak_flops_per_s: float) -> float:
    """Model FLOP/s utilisation: FLOPs the model needs / time / peak (Chowdhery et al., PaLM 2022, app. B).

    Needed, not executed: expanding packed weights adds none. Above 1 the ceiling was measured too low.
    """
    return flops / _positive("elapsed_s", elapsed_s) / _positive("peak_flops_per_s", peak_flops_per_s)


def mbu(moved_bytes: float, elapsed_s: float, peak_bytes_per_s: float) -> float:
    """Model bandwidth utilisation: bytes the model must move / time / peak (Databricks, "LLM inference
    performance engineering", 2023: weights + KV cache over TPOT). Above 1 it was read from a faster cache."""
    return moved_bytes / _positive("elapsed_s", elapsed_s) / _positive("peak_bytes_per_s", peak_bytes_per_s)


def percentiles(values: Iterable[float], which: Sequence[float] = (50, 90, 95, 99)) -> dict[str, float]:
    """`{"p50": ..., "p99": ...}` by linear interpolation (numpy's default). Raises on no values."""
    array = np.asarray(list(values), dtype=float)
    if array.size == 0:
        raise MetricError("percentiles: no values")
    return {f"p{q:g}": float(np.percentile(array, q)) for q in which}


def slot_utilization(useful_slots: float, computed_slots: float) -> float:
    """Share of computed token slots that held a wanted token; the rest is padding or idle."""
    if useful_slots > computed_slots:
        raise MetricError(f"slot_utilization: {useful_slots} useful slots of {computed_slots} computed")
    return useful_slots / _positive("computed_slots", computed_slots)


def cost_per_million_tokens(tokens_per_s: float, price_per_hour: float) -> float:
    """Price of a million generated tokens, in the currency of `price_per_hour` (stated, never measured)."""
    return price_per_hour / 3600 / _positive("tokens_per_s", tokens_per_s) * 1e6


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise MetricError(f"{name}: must be positive, got {value}")
    return value


def _not_negative(name: str, value: float) -> float:
    if not value >= 0:
        raise MetricError(f"{name}: negative ({value:g} s); use one monotonic clock")
    return value
