"""What `make plan` refuses: a fault that is found after the model was fetched and quantised costs an hour."""

from __future__ import annotations

import yaml

from flashgap import plan
from flashgap.cost import parameters
from flashgap.limits import EMBEDDED
from flashgap.study import Study

BASE = {"base": "cpu", "description": "mine"}


def study(tmp_path, **changes) -> Study:
    params = plan.project_root() / "params"
    for name in ("cpu", "smoke"):
        (tmp_path / f"{name}.yaml").write_text((params / f"{name}.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(BASE | changes))
    return Study.load("mine", tmp_path)


def test_the_studies_of_this_repository_are_refused_nothing():
    for profile in ("cpu", "smoke", "h200", "a100x8"):
        assert plan.refusals(Study.load(profile)) == []


def test_groups_that_divide_no_layer_are_named(tmp_path):
    mine = study(tmp_path, builds={"flash": {"quantization": {"group_size": 128}}})
    line = "builds.flash.quantization.group_size: 128 does not divide the 576 input features of q_proj"
    assert any(line in found for found in plan.refusals(mine))
    left = {"skip": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "lm_head"]}
    mine = study(tmp_path, builds={"flash": {"quantization": {"group_size": 128, **left}}})
    assert plan.refusals(mine) == [], "1536 input features are whole groups of 128"


def test_a_prompt_beyond_the_context_is_named(tmp_path):
    long = {"latency": {"workload": {"prompt_tokens": 9000}}}
    assert any(
        "experiments.latency.workload" in found for found in plan.refusals(study(tmp_path, experiments=long))
    )


def test_a_model_that_is_not_at_hand_is_not_fetched(tmp_path):
    assert plan.refusals(study(tmp_path, model={"source": "hub", "id": "some/model"})) == []


def test_the_embedded_models_sizes_are_one():
    """The plan's guess, the bounds' shape and the count that records show must be of the same model."""
    assert parameters(EMBEDDED) == plan.EMBEDDED_PARAMETERS
