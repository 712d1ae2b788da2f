"""A stand-in for `flashgap.worker` that ends as it is told, so that the runner can be tested without torch.

`FAKE_FAULTS` (JSON) maps a treatment's `replica` number to a fault; `FAKE_RUNS` names a file that gets a
line for every trial and check that runs; `FAKE_GATE` is what the check answers.
"""

import ctypes
import json
import os
import signal
import time
from pathlib import Path


def main(spec_json, conn, replica, replicas, barrier, log_path):
    spec = json.loads(spec_json)
    number = str(spec["treatment"]["replica"])
    note(f"trial {number} {os.getpid()} {time.time():.3f}")
    if barrier is not None:
        barrier.wait(20)
    conn.send(FAULTS[json.loads(os.environ.get("FAKE_FAULTS", "{}")).get(number, "none")](replica))
    note(f"end {number} {os.getpid()} {time.time():.3f}")


def gate(spec_json, conn, log_path):
    note("gate")
    answer = os.environ.get("FAKE_GATE", "ok")
    if answer == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    conn.send({"status": answer, "error": None if answer == "ok" else "differs", "check_s": 0.1})


def gate_verdict(spec):
    runs = Path(os.environ["FAKE_RUNS"])
    checked = runs.exists() and "gate" in runs.read_text()
    return {"status": "ok"} if checked and os.environ.get("FAKE_GATE", "ok") == "ok" else None


def note(text):
    with open(os.environ["FAKE_RUNS"], "a") as file:
        file.write(text + "\n")


def outcome(replica=0, value=1.0, **changes):
    observations = {
        "metric": ["itl_s", "itl_s", "task_s"],
        "value": [value, value * 1.01, 2.0 + replica],
        "batch": [1, 1, -1],
        "iteration": [0, 1, -1],
    }
    return {
        "status": "ok",
        "error": None,
        "observations": observations,
        "memory": {"peak": {"rss_bytes": 100 + replica}},
        "timings_s": {"load": 0.01, "measure": 0.02, "total": 0.04},
        "kernels": {"q_proj": {"expected": "mm", "ran": "mm", "layers": 2, "weight_bytes": 8}},
    } | changes


def sleep(replica):
    time.sleep(float(os.environ.get("FAKE_SLEEP", "60")))
    return outcome()


def kill(replica):
    print("about to be killed")
    os.kill(os.getpid(), signal.SIGKILL)


def kill_one_replica(replica):
    if replica == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return outcome()


def take_memory(replica):
    held = []
    while len(held) < 64:
        held.append(bytearray(64 << 20))
    return outcome()


def take_memory_in_c(replica):
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    if not libc.malloc(4 << 30):
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
        os.abort()
    return outcome()


def raise_error(replica):
    raise ValueError("the\nworker is broken")


def spawn_helper(replica):
    import subprocess

    helper = subprocess.Popen(["sleep", "300"])
    note(f"helper {helper.pid}")
    time.sleep(60)


class Unreadable:
    def __reduce__(self):
        return (int, ("not a number",))


FAULTS = {
    "none": lambda replica: outcome(replica),
    "sleep": sleep,
    "kill": kill,
    "kill_one_replica": kill_one_replica,
    "memory": take_memory,
    "memory_in_c": take_memory_in_c,
    "memory_error": lambda replica: (_ for _ in ()).throw(MemoryError()),
    "nan": lambda replica: outcome(value=float("nan")),
    "raise": raise_error,
    "exit": lambda replica: os._exit(3),
    "garbage": lambda replica: ["not", "an", "outcome"],
    "unreadable": lambda replica: {"status": "ok", "error": Unreadable()},
    "bad_status": lambda replica: outcome(status="great"),
    "bad_columns": lambda replica: outcome(observations={"metric": ["x"], "value": [1.0, 2.0]}),
    "helper": spawn_helper,
}
