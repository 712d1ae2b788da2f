"""What machine is this, how fast can it possibly be, and what does memory look like now.

The one idea: a time means little without its bound, and the bound depends on *how much* is read. With a
last-level cache of hundreds of MiB, 4-bit weights and 16-bit weights of one model are read at different
speeds, so bytes/s are measured for each working-set size. Every repeat is one observation; nothing is
averaged here. Everything but the ceilings and the GPU counters works without torch.

Ceiling observations: `value` is bytes/s or FLOP/s, `iteration` the repeat, and the column `context_tokens`
holds the working set in KiB (bytes would not fit the 32 bits it is stored in; -1 for matmul, where `batch`
is the matrix side). `with_working_set` and `ceiling_at` know that, so that readers need not.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import pandas as pd

    from flashgap.treatment import CeilingsWorkload

KIB, GIB = 1024, 1024**3
WORKING_SET_COLUMN = "context_tokens"  # of an observation, in KiB
OBSERVATION_S = 0.02  # a shorter call is repeated until one observation lasts this long
WARMUP_S = 0.05
SLOW_GOVERNORS = ("powersave", "ondemand", "conservative")
STATUS_FIELDS = {"VmRSS": "rss_bytes", "VmHWM": "peak_rss_bytes", "VmData": "data_bytes"}


class HardwareError(RuntimeError):
    """A measurement of the machine that cannot be made or read; the message says what to do."""


# --- memory ---------------------------------------------------------------------------------------------


def memory_counters(device: str = "cpu") -> dict[str, int]:
    """Every memory counter of this process there is, in bytes, by name; milliseconds (about 5 for a resident GiB).

    `rss` counts shared pages in full, `pss` in part, `uss` not at all; `peak_rss` is the kernel's high
    water mark; `data` is private memory asked for, touched or not. On a GPU: what torch handed out
    (`allocated`), what it holds (`reserved`), and what the driver says is used on the *whole* device.
    A counter that the system does not have is left out.
    """
    status, rollup = _kib_fields("/proc/self/status"), _kib_fields("/proc/self/smaps_rollup")
    counters = {name: status[field] for field, name in STATUS_FIELDS.items() if field in status}
    if "Pss" in rollup:
        counters["pss_bytes"] = rollup["Pss"]
    if "Private_Dirty" in rollup:
        private = ("Private_Clean", "Private_Dirty", "Private_Hugetlb")
        counters["uss_bytes"] = sum(rollup.get(field, 0) for field in private)
    return counters | (_cuda_counters(device) if device.startswith("cuda") else {})


def reset_peak(device: str = "cpu") -> bool:
    """Start the high water marks anew; False where the kernel does not allow it (then `peak_rss` is
    since the process started)."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: reset VmHWM, see proc(5)
    except OSError:
        return False
    return True


def _kib_fields(path: str) -> dict[str, int]:
    """`Name:  123 kB` lines as bytes; empty where the file is not."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {words[0].rstrip(":"): int(words[1]) * KIB for words in fields if len(words) == 3}


def _cuda_counters(device: str) -> dict[str, int]:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return {
        "cuda_allocated_bytes": torch.cuda.memory_allocated(device),
        "cuda_reserved_bytes": torch.cuda.memory_reserved(device),
        "cuda_peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "cuda_driver_used_bytes": total - free,
    }


# --- ceilings -------------------------------------------------------------------------------------------


def measure_ceilings(
    w: CeilingsWorkload, device: str = "cpu", threads: int | None = None
) -> list[dict[str, Any]]:
    """Observation rows of what this machine can do, using all `threads` (None: as torch is set).

    By working set: `copy_bytes_per_s` (half the set to the other half, read + written bytes, as STREAM
    counts), `gemv_bytes_per_s` (one bf16 row through `F.linear`, rotating over weights that fill the set),
    and `read_<op>_bytes_per_s` for several reductions. `read_bytes_per_s` repeats the rows of the op with
    the highest median: each op reads every byte once, so the fastest is nearest to the bound. On the
    server this was written on, the two sums and the dot product agree within 15 % outside the inner caches
    and are 3-4 times quicker inside: memory, not arithmetic, limits them (a norm is half as fast, so out).
    `matmul_<dtype>_flops_per_s`: square matrices, 2 n^3.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    clock = partial(_cuda_elapsed_s, torch) if device.startswith("cuda") else _elapsed_s
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for size in w.working_sets_bytes:
            rows += _bandwidth_rows(torch, size, device, w.repeats, clock)
        for dtype in w.dtypes:
            rows += _matmul_rows(torch, dtype, w.matmul_size, device, w.repeats, clock)
    return rows


