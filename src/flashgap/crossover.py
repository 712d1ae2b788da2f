"""Where a packed layer stops paying: each shape of a build's layers, timed every way, by number of rows.

The one idea: a model's speed-up is a sum over shapes, and each shape crosses over at its own number of rows.
So the layers of the build are timed as they are (weights from memory, in turn), four ways in one interleaved
pass: dense (the same weights at 16 bits, as in Standard), packed, expanded first, and as the build dispatches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch

from flashgap.builds.dispatch import by_shape, turns
from flashgap.builds.packed import PackedLinear

LONGEST_S = 0.02  # a way that took longer for fewer rows is not tried for more
SAMPLE = 12  # layers of a shape that take turns
SAMPLE_S = 0.002  # a timing takes as many calls as fill this


@torch.inference_mode()
def crossover(trial: Any, w: Any) -> None:
    """`WAY_linear_s` of one call for each way, shape (`request` numbers `facts["shapes"]`) and rows (`batch`)."""
    shapes = by_shape(trial.engine.model)
    if not shapes:
        raise ValueError(
            "experiment of kind crossover: the build has no packed layers; choose another treatment"
        )
    trial.facts["shapes"] = []
    for number, layers in enumerate(shapes):
        first = layers[0]
        trial.facts["shapes"].append(
            {
                "features_out": first.out_features,
                "features_in": first.in_features,
                "bits": first.bits,
                "group_size": first.group_size,
                "layers": len(layers),
                "many_rows": first.many_rows,
            }
        )
        _time_shape(trial, number, layers[:SAMPLE], w)
    trial.first_token()


def _time_shape(trial: Any, number: int, layers: list[PackedLinear], w: Any) -> None:
    dtype, device = layers[0].dtype, layers[0].packed.device
    eye = torch.eye(layers[0].in_features, dtype=dtype, device=device)
    weights = [layer.multiply(eye).T.contiguous() for layer in layers]
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "dense": lambda x, pair: torch.nn.functional.linear(x, pair[1]),
        "packed": lambda x, pair: pair[0].multiply(x),
        "dispatched": lambda x, pair: pair[0].dispatch(x),
    }
    if layers[0].many_rows is not None:
        calls["expanded"] = lambda x, pair: pair[0].multiply_dense(x)
    turn, shuffled = turns(list(zip(layers, weights, strict=True))), random.Random(number)
    for rows in sorted(w.rows):
        x = torch.randn(rows, layers[0].in_features, dtype=dtype, device=device)
        slow, rounds = set(), dict.fromkeys(calls, 1)
        for repeat in range(-1, w.repeats):
            ways = list(calls)
            shuffled.shuffle(ways)
            for way in ways:
                count = rounds[way] * len(layers)
                start_s = trial.engine.clock()
                for _ in range(count):
                    calls[way](x, next(turn))
                one_s = (trial.engine.clock() - start_s) / count
                if repeat < 0:  # discarded, but for how many calls a timing wants
                    rounds[way] = max(1, math.ceil(SAMPLE_S / (one_s * len(layers))))
                else:
                    trial.observations.add(
                        f"{way}_linear_s", one_s, batch=rows, request=number, iteration=repeat
                    )
                if one_s > LONGEST_S:
                    slow.add(way)
        for way in slow:
            del calls[way]
