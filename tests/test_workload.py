"""The task is the same for everyone, fits the context, and follows the traffic it was fitted to."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgap import workload
from flashgap.treatment import TaskWorkload

TRACES = Path(os.environ.get("FLASHGAP_TRACES", Path(__file__).parents[2] / "shared" / "data"))


def task(**over):
    keys = {"kind": "task", "requests": 16, "max_context_tokens": 8192, "max_batch": 16, "draw_seed": 7}
    return TaskWorkload.model_validate(keys | over)


def test_same_seed_same_task_other_seed_other_task():
    assert workload.draw_task(task()) == workload.draw_task(task())
    assert workload.draw_task(task()) != workload.draw_task(task(draw_seed=8))


@given(
    st.integers(1, 40), st.floats(0.001, 4), st.integers(2, 9000), st.integers(0, 2**31), st.integers(1, 9)
)
def test_every_request_fits_the_context_and_none_is_lost(count, scale, context, seed, replicas):
    drawn = workload.draw_task(
        task(requests=count, prompt_scale=scale, max_context_tokens=context, draw_seed=seed)
    )
    assert len(drawn) == count
    assert all(r.prompt_tokens >= 1 and r.generated_tokens >= 1 for r in drawn)
    assert all(r.prompt_tokens + r.generated_tokens <= context for r in drawn)
    shares = [workload.replica_share(drawn, i, replicas) for i in range(replicas)]
    assert sorted(map(str, drawn)) == sorted(str(r) for share in shares for r in share)
    assert [r for batch in workload.batches(drawn, 4) for r in batch] == drawn


def test_prompts_differ_between_trials_and_stay_in_the_vocabulary():
    first, second = workload.prompt_ids([50], 100, seed=1), workload.prompt_ids([50], 100, seed=2)
    assert first != second
    assert all(0 <= i < 100 for ids in first + second for i in ids)


@pytest.mark.parametrize(
    ("table", "column"),
    [(workload.CONV_PROMPT_TOKENS, 1), (workload.CONV_GENERATED_TOKENS, 2)],
)
def test_the_table_is_the_trace(table, column):
    path = TRACES / "azure_llm_2023_conv.csv"
    if not path.is_file():
        pytest.skip(f"no trace at {path.name}: set FLASHGAP_TRACES to a folder that has it")
    tokens = np.loadtxt(path, delimiter=",", skiprows=1, usecols=column)
    drawn = workload.draw_lengths(table, 20_000, np.random.default_rng(0))
    gap = max(
        abs(np.mean(tokens <= x) - np.mean(drawn <= x))
        for x in np.quantile(tokens, np.linspace(0.02, 0.98, 25))
    )
    assert gap < 0.1, (
        f"drawn lengths stray from the trace: largest gap of the distribution functions {gap:.3f}"
    )