Call = Callable[[], object]
Clock = Callable[[Call, int], float]


def _bandwidth_rows(torch: Any, size: int, device: str, repeats: int, clock: Clock) -> list[dict[str, Any]]:
    """All rows for one working set; the operations take turns on one buffer, so that drift hits all."""
    buffer = torch.ones(
        max(size // 16, 1) * 4, dtype=torch.float32, device=device
    )  # touched: no page faults later
    calls = _read_calls(torch, buffer) | {
        "copy": _copy_call(buffer),
        "gemv": _gemv_call(torch, buffer, device),
    }
    rates = _observe(calls, repeats, clock)
    reads = {name: values for name, values in rates.items() if name.startswith("read_")}
    rates["read"] = reads[max(reads, key=lambda name: median(reads[name]))]
    return [
        _row(f"{name}_bytes_per_s", value, iteration, working_set_kib=size // KIB)
        for name, values in rates.items()
        for iteration, value in enumerate(values)
    ]


def _read_calls(torch: Any, buffer: Any) -> dict[str, tuple[Call, float]]:
    """Reductions that read each byte of `buffer` once and write next to nothing, with bytes read."""
    amount, integers = buffer.nbytes, buffer.view(torch.int64)
    calls: dict[str, tuple[Call, float]] = {
        "read_sum_float32": (buffer.sum, amount),
        "read_sum_int64": (integers.sum, amount),
    }
    if buffer.numel() < 2**31:  # BLAS counts in 32 bits
        calls["read_dot_float32"] = (lambda: torch.dot(buffer, buffer), amount)
    return calls


def _copy_call(buffer: Any) -> tuple[Call, float]:
    half = buffer.numel() // 2
    source, target = buffer[:half], buffer[half : 2 * half]
    return lambda: target.copy_(source), source.nbytes + target.nbytes


def _gemv_call(torch: Any, buffer: Any, device: str) -> tuple[Call, float]:
    """Decode's own pattern: weights [N, K] one after the other, [1, K] x [K, N], until the set is read.

    Matrices are as large as a layer's, so that a call costs little beside its bytes; a set that is too
    small for two of them is cut into two smaller ones.
    """
    weights = buffer.view(torch.bfloat16)
    features, rows = (4096, 16384) if device.startswith("cuda") else (2048, 2048)
    features = min(features, 1 << ((weights.numel() // 2).bit_length() - 1) // 2)
    rows = max(1, min(rows, weights.numel() // 2 // features))
    count = weights.numel() // (rows * features)
    matrices = weights[: count * rows * features].view(count, rows, features).unbind(0)
    x = torch.ones(1, features, dtype=torch.bfloat16, device=device)

    def read_all() -> None:
        for matrix in matrices:
            torch.nn.functional.linear(x, matrix)

    return read_all, count * rows * features * 2


def _matmul_rows(
    torch: Any, dtype: str, n: int, device: str, repeats: int, clock: Clock
) -> list[dict[str, Any]]:
    a, b = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    name = f"matmul_{dtype}"
    rates = _observe({name: (lambda: torch.mm(a, b, out=out), 2.0 * n**3)}, repeats, clock)
    return [_row(f"{name}_flops_per_s", value, i, batch=n) for i, value in enumerate(rates[name])]


def _row(
    metric: str, value: float, iteration: int, working_set_kib: int = -1, batch: int = -1
) -> dict[str, Any]:
    place = {
        "batch": batch,
        WORKING_SET_COLUMN: working_set_kib,
        "request": -1,
        "iteration": iteration,
        "replica": -1,
    }
    return {"metric": metric, "value": value, **place}


def _observe(calls: dict[str, tuple[Call, float]], repeats: int, clock: Clock) -> dict[str, list[float]]:
    """Amount per second of each call, `repeats` times, the calls taking turns; warm-up is discarded."""
    times = {name: _times_per_observation(call, clock) for name, (call, _) in calls.items()}
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, (call, amount) in calls.items():
            rates[name].append(amount * times[name] / clock(call, times[name]))
    return rates


def _times_per_observation(call: Call, clock: Clock) -> int:
    """Warm `call` up for a while, and how often it must run to last `OBSERVATION_S`."""
    once_s = spent_s = clock(call, 1)
    while spent_s < WARMUP_S:
        once_s = min(once_s, last_s := clock(call, 1))
        spent_s += max(last_s, 1e-4)  # a clock too coarse for the call must not loop for ever
    return max(1, round(OBSERVATION_S / max(once_s, 1e-7)))


def _elapsed_s(call: Call, times: int) -> float:
    start_s = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start_s


def _cuda_elapsed_s(torch: Any, call: Call, times: int) -> float:
    """Device time between two events, the queue empty before the first."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def with_working_set(frame: pd.DataFrame) -> pd.DataFrame:
    """Ceiling observations with a column `working_set_bytes` (missing for matmul)."""
    kib = frame[WORKING_SET_COLUMN].where(frame[WORKING_SET_COLUMN] >= 0)
    return frame.assign(working_set_bytes=kib.astype("float64") * KIB)


def ceiling_at(frame: pd.DataFrame, metric: str, working_set_bytes: float | None = None) -> float:
    """The median ceiling for `metric`, at a working set between those measured (straight in log-log).

    Outside the measured range the nearest end is taken. Raises `HardwareError` if `metric` is not there.
    """
    import numpy as np

    rows = with_working_set(frame[frame["metric"] == metric])
    if rows.empty:
        raise HardwareError(
            f"no ceiling '{metric}' among {sorted(set(frame['metric']))}; measure 'ceilings' first"
        )
    if working_set_bytes is None:
        return float(rows["value"].median())
    medians = rows.groupby("working_set_bytes")["value"].median().sort_index()
    sizes = np.log(medians.index.to_numpy(dtype=float))
    return float(np.exp(np.interp(np.log(working_set_bytes), sizes, np.log(medians.to_numpy(dtype=float)))))


# --- identity and state ---------------------------------------------------------------------------------


def fingerprint() -> dict[str, Any]:
    """What decides speed and does not change by itself: processor, cores, memory, last-level cache, GPUs.

    `FLASHGAP_FINGERPRINT` overrides it, as a JSON object or as any text (to `{"override": text}`).
    """
    override = os.environ.get("FLASHGAP_FINGERPRINT")
    if not override:
        return dict(_fingerprint())
    try:
        data = json.loads(override)
    except ValueError:
        data = override
    return data if isinstance(data, dict) else {"override": override}


@lru_cache(maxsize=1)
def _fingerprint() -> dict[str, Any]:
    cpu = _cpuinfo()
    flags = cpu.get("flags", cpu.get("Features", ""))
    return {
        "cpu": cpu.get("model name", cpu.get("CPU part", "unknown")),
        "cpu_id": "/".join(cpu.get(key, "?") for key in ("cpu family", "model", "stepping")),
        "flags_digest": hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:12],
        "virtual": "hypervisor" in flags.split(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / GIB),
        "l3_mib": _l3_mib(),
        "gpus": _nvidia("name,memory.total,driver_version"),
    }


def machine_state(sample_s: float = 0.1) -> dict[str, Any]:
    """What changes from minute to minute and can spoil a timing; None where it cannot be read.

    Sleeps `sample_s` to see how busy the processor is with other work (`busy_percent`) and how much of it
    the hypervisor gives to others (`steal_percent`).
    """
    cpu = psutil.cpu_times_percent(interval=sample_s)
    steal = getattr(cpu, "steal", 0.0)
    idle = cpu.idle + getattr(cpu, "iowait", 0.0)
    return {
        "load_1m": round(os.getloadavg()[0], 2),
        "busy_percent": round(max(0.0, 100 - idle - steal), 1),
        "steal_percent": round(steal, 1),
        "usable_cores": len(os.sched_getaffinity(0)),
        "cpu_quota_cores": _quota_cores(),
        "threads_env": os.environ.get("OMP_NUM_THREADS"),
        "governor": _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "temperature_c": _temperature_c(),
        "free_memory_gib": round(psutil.virtual_memory().available / GIB, 1),
        "swap_used_gib": round(psutil.swap_memory().used / GIB, 1),
        "gpus": _nvidia("utilization.gpu,memory.used,temperature.gpu,clocks.sm"),
    }


def warnings_in_plain_words(
    state: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    ceilings: Iterable[Mapping[str, Any]] | None = None,
) -> list[str]:
    """What may spoil measurements on this machine and what to do about it; empty if nothing is seen.

    `ceilings`: observation rows (`frame.to_dict("records")`). Unknown entries are passed over.
    """
    cores, usable = fingerprint.get("cores"), state.get("usable_cores")
    quota, free = state.get("cpu_quota_cores"), state.get("free_memory_gib")
    busy, steal, swapped = (state.get(key) or 0 for key in ("busy_percent", "steal_percent", "swap_used_gib"))
    hot, governor = state.get("temperature_c") or 0, state.get("governor")
    checks = {
        f"other programs use {busy} % of the processor: close them": busy > 10,
        f"the host gives {steal} % of the processor to others: trust only paired ratios": steal > 1,
        f"frequency governor is '{governor}': set it to 'performance' if you may": governor in SLOW_GOVERNORS,
        f"only {usable} of {cores} cores may be used here: times are of those": cores
        and usable
        and usable < cores,
        f"a quota allows the time of {quota} cores: long runs are throttled": quota
        and usable
        and quota < usable,
        f"{swapped} GiB are swapped out: free some memory first": swapped > 0.5,
        f"only {free} GiB of memory are free: trials may fail for want of it": free is not None and free < 4,
        f"the processor is at {hot} degrees C: it may slow down by itself": hot > 85,
        "a virtual machine: neighbours change its speed, trust paired ratios before times": fingerprint.get(
            "virtual"
        ),
    }
    found = [text for text, wrong in checks.items() if wrong]
    return found + (_ceiling_warnings(ceilings) if ceilings is not None else [])


def _ceiling_warnings(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    by_size: dict[int, list[float]] = {}
    for row in rows:
        if row["metric"] == "read_bytes_per_s":
            by_size.setdefault(int(row[WORKING_SET_COLUMN]), []).append(float(row["value"]))
    if not by_size:
        return []
    medians = {kib: median(values) for kib, values in sorted(by_size.items())}
    found = []
    shaky = [kib for kib, values in by_size.items() if max(values) - min(values) > 0.25 * median(values)]
    if shaky:
        sizes = ", ".join(f"{kib / KIB:g}" for kib in sorted(shaky))
        found.append(f"read speed varies by over 25 % between repeats at {sizes} MiB: bounds there are rough")
    fast, slow = max(medians, key=medians.__getitem__), min(medians, key=medians.__getitem__)
    if medians[fast] > 1.3 * medians[slow]:
        found.append(
            f"{fast / KIB:g} MiB are read at {medians[fast] / 1e9:.3g} GB/s but {slow / KIB:g} MiB at "
            f"{medians[slow] / 1e9:.3g} GB/s: builds of different size have different bounds"
        )
    return found


def _cpuinfo() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo."""
    first = (_text("/proc/cpuinfo") or "").split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _l3_mib() -> int | None:
    """Size of one level-3 cache; several sockets or clusters have one each."""
    size = _text("/sys/devices/system/cpu/cpu0/cache/index3/size")  # such as 32768K
    return int(size[:-1]) // KIB if size and size.endswith("K") else None


def _quota_cores() -> float | None:
    """Processor time a container may use, in cores (cgroup v2); None for no limit."""
    words = (_text("/sys/fs/cgroup/cpu.max") or "max").split()
    return round(int(words[0]) / int(words[1]), 2) if len(words) == 2 and words[0] != "max" else None


def _temperature_c() -> float | None:
    """The hottest sensor of the processor, if any can be read."""
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError):
        return None
    chips = [sensors[name] for name in ("coretemp", "k10temp", "cpu_thermal") if name in sensors]
    return max((sensor.current for chip in chips for sensor in chip), default=None)


def _nvidia(query: str) -> list[str]:
    """One text a GPU from `nvidia-smi`, empty without one."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
