"""The machine is described without torch, ceilings are complete, and warnings say what to do."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgap import hardware
from flashgap.treatment import CeilingsWorkload

TINY = CeilingsWorkload(
    kind="ceilings",
    working_sets_bytes=(65536, 1048576),
    matmul_size=32,
    dtypes=("bfloat16", "float32"),
    repeats=2,
)


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Tests look at what is measured, not at how well."""
    monkeypatch.setattr(hardware, "OBSERVATION_S", 0.0005)
    monkeypatch.setattr(hardware, "WARMUP_S", 0.001)


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


# --- memory -------------------------------------------------------------------------------------------


def test_counters_see_what_is_touched():
    before = hardware.memory_counters()
    block = bytearray(b"\1" * (64 << 20))
    after = hardware.memory_counters()
    for name in ("rss_bytes", "pss_bytes", "uss_bytes", "data_bytes"):
        if name in before:
            assert after[name] - before[name] > 0.9 * len(block), name
    assert after["uss_bytes"] <= after["pss_bytes"] * 1.01
    assert after["peak_rss_bytes"] >= 0.98 * after["rss_bytes"]  # the kernel sums per-thread counts lazily


def test_peak_outlives_the_memory_until_it_is_reset():
    size = 128 << 20
    low = hardware.memory_counters()["rss_bytes"]
    block = bytearray(b"\1" * size)
    del block
    assert hardware.memory_counters()["peak_rss_bytes"] > low + 0.9 * size
    if hardware.reset_peak():
        assert hardware.memory_counters()["peak_rss_bytes"] < low + 0.5 * size


def test_missing_counters_are_left_out(monkeypatch):
    monkeypatch.setattr(hardware, "_kib_fields", lambda path: {"VmRSS": 4096} if "status" in path else {})
    assert hardware.memory_counters() == {"rss_bytes": 4096}
    monkeypatch.setattr(hardware, "_kib_fields", lambda path: {})
    assert hardware.memory_counters() == {}


def test_fields_of_a_missing_file_are_none(tmp_path):
    assert hardware._kib_fields(str(tmp_path / "none")) == {}
    file = tmp_path / "status"
    file.write_text("Name:\tx\nVmRSS:\t  12 kB\nodd kB\nThreads:\t3\n")
    assert hardware._kib_fields(str(file)) == {"VmRSS": 12288}


# --- ceilings -----------------------------------------------------------------------------------------


def test_every_repeat_of_every_ceiling_is_one_observation(torch):
    frame = pd.DataFrame(hardware.measure_ceilings(TINY))
    assert (frame["value"] > 0).all()
    assert set(frame["replica"]) == {-1}
    by_metric = frame.groupby("metric").size()
    for access in ("read", "copy", "gemv"):
        assert by_metric[f"{access}_bytes_per_s"] == 2 * 2
    assert by_metric["matmul_bfloat16_flops_per_s"] == by_metric["matmul_float32_flops_per_s"] == 2
    sizes = hardware.with_working_set(frame)["working_set_bytes"].dropna().unique()
    assert sorted(sizes) == list(TINY.working_sets_bytes)


def test_read_is_the_best_of_the_candidates(torch):
    """If this fails, a bound is drawn below what the machine was seen to do."""
    frame = hardware.with_working_set(pd.DataFrame(hardware.measure_ceilings(TINY)))
    medians = frame.groupby(["working_set_bytes", "metric"])["value"].median()
    for size in TINY.working_sets_bytes:
        at = medians[size]
        candidates = [name for name in at.index if name.startswith("read_") and name != "read_bytes_per_s"]
        assert len(candidates) >= 2
        assert at["read_bytes_per_s"] == max(at[name] for name in candidates)


