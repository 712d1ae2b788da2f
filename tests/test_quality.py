"""If these failed, a damaged build could pass the gate, or a good one be refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from flashgap.quality import QualityError, compare, held_out_ids, reference_logits


class Fixed(nn.Module):
    """A model whose logits depend on the last id only: row `id` of a table."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, input_ids, use_cache=False):
        return type("Out", (), {"logits": self.table[input_ids]})()


IDS = [0, 1, 2, 1, 0, 2, 2, 1, 0]


def table(seed=0):
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))


def test_a_model_against_itself_has_no_drift():
    model = Fixed(table())
    quality = compare(reference_logits(model, IDS, 4), model, IDS, 4)
    assert quality.kl_nats == pytest.approx(0, abs=1e-7)
    assert quality.top1_agreement == 1
    assert quality.perplexity_ratio == pytest.approx(1)


def test_numbers_equal_a_direct_computation():
    a, b = table(0), table(1)
    quality = compare(reference_logits(Fixed(a), IDS, 100), Fixed(b), IDS, 100)
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    inputs, targets = IDS[:-1], IDS[1:]
    kl = sum((p[i].exp() * (p[i] - q[i])).sum().item() for i in inputs) / len(inputs)
    loss = -sum(q[i, t].item() for i, t in zip(inputs, targets, strict=True)) / len(inputs)
    agree = sum((p[i].argmax() == q[i].argmax()).item() for i in inputs) / len(inputs)
    assert quality.tokens == 8
    assert quality.kl_nats == pytest.approx(kl, rel=1e-5)
    assert quality.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert quality.top1_agreement == pytest.approx(agree)


def test_windows_do_not_score_across_their_edges_and_drop_a_lone_id():
    quality = compare(reference_logits(Fixed(table()), IDS, 4), Fixed(table()), IDS, 4)
    assert quality.tokens == 6  # two windows of 4 predict 3 each; the ninth id alone predicts nothing


def test_nan_logits_and_too_little_text_are_refused():
    bad = table()
    bad[1, 1] = float("nan")
    with pytest.raises(QualityError, match="NaN"):
        compare(reference_logits(Fixed(table()), IDS, 9), Fixed(bad), IDS, 9)
    with pytest.raises(QualityError, match="1 tokens"):
        compare([], Fixed(table()), [1], 4)


def test_held_out_ids_are_exact_in_number_or_say_what_is_missing():
    assert held_out_ids(lambda text: list(text.encode()), "abcdef" * 100, 10) == list(b"abcdefabcd")
    with pytest.raises(QualityError, match="gives 6 tokens, 10 are asked for"):
        held_out_ids(lambda text: list(text.encode()), "abcdef", 10)
