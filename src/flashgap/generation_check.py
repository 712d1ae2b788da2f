"""Does a build still write? Greedy answers of Standard and the build to the same prompts, side by side.

The one idea: a mean over tokens can look bearable while every answer falls into a loop, because each next token is
judged after a text that Standard did not go wrong on. So both write on their own, and what is kept is what a
reader would check: how long they agree, how much of the text is new, and the text itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter that thanks a neighbour for watering the plants.",
    "List three things to check before a long journey by car.",
    "What does a compiler do?",
)
NEW_TOKENS = 48
NGRAM = 3  # tokens; a text that loops repeats its runs of three


def check_generation(trial: Any, standard: Any) -> None:
    """By prompt (`request`): `equal_tokens`, `standard_new_share`, `new_share`; the texts go to `facts["generation"]`.

    `standard` is the model of the Standard build, in memory beside the build of `trial`. An answer counts up to the
    token that ends the turn, after which the engine runs on only to keep lengths equal.
    """
    from flashgap import models
    from flashgap.engine import Engine

    tokenizer = models.tokenizer(trial.spec.model)
    truth = Engine(standard, device=trial.spec.device)
    ends = end_ids(standard, tokenizer)
    texts = []
    for request, prompt in enumerate(PROMPTS):
        ids = prompt_ids(tokenizer, prompt)
        written = (e.generate([ids], NEW_TOKENS).tokens[0] for e in (truth, trial.engine))
        ours, theirs = (until(tokens, ends) for tokens in written)
        rows = {
            "equal_tokens": equal_prefix(ours, theirs),
            "standard_new_share": new_share(ours),
            "new_share": new_share(theirs),
        }
        for metric, value in rows.items():
            trial.observations.add(metric, value, request=request)
        texts.append(
            {"prompt": prompt, "standard": tokenizer.decode(ours), "build": tokenizer.decode(theirs)}
        )
    trial.facts["generation"] = texts


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of one user's turn in the model's own chat form, or of the plain text if it has none."""
    if not tokenizer.chat_template:
        return list(tokenizer.encode(prompt))
    turn = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))


def end_ids(model: Any, tokenizer: Any) -> set[int]:
    """Ids of the tokens that end an answer, by the model's generation settings and by its tokenizer."""
    named = model.generation_config.eos_token_id
    return {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id} - {None}


def until(tokens: Sequence[int], ends: set[int]) -> list[int]:
    """`tokens` before the first of `ends`."""
    return list(itertools.takewhile(lambda token: token not in ends, tokens))


def equal_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens both write alike before they first differ or one of them ends."""
    return sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
    )


def new_share(tokens: Sequence[int]) -> float:
    """Distinct runs of `NGRAM` tokens over all runs: 1 without repetition, near 0 in a loop."""
    runs = [tuple(tokens[at : at + NGRAM]) for at in range(len(tokens) - NGRAM + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0
