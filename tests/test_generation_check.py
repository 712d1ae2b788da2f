"""What both builds write: a loop must show, and so must the first token that differs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flashgap.generation_check import end_ids, equal_prefix, new_share, prompt_ids, until
from flashgap.models import ByteTokenizer


def test_a_text_in_a_loop_has_few_new_runs():
    assert new_share(range(48)) == 1
    assert new_share([7] * 48) == pytest.approx(1 / 46)
    assert new_share([1, 2] * 24) == pytest.approx(2 / 46)
    assert new_share([1]) == 1


def test_texts_agree_up_to_the_first_difference():
    assert equal_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert equal_prefix([1, 2], [1, 2]) == 2
    assert equal_prefix([9], [1]) == 0
    assert equal_prefix([1, 2], [1, 2, 3]) == 2, "one of them ended its turn"


def test_what_follows_the_end_of_a_turn_is_no_repetition():
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[2, 3]))
    ends = end_ids(model, ByteTokenizer(512))
    assert ends == {2, 3}
    assert until([5, 6, 7, 3, 3, 3, 3], ends) == [5, 6, 7]
    model.generation_config.eos_token_id = None
    assert until([5, 3], end_ids(model, ByteTokenizer(512))) == [5, 3]


def test_a_model_without_a_chat_form_gets_the_plain_text():
    assert prompt_ids(ByteTokenizer(512), "ab") == [97, 98]
