"""Tables of matrix products by their widths: efficiency, and what an unaligned width costs. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from flashgap import stats, tables

if TYPE_CHECKING:
    from flashgap.results import Result

KINDS = ("dense", "packed")


def efficiency(result: Result) -> pd.DataFrame:
    """GFLOP/s of each product: columns kind, features_out, features_in, rows, value, low, high, seconds_a_flop.

    FLOPs are 2 x rows x out x in, whatever a kernel pads.
    """
    out = []
    for kind in KINDS:
        metric = f"{kind}_gemm_s"
        frame = result.frame(metric)
        for features_out, features_in, rows in sorted(_places(frame)):
            at = {"request": features_out, "context_tokens": features_in, "batch": rows}
            groups = [g for name in result.treatments for g in result.groups(name, metric, **at)]
            if not groups:
                continue
            time_s = stats.median_ci(groups)
            flops = 2 * rows * features_out * features_in
            out.append(
                {
                    "kind": kind,
                    "features_out": features_out,
                    "features_in": features_in,
                    "rows": rows,
                    "value": flops / time_s.value / 1e9,
                    "low": flops / time_s.high / 1e9,
                    "high": flops / time_s.low / 1e9,
                    "seconds_a_flop": time_s.value / flops,
                }
            )
    columns = ["kind", "features_out", "features_in", "rows", "value", "low", "high", "seconds_a_flop"]
    return pd.DataFrame(out, columns=columns)


def cost_of_width(
    result: Result, aligned: tuple[int, int], other: tuple[int, int], kind: str = "dense"
) -> pd.DataFrame:
    """Time a FLOP at the shape `other` over that at `aligned` (both out, in), by rows, paired by block: above 1 it is dearer."""
    metric, out = f"{kind}_gemm_s", []
    treatment = result.treatments[0] if result.treatments else ""
    for rows in tables.levels(result, metric, "batch"):
        both = [
            [g / (shape[0] * shape[1]) for g in result.groups(
                treatment, metric, request=shape[0], context_tokens=shape[1], batch=rows
            )]
            for shape in (other, aligned)
        ]  # fmt: skip
        pairs = list(zip(*both, strict=False))
        if pairs:
            out.append({"rows": rows, **tables.row(stats.paired_ratio(pairs))})
    return pd.DataFrame(out, columns=["rows", "value", "low", "high", "blocks", "observations"])


def _places(frame: pd.DataFrame) -> set[tuple[int, int, int]]:
    if frame.empty:
        return set()
    return {
        (int(out), int(inside), int(rows))
        for out, inside, rows in zip(frame["request"], frame["context_tokens"], frame["batch"], strict=True)
    }
