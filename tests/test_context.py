"""Context: what makes a stored measurement stale, and what must not."""

import json
from pathlib import Path

import pytest

from flashgap import context
from flashgap.treatment import Checkpoint, ModelSpec

SOURCE = '''
"""Module text."""
import os

def step(x):
    """Function text."""
    # why
    return x + 1

class Engine:
    """Class text."""
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("# why", "# another why", True),
        ("Module text", "Other text", True),
        ("Function text", "Other text", True),
        ("Class text", "Other text", True),
        ("x + 1", "(x  +  1)", True),
        ("x + 1", "x + 2", False),
        ("import os", "import sys", False),
        ("def step(x)", "def step(x, y=0)", False),
    ],
)
def test_only_code_changes_the_digest_of_a_module(old, new, same):
    assert (context.source_digest(SOURCE) == context.source_digest(SOURCE.replace(old, new))) is same


def test_source_that_does_not_parse_has_a_digest_all_the_same():
    assert context.source_digest("def (") != context.source_digest("def [")


def test_digests_of_modules_are_found_by_name_and_a_lost_one_is_missing():
    digests = context.module_digests(["flashgap.child", "flashgap.no_such_module"])
    assert len(digests["flashgap.child"]) == 16
    assert digests["flashgap.no_such_module"] == "missing"


def test_measured_modules_leave_out_what_only_organises():
    assert "flashgap.hardware" in context.measured_modules()
    assert not {"flashgap.context", "flashgap.runner", "flashgap.records"} & set(context.measured_modules())


def test_reachable_modules_of_the_worker_hold_the_engine_and_not_the_runner():
    reachable = context.reachable_modules("flashgap.worker")
    assert {"flashgap.worker", "flashgap.engine", "flashgap.builds.quantization"} <= set(reachable)
    assert "flashgap.runner" not in reachable


def test_the_same_context_survives_a_round_trip_through_json():
    now = context.current_context()
    stored = json.loads(json.dumps({**now, "modules": context.module_digests(["flashgap.child"])}))
    assert context.same_context(stored, now) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fingerprint": {"cpu_model": "an older processor"}}, "an older processor"),
        ({"versions": {"torch": "1.0"}}, "torch: 1.0"),
        ({"environment": {"OMP_NUM_THREADS": "64"}}, "OMP_NUM_THREADS"),
        ({"usable_cores": 1024}, "usable_cores"),
        ({"modules": {"flashgap.child": "0"}}, "flashgap.child was edited"),
    ],
)
def test_each_part_of_the_context_is_compared_and_named(change, word):
    now = context.current_context()
    assert word in "; ".join(context.same_context({**now, **change}, now))


def test_a_patch_release_of_python_or_another_pandas_does_not_matter():
    now = context.current_context()
    versions = {**now["versions"], "pandas": "0.1"}
    major, minor, *_ = versions["python"].split(".")
    assert context.same_context({**now, "versions": {**versions, "python": f"{major}.{minor}.99"}}, now) == []


def test_changed_files_of_a_local_model_are_noticed(tmp_path):
    model = ModelSpec(source="folder", id=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"1")
    before = context.model_files_digest(model)
    (tmp_path / "model.safetensors").write_bytes(b"22")
    assert before != context.model_files_digest(model)
    assert context.model_files_digest(ModelSpec(source="embedded")) is None


def test_environment_keeps_no_folder(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/somewhere/private/libjemalloc.so.2")
    assert context.environment()["LD_PRELOAD"] == "libjemalloc.so.2"


def test_scrub_takes_this_machines_folders_out():
    text = f"{context.project_root()}/src/x.py and {Path.home()}/y"
    assert str(context.project_root()) not in context.scrub(text)


def test_a_model_folder_is_known_by_content_from_every_working_directory(tmp_path, monkeypatch):
    """If this fails, a touch measures everything again, or new weights under an old name go unnoticed."""
    (tmp_path / "models" / "mine").mkdir(parents=True)
    config, weights = (tmp_path / "models" / "mine" / n for n in ("config.json", "model.safetensors"))
    config.write_text('{"model_type": "llama"}')
    weights.write_bytes(b"one")
    monkeypatch.setenv("FLASHGAP_ROOT", str(tmp_path))
    monkeypatch.setenv("FLASHGAP_CACHE", str(tmp_path / "cache"))
    model = ModelSpec(source="folder", id="models/mine")
    first = context.model_files_digest(model)
    monkeypatch.chdir(tmp_path / "models")
    weights.touch()
    assert first is not None
    assert context.model_files_digest(model) == first
    weights.write_bytes(b"two")
    assert context.model_files_digest(model) != first


def test_changed_files_of_a_compressed_checkpoint_are_noticed(tmp_path):
    """If this fails, records of the old 4-bit files pass for those of the new ones."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"1")
    theirs = Checkpoint(id=str(tmp_path))
    embedded = ModelSpec(source="embedded")
    assert context.files_digest(embedded, []) is None
    before = context.files_digest(embedded, [theirs])
    (tmp_path / "model.safetensors").write_bytes(b"2")
    assert context.files_digest(embedded, [theirs]) != before


def test_a_changed_gguf_file_is_seen(tmp_path, monkeypatch):
    """If this fails, records of one checkpoint are given out for another one of the same name."""
    monkeypatch.setenv("FLASHGAP_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    folder.mkdir()
    path = folder / "model.gguf"
    seen = []
    for content in (b"one", b"other", b"one"):
        path.write_bytes(content)
        by_folder, by_file = context.local_digest(str(folder)), context.local_digest(str(path))
        assert by_folder == by_file is not None
        seen.append(by_file)
    assert seen[0] == seen[2] != seen[1]
    assert context.local_digest(str(folder / "absent.gguf")) is None