@pytest.mark.parametrize("size", [64, 1000, 65536, 1 << 20, 3 << 20, 33_554_432])
def test_gemv_reads_the_whole_working_set_and_says_how_much(torch, size):
    """Rotating over a smaller set than stated would measure a cache."""
    buffer = torch.ones(max(size // 16, 1) * 4)
    seen = []
    original = torch.nn.functional.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", lambda x, w: seen.append(w) or original(x, w))
        call, amount = hardware._gemv_call(torch, buffer, "cpu")
        call()
    assert amount == sum(w.nbytes for w in seen) <= buffer.nbytes
    assert amount > 0.6 * buffer.nbytes
    assert len({w.data_ptr() for w in seen}) == len(seen)
    assert all(w.dtype is torch.bfloat16 for w in seen)


def test_threads_are_set(torch):
    before = torch.get_num_threads()
    try:
        hardware.measure_ceilings(TINY, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_rates_are_amount_over_time_and_warm_up_is_not_counted():
    """A clock that says 1 s a call, after a slow first one: 10 bytes a call are 10 bytes/s."""
    spent = iter([9.0] + [1.0] * 50)
    rates = hardware._observe({"x": (lambda: None, 10.0)}, 4, lambda call, times: next(spent) * times)
    assert rates == {"x": [10.0] * 4}


def test_short_calls_are_repeated_until_they_can_be_timed(monkeypatch):
    monkeypatch.setattr(hardware, "OBSERVATION_S", 1.0)
    assert hardware._times_per_observation(lambda: None, lambda call, times: 0.01 * times) == 100
    assert hardware._times_per_observation(lambda: None, lambda call, times: 7.0 * times) == 1
    assert hardware._times_per_observation(lambda: None, lambda call, times: 0.0) > 1


def ceilings_of(rates: dict[int, float]) -> pd.DataFrame:
    rows = [
        hardware._row("read_bytes_per_s", r, i, working_set_kib=k) for k, r in rates.items() for i in range(3)
    ]
    return pd.DataFrame(rows)


def test_a_ceiling_between_two_sizes_lies_between_theirs():
    frame = ceilings_of({1024: 100e9, 4096: 25e9})
    assert hardware.ceiling_at(frame, "read_bytes_per_s", 1 << 20) == pytest.approx(100e9)
    assert hardware.ceiling_at(frame, "read_bytes_per_s", 2 << 20) == pytest.approx(50e9)
    assert hardware.ceiling_at(frame, "read_bytes_per_s", 1 << 40) == pytest.approx(25e9)
    with pytest.raises(hardware.HardwareError, match="no ceiling 'copy_bytes_per_s'"):
        hardware.ceiling_at(frame, "copy_bytes_per_s", 1)


@given(
    st.dictionaries(st.integers(1, 2**30), st.floats(1e6, 1e13), min_size=1, max_size=6), st.floats(1, 1e13)
)
def test_a_ceiling_never_leaves_what_was_measured(rates, size):
    found = hardware.ceiling_at(ceilings_of(rates), "read_bytes_per_s", size)
    assert min(rates.values()) * (1 - 1e-9) <= found <= max(rates.values()) * (1 + 1e-9)


def test_a_working_set_beyond_32_bits_of_bytes_survives_storage():
    frame = ceilings_of({8 << 20: 1e12}).astype({hardware.WORKING_SET_COLUMN: "int32"})
    assert hardware.with_working_set(frame)["working_set_bytes"].iloc[0] == 8 << 30


# --- identity, state, warnings ------------------------------------------------------------------------


def test_description_needs_no_torch_and_is_json():
    code = (
        "import sys, json; from flashgap import hardware as h; "
        "print(json.dumps([h.fingerprint(), h.machine_state(0.01), h.memory_counters()])); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    fingerprint, state, counters = json.loads(done.stdout)
    assert fingerprint["cores"] >= state["usable_cores"] >= 1
    assert counters["rss_bytes"] > 0


def test_fingerprint_is_stable_and_can_be_overridden(monkeypatch):
    monkeypatch.delenv("FLASHGAP_FINGERPRINT", raising=False)
    mine = hardware.fingerprint()
    assert mine == hardware.fingerprint()
    mine["cores"] = -1
    assert hardware.fingerprint()["cores"] > 0
    monkeypatch.setenv("FLASHGAP_FINGERPRINT", "another machine")
    assert hardware.fingerprint() == {"override": "another machine"}
    monkeypatch.setenv("FLASHGAP_FINGERPRINT", '{"cpu": "abacus"}')
    assert hardware.fingerprint() == {"cpu": "abacus"}
    monkeypatch.setenv("FLASHGAP_FINGERPRINT", "17")
    assert hardware.fingerprint() == {"override": "17"}


QUIET = {
    "busy_percent": 1.0,
    "steal_percent": 0.0,
    "usable_cores": 4,
    "free_memory_gib": 20.0,
    "swap_used_gib": 0.0,
}


def test_a_good_machine_draws_no_warning():
    assert hardware.warnings_in_plain_words(QUIET, {"cores": 4, "virtual": False}) == []
    assert hardware.warnings_in_plain_words({}, {"override": "unknown"}) == []


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"busy_percent": 40.0}, "close them"),
        ({"steal_percent": 5.0}, "the host gives 5.0 %"),
        ({"governor": "powersave"}, "'performance'"),
        ({"usable_cores": 2}, "only 2 of 4 cores"),
        ({"cpu_quota_cores": 1.5}, "throttled"),
        ({"swap_used_gib": 2.0}, "swapped out"),
        ({"free_memory_gib": 1.0}, "only 1.0 GiB"),
        ({"temperature_c": 95.0}, "95.0 degrees"),
    ],
)
def test_each_trouble_is_named_alone(state, words):
    (found,) = hardware.warnings_in_plain_words(QUIET | state, {"cores": 4})
    assert words in found


def test_ceilings_that_differ_by_size_or_shake_are_named():
    rows = ceilings_of({1024: 100e9, 1048576: 30e9}).to_dict("records")
    (found,) = hardware.warnings_in_plain_words(QUIET, {"cores": 4}, rows)
    assert "1 MiB are read at 100 GB/s but 1024 MiB at 30 GB/s" in found
    shaky = ceilings_of({1024: 100e9}).to_dict("records")
    shaky[0]["value"] = 50e9
    (found,) = hardware.warnings_in_plain_words(QUIET, {"cores": 4}, shaky)
    assert "varies by over 25 %" in found
