"""Records: what is written is read back, what is broken is named, nothing is lost."""

import errno
import json
import math

import numpy as np
import pytest

from flashgap import records, stats
from flashgap.records import Block, Header, RecordError, Store, TrialRecord, typed_frame
from flashgap.results import Result

KEYS = {"standard": "k1", "flash": "k2"}


def record(name="standard", status="ok", **changes):
    return TrialRecord(key=KEYS.get(name, name), treatment=name, spec={}, status=status, **changes)


def rows(value=1.0, batch=1):
    return typed_frame(
        {"metric": ["itl_s"] * 3, "value": [value, value + 0.1, value + 0.2], "batch": [batch] * 3}
    )


def new_block(store, block_id="b1"):
    header = Header(
        experiment="noise",
        block_id=block_id,
        keys=KEYS,
        order=list(KEYS),
        started_utc="2026-12-01T00:00:00+00:00",
        updated_utc="2026-12-01T00:00:00+00:00",
        provenance={"fingerprint": {"cpu_model": "X"}, "versions": {"torch": "2"}},
    )
    return Block(header, store.folder("noise"))


def full_block(store, block_id="b1", flash="ok"):
    block = new_block(store, block_id)
    block.add(record("standard", memory={"peak": {"rss_bytes": 7}}, timings_s={"total": 2.0}), rows(1.0), "t")
    block.add(record("flash", flash), rows(3.0), "t")
    store.save(block)
    return block


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "local" / "fake", "local")


def test_a_block_comes_back_as_it_was_written(store):
    written = full_block(store)
    [read], problems = store.load_blocks("noise")
    assert problems == []
    assert read.header == written.header
    assert read.observations.equals(written.observations)
    assert read.complete
    assert {str(kind) for kind in read.observations.dtypes[list(records.INTEGER_COLUMNS)]} == {"int32"}


def test_a_block_is_complete_only_with_every_treatment_and_interrupted_does_not_count(store):
    block = new_block(store)
    block.add(record("standard"), rows(), "t")
    assert not block.complete
    block.add(record("flash", "interrupted"), records.empty_frame(), "t")
    assert not block.complete
    block.add(record("flash"), rows(), "t")
    assert block.complete
    assert len(block.trials) == 2


def test_only_the_newest_column_file_stays(store):
    block = new_block(store)
    for name in KEYS:
        block.add(record(name), rows(), "t")
        store.save(block)
    assert len(list(store.folder("noise").glob("*.parquet"))) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[:50], "not readable as JSON"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "schema_version is 99"),
        (lambda text: text.replace('"complete": true', '"complete": "perhaps"'), "complete"),
        (lambda text: text.replace('"experiment"', '"experimint"'), "experiment"),
        (lambda text: text.replace('"block_id": "b1"', '"block_id": "b7"'), "b7"),
        (lambda text: "[]", "schema_version"),
    ],
)
def test_a_broken_header_is_named_skipped_and_left_alone(store, damage, words):
    full_block(store, "b1")
    full_block(store, "b2")
    path = store.folder("noise") / "b1.json"
    path.write_text(damage(path.read_text()))
    broken = path.read_bytes()
    blocks, [problem] = store.load_blocks("noise")
    assert [block.block_id for block in blocks] == ["b2"]
    assert "b1.json" in problem
    assert words in problem
    assert "\n" not in problem
    assert path.read_bytes() == broken


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"PAR1")])
def test_broken_observations_are_named_and_their_block_skipped(store, damage):
    block = full_block(store)
    damage(block.files()[1])
    blocks, [problem] = store.load_blocks("noise")
    assert blocks == []
    assert block.files()[1].name in problem


