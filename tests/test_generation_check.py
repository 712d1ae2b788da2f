"""What both builds write: a loop must show, and so must the first token that differs."""

from __future__ import annotations

import pytest

from flashgap.generation_check import equal_prefix, new_share, prompt_ids
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


def test_a_model_without_a_chat_form_gets_the_plain_text():
    assert prompt_ids(ByteTokenizer(512), "ab") == [97, 98]
