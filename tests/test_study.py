"""What can be got wrong in a parameter file is refused in one line that names file, key and cure."""

import subprocess
from pathlib import Path

import pytest
import yaml

from flashgap import study as study_module
from flashgap.study import Study, StudyError, detect_profile, params_dir, parse
from flashgap.treatment import Treatment, content_key

PROFILES = sorted(p.stem for p in params_dir().glob("*.yaml") if p.stem != "claims")


def write(folder: Path, name: str, **over) -> Path:
    """A copy of smoke.yaml's base in `folder` and a profile `name` on top of it."""
    (folder / "cpu.yaml").write_text((params_dir() / "cpu.yaml").read_text())
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"base": "cpu", **over}))
    return path


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_in_the_repository_is_valid_and_its_trials_have_distinct_keys(profile):
    study = Study.load(profile)
    keys = [spec.key for name in study.experiments for spec in study.trials(name).values()]
    assert len(keys) == len(set(keys))


def test_the_key_does_not_depend_on_the_profile_but_on_what_is_measured(tmp_path):
    write(tmp_path, "mine", description="the same study under another name")
    mine, cpu = Study.load("mine", tmp_path), Study.load("cpu")
    assert mine.trials("latency")["flash"].key == cpu.trials("latency")["flash"].key
    write(tmp_path, "mine", builds={"flash": {"quantization": {"group_size": 32}}})
    assert Study.load("mine", tmp_path).trials("latency")["flash"].key != cpu.trials("latency")["flash"].key


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"sampling": 1}, "sampling: unknown key"),
        ({"modell": {"source": "embedded"}}, "modell: unknown key"),
        ({"correctness": {"max_kl_nats": "1e-5"}}, "correctness.max_kl_nats: '1e-5' is text, not a number"),
        ({"experiments": {"latency": {"workload": {"batch_sizes": [0]}}}}, "batch_sizes.0"),
        ({"experiments": {"latency": {"treatments": ["fast"]}}}, "experiments.latency.treatments: ['fast']"),
        ({"treatments": {"flash": {"build": "flush"}}}, "treatments.flash.build: 'flush'"),
        ({"model": {"source": "hub"}}, "needs 'id'"),
        ({"model": {"source": "random"}}, "needs 'config'"),
        (
            {"experiments": {"noise": {"sampling": {"min_blocks": 9, "max_blocks": 3}}}},
            "max_blocks (3) is below",
        ),
        ({"treatments": {"flash": {"engine": {"compile": True}}}}, "needs cache: static"),
        ({"builds": {"flash": {"quantization": {"bits": 3}}}}, "bits"),
        (
            {"experiments": {"noise": {"primary_metric": "speed"}}},
            "'speed' is not measured by a workload of kind latency",
        ),
        ({"seed": 2.5}, "seed"),
    ],
)
def test_a_bad_key_or_value_is_one_line_with_file_and_key(tmp_path, over, says):
    path = write(tmp_path, "mine", **over)
    with pytest.raises(StudyError) as caught:
        Study.load("mine", tmp_path)
    message = str(caught.value)
    assert str(path) in message
    assert says in message
    assert "\n" not in message


def test_an_unquoted_exponent_without_a_point_is_text_to_yaml_and_is_explained(tmp_path):
    path = write(tmp_path, "mine")
    path.write_text("base: cpu\ncorrectness: {max_kl_nats: 1e-5}\n")
    with pytest.raises(StudyError, match=r"'1e-5' is text, not a number; .*1\.0e-05"):
        Study.load("mine", tmp_path)


def test_unknown_profile_names_those_there_are():
    with pytest.raises(StudyError, match=r"unknown profile 'cpuu'.*choose one of .*'cpu'"):
        Study.load("cpuu")