@pytest.mark.parametrize("failing", ["open", "fsync", "replace"])
def test_a_disk_that_fills_up_leaves_the_earlier_trial_whole(store, monkeypatch, failing):
    block = new_block(store)
    block.add(record("standard"), rows(), "t")
    store.save(block)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    block.add(record("flash"), rows(), "t")
    with monkeypatch.context() as patch:
        patch.setattr(*(("builtins.open", full) if failing == "open" else (records.os, failing, full)))
        with pytest.raises(RecordError, match=r"disk is full.*run again"):
            store.save(block)
    [read], problems = store.load_blocks("noise")
    assert (list(read.trials), problems) == (["standard"], [])
    store.save(block)
    [read], _ = store.load_blocks("noise")
    assert list(read.trials) == ["standard", "flash"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RecordError, match="cannot write records to") as caught:
        Store(tmp_path / "file" / "fake", "local").check_writable("noise")
    assert "\n" not in str(caught.value)


def test_numbers_that_are_not_finite_do_not_break_the_json(store):
    block = new_block(store)
    block.add(record("standard", facts={"kl": math.nan, "n": np.int64(3), "x": (1, 2)}), rows(), "t")
    store.save(block)
    text = (store.folder("noise") / "b1.json").read_text()
    facts = json.loads(text, parse_constant=lambda name: pytest.fail(f"bare {name}"))["trials"][0]["facts"]
    assert facts == {"kl": "nan", "n": 3, "x": [1, 2]}


@pytest.mark.parametrize(
    "columns",
    [{"metric": ["a"], "value": ["fast"]}, {"metric": ["a"]}, {"metric": ["a"], "value": [1.0], "when": [2]}],
)
def test_observations_of_the_wrong_shape_are_refused(columns):
    with pytest.raises(RecordError, match="observations"):
        typed_frame(columns)


def test_a_view_shows_only_what_is_asked_for_under_its_present_name(store):
    full_block(store)
    [block], _ = store.load_blocks("noise")
    view = block.view({"plain": "k1"})
    assert list(view.trials) == ["plain"]
    assert set(view.observations["trial"]) == {"plain"}
    assert block.lacks({"x": "k1", "y": "k9"}) == ["y"]


def test_a_closed_series_names_all_its_blocks_and_is_not_rewritten(store):
    for name in ("b1", "b2"):
        full_block(store, name)
    store.close_series("noise", ["b1", "b2"], "enough")
    blocks, _ = store.load_blocks("noise")
    assert [block.header.series for block in blocks] == [["b1", "b2"]] * 2
    before = blocks[0].files()[0].stat().st_mtime_ns
    store.close_series("noise", ["b1", "b2"], "enough")
    assert blocks[0].files()[0].stat().st_mtime_ns == before


def test_publishing_replaces_what_was_there(store, tmp_path):
    reference = Store(tmp_path / "reference", "reference")
    full_block(reference, "old")
    full_block(store, "new")
    blocks, _ = store.load_blocks("noise")
    reference.replace("noise", blocks)
    assert {path.stem.split("-")[0] for path in reference.folder("noise").iterdir()} == {"new"}
    assert reference.load_blocks("noise")[1] == []


def test_a_result_compares_within_blocks_and_leaves_failures_out(store):
    full_block(store, "b1")
    full_block(store, "b2", flash="nan")
    blocks, problems = store.load_blocks("noise")
    result = Result("noise", blocks, problems)
    assert len(result.groups("standard", "itl_s")) == 2
    [(top, bottom)] = result.pairs("flash", "standard", "itl_s", batch=1)
    assert stats.paired_ratio([(top, bottom)]).value == pytest.approx(3.1 / 1.1)
    assert result.pairs("flash", "standard", "itl_s", batch=2) == []
    assert result.failures[["block", "trial", "status"]].to_numpy().tolist() == [["b2", "flash", "nan"]]
    assert list(result.frame("itl_s").columns) == ["block", *records.COLUMNS]
    assert len(result.frame()) == 9
    assert result.machine == {"cpu_model": "X"}


def test_tables_of_a_result_have_their_columns_even_when_empty(store):
    full_block(store)
    blocks, _ = store.load_blocks("noise")
    for result in (Result("noise", blocks), Result("noise", [])):
        assert list(result.memory_frame().columns) == ["block", "trial", "phase", "counter", "bytes"]
        assert {"block", "trial", "total"} <= set(result.timings_frame().columns)
        assert {"layer_type", "expected", "ran"} <= set(result.kernels_frame().columns)
        assert len(result.provenance_frame()) == len(result.blocks)
