"""The runner against everything that can go wrong with a trial, a machine and a user."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from flashgap import context, lock, processes, records, runner, survey
from flashgap.records import RecordError, Store
from flashgap.study import Study, parse

HERE = Path(__file__).parent
LIMIT_BYTES = 1 << 30


def make_study(treatments="ab", start="fork", replicas=1, opt_in=False, limit=LIMIT_BYTES, **sampling):
    workload = {
        "kind": "latency",
        "process": start,
        "batch_sizes": [1],
        "prompt_tokens": 4,
        "generated_tokens": 2,
    }
    if replicas > 1:
        workload = {"kind": "task", "process": start, "requests": 2, "max_context_tokens": 8, "max_batch": 1}
        workload |= {"draw_seed": 1, "replicas": replicas}
    sampling = {"min_blocks": 1, "max_blocks": 1, "trial_timeout_s": 20.0} | sampling
    return parse(
        {
            "profile": "fake",
            "description": "a study without a model",
            "seed": 7,
            "model": {"source": "random", "config": {"model_type": "llama"}},
            "hardware": {"memory_limit_bytes": limit},
            "builds": {"standard": {}},
            "treatments": {
                name: {"build": "standard", "replica": ord(name) - ord("a")} for name in treatments
            },
            "experiments": {
                "noise": {
                    "treatments": list(treatments),
                    "primary_metric": "task_s" if workload["kind"] == "task" else "itl_s",
                    "workload": workload,
                    "sampling": sampling,
                    "opt_in": opt_in,
                }
            },
        },
        Path("fake.yaml"),
    )


@pytest.fixture(autouse=True)
def lab(tmp_path, monkeypatch):
    """Own results, own lock, the fake worker, no heavy imports, a machine that does not change."""
    for name in ("FLASHGAP_REPLAY", "LONG", "REMEASURE", "FLASHGAP_SINCE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "FLASHGAP_RESULTS": tmp_path / "local",
        "FLASHGAP_ROOT": tmp_path,
        "FLASHGAP_LOCK": tmp_path / "lock",
        "FLASHGAP_PROGRESS": tmp_path / "progress",
        "FLASHGAP_FINGERPRINT": "a test machine",
        "FLASHGAP_WORKER": "fake_worker",
        "FAKE_RUNS": tmp_path / "runs",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(processes, "PRELOAD", ())
    monkeypatch.setattr(processes, "_model_type", lambda model: None)
    return tmp_path


def faults(monkeypatch, **by_treatment):
    monkeypatch.setenv(
        "FAKE_FAULTS", json.dumps({str(ord(k) - ord("a")): v for k, v in by_treatment.items()})
    )


def runs(lab, what="trial"):
    path = lab / "runs"
    return (
        [line.split() for line in path.read_text().splitlines() if line.startswith(what)]
        if path.exists()
        else []
    )


def only_block(result):
    [block] = result.blocks
    return block


def gone(pid):
    deadline = time.time() + 5
    while time.time() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


# ---------------------------------------------------------------------- the ordinary course


def test_measures_once_and_then_only_reads(lab):
    study = make_study("ab", min_blocks=2, max_blocks=2)
    first = runner.measure(study, "noise")
    assert [block.complete for block in first.blocks] == [True, True]
    assert len(runs(lab)) == 4
    files = {path: path.stat().st_mtime_ns for path in (lab / "local").rglob("*")}
    again = runner.measure(study, "noise")
    assert len(runs(lab)) == 4
    assert {path: path.stat().st_mtime_ns for path in (lab / "local").rglob("*")} == files
    assert again.frame().equals(first.frame())
    assert len(again.pairs("b", "a", "itl_s", batch=1)) == 2
    assert again.stop_reason
    assert again.source == "local"


def test_each_trial_is_its_own_process_and_none_is_left(lab):
    runner.measure(make_study("abc"), "noise")
    pids = [int(run[2]) for run in runs(lab)]
    assert len(set(pids)) == 3
    assert os.getpid() not in pids
    assert all(gone(pid) for pid in pids)


def test_exec_trials_do_not_run_the_callers_script_again(lab, tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(HERE)!r})
        open({str(tmp_path / "imported")!r}, "a").write("x")
        import test_runner
        from flashgap import runner
        test_runner.processes.PRELOAD = ()
        print(runner.measure(test_runner.make_study("a", start="exec"), "noise").failures)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Empty DataFrame" in done.stdout
    assert (tmp_path / "imported").read_text() == "x"


def test_order_is_random_but_repeatable_and_balanced():
    orders = [tuple(survey.block_order(1, "noise", index, "ab")) for index in range(200)]
    assert orders == [tuple(survey.block_order(1, "noise", index, "ab")) for index in range(200)]
    assert 70 < sum(order[0] == "a" for order in orders) < 130


def test_a_record_says_where_it_comes_from_without_paths_of_this_machine(lab):
    block = only_block(runner.measure(make_study("a"), "noise"))
    stored = block.header.provenance
    assert {
        "commit",
        "dirty",
        "params_digest",
        "versions",
        "fingerprint",
        "machine_state",
        "started_utc",
    } <= set(stored)
    assert stored["clock_s"] > 0
    text = block.files()[0].read_text()
    assert str(lab) not in text
    assert str(Path.home()) not in text.replace("~", "") or str(Path.home()) == "/"


def test_overhead_is_what_is_neither_load_nor_check_nor_measurement(lab):
    record = only_block(runner.measure(make_study("a"), "noise")).trials["a"]
    # the fake worker claims 0.03 s of load and measurement, which a quick machine may not even spend
    assert record.timings_s["overhead"] == pytest.approx(max(0.0, record.timings_s["total"] - 0.03))
    assert record.timings_s["child"] == 0.04


def test_batch_progress_is_one_line_a_trial(lab):
    runner.measure(make_study("ab"), "noise")
    lines = [line for line in (lab / "progress").read_text().splitlines() if line.startswith("[")]
    assert [line[:6] for line in lines] == ["[1/2] ", "[2/2] "]
    assert "noise block 1" in lines[0]


# ---------------------------------------------------------------------- failures are data


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("kill", "killed", "SIGKILL"),
        ("memory", "out_of_memory", "MemoryError"),
        ("memory_in_c", "out_of_memory", "bad_alloc"),
        ("memory_error", "out_of_memory", "MemoryError"),
        ("nan", "nan", "itl_s"),
        ("raise", "failed", "ValueError: the"),
        ("exit", "failed", "exit code 3"),
        ("garbage", "failed", "not an outcome"),
        ("unreadable", "failed", "unreadable"),
        ("bad_status", "failed", "great"),
        ("bad_columns", "failed", "observations"),
    ],
)
def test_a_bad_trial_is_a_record_and_the_others_go_on(lab, monkeypatch, fault, status, words):
    faults(monkeypatch, a=fault)
    result = runner.measure(make_study("ab"), "noise")
    block = only_block(result)
    assert block.complete
    assert block.trials["a"].status == status
    assert words in block.trials["a"].error
    assert "\n" not in block.trials["a"].error
    assert block.trials["b"].status == "ok"
    assert result.failures[["trial", "status"]].to_numpy().tolist() == [["a", status]]
    assert set(result.frame()["trial"]) == {"b"}
    assert result.pairs("b", "a", "itl_s") == []


def test_a_timeout_kills_the_trial_and_what_it_started(lab, monkeypatch):
    faults(monkeypatch, a="helper")
    block = only_block(runner.measure(make_study("ab", trial_timeout_s=1.0), "noise"))
    assert block.trials["a"].status == "timeout"
    [(_, helper)] = runs(lab, "helper")
    assert gone(int(helper))


def test_exec_trials_have_the_same_limits(lab, monkeypatch):
    faults(monkeypatch, a="memory")
    block = only_block(runner.measure(make_study("ab", start="exec"), "noise"))
    assert [block.trials[name].status for name in "ab"] == ["out_of_memory", "ok"]


def test_a_killed_trial_is_tried_again_by_the_next_call_but_running_out_of_memory_is_an_answer(
    lab, monkeypatch
):
    faults(monkeypatch, a="memory_error")
    runner.measure(make_study("ab"), "noise")
    runner.measure(make_study("ab"), "noise")
    assert len(runs(lab)) == 2
    study = make_study("ac")
    faults(monkeypatch, a="kill")
    runner.measure(study, "noise")
    faults(monkeypatch)
    result = runner.measure(study, "noise")
    assert len(runs(lab)) == 6
    assert result.failures.empty
    assert "tried again" in result.notes[0]


def test_a_treatment_that_keeps_failing_does_not_cost_its_timeout_in_every_block(lab, monkeypatch):
    faults(monkeypatch, a="exit")
    result = runner.measure(make_study("ab", min_blocks=5, max_blocks=5), "noise")
    assert [run[1] for run in runs(lab)].count("0") == runner.REPEATED_FAILURES
    assert len(result.failures) == 5
    assert result.failures["error"].iloc[-1].startswith("not run again")
    assert len(result.groups("b", "itl_s")) == 5


def test_replicas_run_together_and_the_task_ends_with_the_last(lab):
    block = only_block(runner.measure(make_study("a", replicas=2), "noise"))
    table = block.observations
    assert table.loc[table["metric"] == "task_s", ["value", "replica"]].to_numpy().tolist() == [[3.0, -1.0]]
    assert sorted(table.loc[table["metric"] == "task_replica_s", "replica"]) == [0, 1]
    assert block.trials["a"].memory["peak"]["rss_bytes"] == 101
    assert block.trials["a"].facts["replicas"] == 2


def test_a_dead_replica_ends_the_trial_at_once(lab, monkeypatch):
    faults(monkeypatch, a="kill_one_replica")
    began = time.time()
    block = only_block(runner.measure(make_study("a", replicas=2), "noise"))
    assert block.trials["a"].status == "killed"
    assert time.time() - began < 15
    assert all(gone(int(run[2])) for run in runs(lab))


def test_nothing_is_timed_for_a_build_that_could_not_be_checked(lab, monkeypatch):
    monkeypatch.setenv("FAKE_GATE", "kill")
    block = only_block(runner.measure(make_study("a"), "noise"))
    assert runs(lab) == []
    assert block.trials["a"].status == "killed"
    assert block.trials["a"].error.startswith("correctness check")


def test_the_check_runs_once_for_all_blocks(lab):
    runner.measure(make_study("a", min_blocks=3, max_blocks=3), "noise")
    assert len(runs(lab, "gate")) == 1


def test_a_dead_fork_server_is_replaced(lab):
    runner.measure(make_study("a"), "noise")
    server = processes.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGKILL)
    time.sleep(0.1)
    assert runner.measure(make_study("ab"), "noise").failures.empty


def test_a_changed_thread_count_reaches_forked_trials(lab, monkeypatch):
    runner.measure(make_study("a"), "noise")
    server = processes.forkserver._forkserver._forkserver_pid
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    result = runner.measure(make_study("a"), "noise")
    assert processes.forkserver._forkserver._forkserver_pid != server
    assert "OMP_NUM_THREADS" in result.notes[0]


# ---------------------------------------------------------------------- interrupted and taken up again


def test_an_interrupt_keeps_finished_trials_and_the_rest_is_measured_later(lab, monkeypatch):
    study = make_study("abcd")
    last = survey.block_order(7, "noise", 0, "abcd")[-1]
    faults(monkeypatch, **{last: "sleep"})
    threading.Thread(target=interrupt_when, args=(lab, 4), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        runner.measure(study, "noise")
    assert all(gone(int(run[2])) for run in runs(lab))
    [block], _ = Store.local("fake").load_blocks("noise")
    assert not block.complete
    assert block.trials[last].status == "interrupted"
    faults(monkeypatch)
    result = runner.measure(study, "noise")
    assert only_block(result).complete
    assert len(runs(lab)) == 5


def interrupt_when(lab, count):
    while len(runs(lab)) < count:
        time.sleep(0.02)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_kill_9_of_the_study_leaves_no_orphan_and_loses_no_finished_trial(lab, monkeypatch, start):
    last = survey.block_order(7, "noise", 0, "abc")[-1]
    faults(monkeypatch, **{last: "sleep"})
    script = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import test_runner as t; t.processes.PRELOAD = ();"
    )
    script += f"t.runner.measure(t.make_study('abc', start={start!r}), 'noise')"
    parent = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.time() + 30
    while len(runs(lab)) < 3 and time.time() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert all(gone(int(run[2])) for run in runs(lab))
    faults(monkeypatch)
    result = runner.measure(make_study("abc", start=start), "noise")
    assert only_block(result).complete
    assert result.failures.empty
    assert len(runs(lab)) == 4


def test_a_half_block_from_too_long_ago_is_kept_but_not_paired(lab, monkeypatch):
    study = make_study("ab")
    block = half_block(study)
    monkeypatch.setattr(survey, "RESUMABLE_S", 0.0)
    result = runner.measure(study, "noise")
    assert only_block(result).block_id != block.block_id
    assert len(runs(lab)) == 4
    assert len(Store.local("fake").load_blocks("noise")[0]) == 2


def half_block(study):
    """Measure one block and take a trial out of it again, as if the run had died."""
    runner.measure(study, "noise")
    store = Store.local(study.profile)
    [block], _ = store.load_blocks("noise")
    kept = [r for r in block.header.trials if r.treatment == "a"]
    block.header = block.header.model_copy(update={"trials": kept, "complete": False, "series": []})
    block.frame = block.observations[block.observations["trial"] == "a"]
    store.save(block)
    return block


def test_two_runners_at_once_share_the_work_and_never_the_machine(lab):
    study = make_study("ab", min_blocks=3, max_blocks=3)
    script = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import test_runner as t; t.processes.PRELOAD = ();"
    )
    script += (
        "r = t.runner.measure(t.make_study('ab', min_blocks=3, max_blocks=3), 'noise'); print(len(r.blocks))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.communicate(timeout=60)[0].strip() for process in both] == ["3", "3"]
    assert len(runs(lab)) == 6
    ends = {(run[1], run[2]): float(run[3]) for run in runs(lab, "end")}
    spans = sorted((float(run[3]), ends[run[1], run[2]]) for run in runs(lab))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert len(runner.measure(study, "noise").blocks) == 3


def test_who_waits_is_told_who_holds_the_machine(lab):
    said = []
    with lock.machine_lock("cpu/noise", said.append):
        waiter = threading.Thread(target=take_and_release, args=(said,))
        waiter.start()
        time.sleep(0.3)
    waiter.join(5)
    assert len(said) == 1
    assert f"process {os.getpid()}, measuring cpu/noise" in said[0]


def take_and_release(said):
    with lock.machine_lock("cpu/task", said.append):
        pass


# ---------------------------------------------------------------------- what counts as measured


def test_a_new_treatment_is_measured_with_what_it_is_compared_with(lab):
    runner.measure(make_study("ab"), "noise")
    runner.measure(make_study("abc"), "noise")
    assert len(runs(lab)) == 5
    runner.measure(make_study("ab"), "noise")
    assert len(runs(lab)) == 5


def test_another_machine_or_library_or_edited_code_is_measured_again_and_said(lab, monkeypatch):
    study = make_study("a")
    runner.measure(study, "noise")
    monkeypatch.setenv("FLASHGAP_FINGERPRINT", "another machine")
    result = runner.measure(study, "noise")
    assert len(runs(lab)) == 2
    assert "another machine" in result.notes[0]
    store = Store.local("fake")
    for block in store.load_blocks("noise")[0]:
        block.header.trials[0].modules = {"flashgap.child": "0" * 16}
        store.save(block)
    assert "flashgap.child was edited" in runner.measure(study, "noise").notes[-1]
    assert len(runs(lab)) == 3


def test_remeasure_ignores_older_blocks_once(lab, monkeypatch):
    study = make_study("a")
    runner.measure(study, "noise")
    monkeypatch.setenv("REMEASURE", "1")
    monkeypatch.setenv("FLASHGAP_SINCE", context.utc_now())
    runner.measure(study, "noise")
    runner.measure(study, "noise")
    assert len(runs(lab)) == 2
    monkeypatch.setenv("FLASHGAP_SINCE", "yesterday")
    with pytest.raises(runner.RunnerError, match="FLASHGAP_SINCE"):
        runner.measure(study, "noise")


def test_fresh_measures_whatever_is_stored(lab):
    study = make_study("a")
    runner.measure(study, "noise")
    runner.fresh(study, "noise")
    assert len(runs(lab)) == 2


def test_a_corrupt_record_is_named_and_replaced_by_a_new_block(lab):
    study = make_study("a")
    block = only_block(runner.measure(study, "noise"))
    header = block.files()[0]
    header.write_text(header.read_text()[:100])
    result = runner.measure(study, "noise")
    assert header.name in result.problems[0]
    assert header.exists()
    assert len(runs(lab)) == 2


def test_identical_treatments_are_refused_by_name():
    study = make_study("ab")
    data = study.model_dump(mode="json")
    data["treatments"]["b"]["replica"] = 0
    with pytest.raises(runner.RunnerError, match=r"experiments\.noise.*'a', 'b'"):
        runner.measure(parse(data, Path("fake.yaml")), "noise")


def test_opt_in_is_measured_only_when_asked(lab, monkeypatch):
    study = make_study("a", opt_in=True)
    nothing = runner.measure(study, "noise")
    assert (nothing.blocks, nothing.source, runs(lab)) == ([], "none", [])
    assert "LONG=1" in nothing.stop_reason
    assert nothing.frame().empty
    monkeypatch.setenv("LONG", "1")
    assert len(runner.measure(study, "noise").blocks) == 1
    monkeypatch.delenv("LONG")
    assert len(runner.measure(study, "noise").blocks) == 1
    assert len(runs(lab)) == 1


def test_status_counts_without_measuring(lab):
    study = make_study("ab", min_blocks=2, max_blocks=3, target_half_width=1e-9)
    before = runner.status(study, "noise")
    assert (before.blocks_have, before.trials_missing, before.trials_missing_at_most) == (0, 4, 6)
    assert before.expected_trial_s is None
    assert runs(lab) == []
    runner.measure(study, "noise")
    after = runner.status(study, "noise")
    assert (after.trials_missing, after.trials_missing_at_most) == (0, 0)
    assert after.expected_trial_s > 0


# ---------------------------------------------------------------------- when it is enough


def test_sampling_stops_when_the_interval_is_narrow(lab):
    result = runner.measure(make_study("ab", min_blocks=2, max_blocks=9, target_half_width=0.5), "noise")
    assert len(result.blocks) == 2
    assert result.stop_reason.startswith("interval narrow enough")
    assert result.blocks[0].header.stop_reason == result.stop_reason


def test_sampling_stops_when_the_budget_is_spent(lab):
    study = make_study("ab", min_blocks=2, max_blocks=9, target_half_width=1e-9, budget_s=1e-3)
    assert runner.measure(study, "noise").stop_reason.startswith("budget spent")


def test_sampling_stops_at_max_blocks(lab):
    result = runner.measure(make_study("ab", min_blocks=2, max_blocks=3, target_half_width=1e-9), "noise")
    assert (len(result.blocks), result.stop_reason[:14]) == (3, "max_blocks (3)")


# ---------------------------------------------------------------------- a store that cannot be written


def test_a_full_disk_is_one_line_and_earlier_trials_stay(lab, monkeypatch):
    study = make_study("abc")
    writes = []

    def replace(source, target, real=os.replace):
        writes.append(target)
        if len(writes) > 3 and str(target).startswith(str(lab / "local")):  # probe, then one whole trial
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    with monkeypatch.context() as full:
        full.setattr(records.os, "replace", replace)
        with pytest.raises(RecordError, match="disk is full") as caught:
            runner.measure(study, "noise")
    assert "\n" not in str(caught.value)
    [block], problems = Store.local("fake").load_blocks("noise")
    assert (len(block.trials), problems) == (1, [])
    assert not list((lab / "local").rglob(".*.tmp"))


def test_a_read_only_folder_is_found_before_anything_is_measured(lab, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(records, "write_atomic", refuse)
    with pytest.raises(RecordError, match="read-only"):
        runner.measure(make_study("a"), "noise")
    assert runs(lab) == []


# ---------------------------------------------------------------------- replay


def publish(study):
    result = runner.measure(study, "noise")
    return Store.reference(study.profile).replace("noise", result.blocks)


def test_replay_shows_committed_records_on_another_machine_and_measures_nothing(lab, monkeypatch):
    study = make_study("ab", min_blocks=2, max_blocks=2)
    publish(study)
    count = len(runs(lab))
    monkeypatch.setenv("FLASHGAP_REPLAY", "1")
    monkeypatch.setenv("FLASHGAP_FINGERPRINT", "a reviewer's machine")
    result = runner.measure(study, "noise")
    assert (len(result.blocks), result.source, len(runs(lab))) == (2, "reference", count)
    assert result.machine == {"override": "a test machine"}
    assert any("reviewer" in note for note in result.notes)
    assert result.stop_reason


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_replay_names_a_deleted_record(lab, monkeypatch, which):
    study = make_study("a", min_blocks=2, max_blocks=2)
    victim = publish(study)[which]
    victim.unlink()
    monkeypatch.setenv("FLASHGAP_REPLAY", "1")
    with pytest.raises(runner.ReplayError, match=victim.name):
        runner.measure(study, "noise")


def test_replay_names_an_experiment_or_a_treatment_that_was_never_published(lab, monkeypatch):
    monkeypatch.setenv("FLASHGAP_REPLAY", "1")
    with pytest.raises(runner.ReplayError, match="reference/fake/noise"):
        runner.measure(make_study("a"), "noise")
    monkeypatch.delenv("FLASHGAP_REPLAY")
    publish(make_study("a"))
    monkeypatch.setenv("FLASHGAP_REPLAY", "1")
    with pytest.raises(runner.ReplayError, match="no trial of 'b'"):
        runner.measure(make_study("ab"), "noise")


@pytest.mark.parametrize(
    ("profile", "gpus", "says"), [("h200", 0, "1 NVIDIA GPU"), ("a100x8", 1, "8 NVIDIA GPU")]
)
def test_a_profile_for_gpus_is_not_measured_without_them(monkeypatch, profile, gpus, says):
    """If this fails, a laptop burns minutes on trials that can only fail, each with its own line."""
    monkeypatch.setenv("FLASHGAP_FINGERPRINT", json.dumps({"gpus": ["one"] * gpus}))
    with pytest.raises(runner.RunnerError, match=f"not measured: it wants {says}"):
        runner.measure(Study.load(profile, HERE.parent / "params"), "latency")


@pytest.mark.parametrize("experiment", ["latency", "context", "long", "reference", "task", "capacity"])
def test_a_prompt_longer_than_the_context_is_refused_before_anything_runs(experiment):
    """If this fails, minutes are spent before a trial finds out, or positions run past the model's."""
    study = Study.load("cpu", HERE.parent / "params")
    needed = survey.context_needed_tokens(study.experiment(experiment).workload)
    survey.check_context(study, experiment, needed)
    with pytest.raises(runner.RunnerError, match=rf"cpu\.yaml: experiments\.{experiment}.*has {needed - 1};"):
        survey.check_context(study, experiment, needed - 1)


@pytest.mark.parametrize("opt_in", [False, True])
def test_replay_misses_a_deleted_record_even_if_it_was_the_only_one(lab, monkeypatch, opt_in):
    """If this fails, deleting the one record of `long` makes its page say "not measured" and pass."""
    monkeypatch.setenv("LONG", "1")
    study = make_study("a", opt_in=opt_in)
    store = Store.reference(study.profile)
    header = next(path for path in publish(study) if path.suffix == ".json")
    store.write_contents({"noise": [header.stem]})
    monkeypatch.setenv("FLASHGAP_REPLAY", "1")
    assert len(runner.measure(study, "noise").blocks) == 1
    kept = header.read_text()
    header.write_text(kept.replace('"status": "ok"', '"status":  "ok"', 1))
    with pytest.raises(runner.ReplayError, match=f"{header.name} is not what was published"):
        runner.measure(study, "noise")
    header.write_text(kept)
    header.unlink()
    with pytest.raises(runner.ReplayError, match=header.name):
        runner.measure(study, "noise")