@pytest.mark.parametrize("text", ["a: [1", "- just\n- a list", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(StudyError, match=r"mine\.yaml"):
        Study.load("mine", tmp_path)


def test_a_base_that_includes_itself_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b\n")
    (tmp_path / "b.yaml").write_text("base: a\n")
    with pytest.raises(StudyError, match="includes itself"):
        Study.load("a", tmp_path)


def test_a_profile_must_be_called_what_its_file_is_called(tmp_path):
    write(tmp_path, "mine", profile="other")
    with pytest.raises(StudyError, match="must be the file's name 'mine'"):
        Study.load("mine", tmp_path)


def test_a_date_is_not_plain_data(tmp_path):
    with pytest.raises(StudyError, match="not plain data"):
        parse(yaml.safe_load("profile: 2026-01-01"), tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("listing", "profile"),
    [
        ("", "cpu"),
        ("GPU 0: NVIDIA H200 (UUID: x)\n", "h200"),
        ("".join(f"GPU {i}: NVIDIA A100-SXM4-80GB (UUID: x)\n" for i in range(8)), "a100x8"),
        ("GPU 0: NVIDIA A100-SXM4-80GB (UUID: x)\n", "h200"),
    ],
)
def test_auto_picks_the_profile_by_the_hardware(monkeypatch, listing, profile):
    done = subprocess.CompletedProcess([], 0, stdout=listing)
    monkeypatch.setattr(study_module.subprocess, "run", lambda *a, **k: done)
    assert detect_profile() == profile


def test_auto_without_nvidia_smi_is_cpu_and_the_environment_overrules(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("FLASHGAP_PROFILE", raising=False)
    assert study_module.resolve_profile("auto") == "cpu"
    monkeypatch.setenv("FLASHGAP_PROFILE", "smoke")
    assert study_module.resolve_profile("auto") == "smoke"
    assert study_module.resolve_profile("h200") == "h200"


def test_a_new_setting_that_is_off_keeps_old_records_found():
    """If this fails, each setting added to a specification orphans every record there is."""

    class Later(Treatment):
        telemetry_interval_s: float = 0.0

    now, later = Treatment(replica=1), Later(replica=1)
    assert content_key(later) == content_key(now)
    assert content_key(Later(replica=1, telemetry_interval_s=1.0)) != content_key(now)


def test_a_checkpoint_takes_the_place_of_the_quantization_it_inherits(tmp_path):
    """If this fails, the README's way to measure one's own 4-bit files does not parse."""
    flash = {"quantization": None, "checkpoint": {"id": "models/mine-awq", "execution": "packed"}}
    write(tmp_path, "mine", builds={"flash": flash})
    mine = Study.load("mine", tmp_path)
    assert mine.treatment("flash").build.checkpoint.id == "models/mine-awq"
    assert [checkpoint.id for checkpoint in mine.checkpoints] == ["models/mine-awq"]
    write(tmp_path, "mine", builds={"flash": {"checkpoint": {"id": "models/mine-awq"}}})
    with pytest.raises(StudyError, match="exclude each other"):
        Study.load("mine", tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"per_channel": True}, "wants group_size: null"),
        ({"quantizer": "autoawq", "scheme": "symmetric"}, "autoawq packs 4 bits with a zero point"),
        ({"quantizer": "hqq", "scheme": "symmetric"}, "hqq optimises zero points"),
        ({"quantizer": "rtn", "calibration": {}}, "rtn looks at no data"),
        ({"bits": 8, "execution": "packed"}, "one symmetric scale a channel"),
        ({"bits": 3}, "bits"),
    ],
)
def test_combinations_that_mean_nothing_are_refused_with_the_reason(tmp_path, changes, says):
    write(tmp_path, "mine", builds={"flash": {"quantization": changes}})
    with pytest.raises(StudyError, match=says):
        Study.load("mine", tmp_path)


def test_a_search_without_a_text_gets_the_default_one(tmp_path):
    write(tmp_path, "mine", builds={"flash": {"quantization": {"quantizer": "llmcompressor"}}})
    quantization = Study.load("mine", tmp_path).builds["flash"].quantization
    assert quantization.searches
    assert quantization.calibration.text == "python_docs"
    write(
        tmp_path,
        "mine",
        builds={"flash": {"quantization": {"quantizer": "llmcompressor", "disable_search": True}}},
    )
    quantization = Study.load("mine", tmp_path).builds["flash"].quantization
    assert not quantization.searches
    assert quantization.calibration is None


def test_a_key_that_is_there_twice_is_named_with_its_line(tmp_path):
    """If this fails, the second value wins and nobody is told."""
    (tmp_path / "mine.yaml").write_text("base: smoke\nseed: 1\nseed: 2\n")
    with pytest.raises(StudyError, match=r"mine\.yaml: line 3 .*'seed' is there twice"):
        Study.load("mine", tmp_path)


def test_parameters_are_utf_8_whatever_the_locale(tmp_path):
    (tmp_path / "mine.yaml").write_bytes("description: modèle\n".encode("latin-1"))
    with pytest.raises(StudyError, match="is not UTF-8; save it"):
        Study.load("mine", tmp_path)
