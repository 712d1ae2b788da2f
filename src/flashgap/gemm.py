"""How well a matrix product runs by its widths: the picture behind "pruned models lose the fast kernels".

The one idea: a width is one channel more or less to a plan and another kernel to the machine. So the same product is
timed over a grid of widths, dense at 16 bits and packed at 4, for few rows and many, weights from memory, all in turn, and what
compares is time over the arithmetic that is needed.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from flashgap.treatment import GemmWorkload

WORKING_SET_BYTES = 64 * 2**20  # weights that take turns, so that none waits in an inner cache
MOST_LAYERS = 64
SAMPLE_S = 0.002  # a timing takes as many calls as fill this


def measure_gemm(w: GemmWorkload, device: str = "cpu", threads: int | None = None) -> list[dict[str, Any]]:
    """Observation rows `dense_gemm_s` and `packed_gemm_s`: seconds of one call, by rows (`batch`), input features
    (`context_tokens`) and output features (`request`).

    A shape that the packed kernel does not take has no `packed_gemm_s`; `flashgap.builds.packed.illegal` says why.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    dtype = getattr(torch, w.dtype)
    out: list[dict[str, Any]] = []
    with torch.inference_mode():
        calls = {
            (kind, shape): made
            for shape in w.shapes
            for kind, made in _layers(torch, shape, w.group_size, dtype, device).items()
        }
        for rows in sorted(w.rows):
            inputs = {k: torch.randn(rows, k, dtype=dtype, device=device) for _, k in w.shapes}
            out += _timed(torch, calls, inputs, rows, w.repeats, device)
    return out


def _layers(
    torch: Any, shape: tuple[int, int], group_size: int, dtype: Any, device: str
) -> dict[str, list[Callable[[Any], Any]]]:
    """Calls of enough distinct layers of one shape [out, in] to fill the working set, by kind."""
    from torch.nn.functional import linear

    from flashgap.builds.packed import PackedLinear, illegal
    from flashgap.builds.quantizers import round_to_nearest

    rows, columns = shape
    count = min(MOST_LAYERS, math.ceil(WORKING_SET_BYTES / (rows * columns * dtype.itemsize)))
    weights = [torch.randn(rows, columns, dtype=dtype, device=device) for _ in range(count)]
    found: dict[str, list[Callable[[Any], Any]]] = {
        "dense": [partial(linear, weight=weight) for weight in weights]
    }
    if illegal(rows, columns, group_size, device=device.split(":")[0]) is None:
        packed = [
            PackedLinear.from_grouped("gemm", round_to_nearest(weight, 4, group_size, False), dtype, None)
            for weight in weights
        ]
        found["packed"] = [layer.multiply for layer in packed]
    return found


def _timed(
    torch: Any,
    calls: dict[Any, list[Callable[[Any], Any]]],
    inputs: dict[int, Any],
    rows: int,
    repeats: int,
    device: str,
) -> list[dict[str, Any]]:
    """Every kind and shape in an order that is drawn anew at each repeat; the first is discarded."""
    out: list[dict[str, Any]] = []
    counts, at = dict.fromkeys(calls, 4), dict.fromkeys(calls, 0)
    order = random.Random(rows)
    for repeat in range(-1, repeats):
        names = list(calls)
        order.shuffle(names)
        for name in names:
            (kind, (features_out, features_in)), layers = name, calls[name]
            x = inputs[features_in]
            _settled(torch, device)
            start_s = time.perf_counter()
            for number in range(counts[name]):
                layers[(at[name] + number) % len(layers)](x)
            _settled(torch, device)
            one_s = (time.perf_counter() - start_s) / counts[name]
            at[name] += counts[name]
            if repeat < 0:
                counts[name] = max(1, math.ceil(SAMPLE_S / one_s))
                continue
            place = {
                "batch": rows,
                "context_tokens": features_in,
                "request": features_out,
                "iteration": repeat,
            }
            out.append({"metric": f"{kind}_gemm_s", "value": one_s, **place})
    return out


def _settled(torch: Any, device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
