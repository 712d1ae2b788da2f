"""Pictures: each is drawn from records of the real shape, says its n and its records, and survives too few of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flashgap import figures, limits, look, tables
from flashgap.plan import EMBEDDED_CONFIG as SHAPE
from flashgap.records import Block, Header, TrialRecord, typed_frame
from flashgap.results import Result
from flashgap.study import Study

WEIGHTS = {"standard": 269_060_352, "flash": 118_000_000}
SLOW = {"standard": 1.0, "standard_again": 1.0, "standard_slowed": 1.05, "flash": 3.1}


def made(
    experiment: str, treatments: list[str], blocks: int, sample, memory: bool = False, facts=None
) -> Result:
    """A result of `blocks` blocks whose observations are `sample(rng, treatment)`: rows as dicts."""
    rng = np.random.default_rng(7)
    out = []
    for index in range(blocks):
        luck = rng.normal(1, 0.02)
        rows, trials = [], []
        for name in treatments:
            rows += [{"trial": name, **r, "value": r["value"] * luck} for r in sample(rng, name)]
            phases = fake_memory(rng, name) if memory else {}
            trials.append(
                TrialRecord(
                    key=f"key-{name}",
                    treatment=name,
                    spec={"treatment": {"planted_slowdown": 0.05 if name == "standard_slowed" else 0.0}},
                    status="ok",
                    memory=phases,
                    timings_s={"total": 3.0, "overhead": float(rng.gamma(9, 0.07))},
                    build={
                        "resident_bytes": WEIGHTS.get(name, WEIGHTS["standard"]),
                        "parameters": 134_515_008,
                    },
                    model={"label": "SmolLM2-135M-Instruct", "config": SHAPE},
                    kernels={
                        "q_proj": {"expected": "gemm", "ran": "gemm", "layers": 30, "weight_bytes": 100}
                    },
                    correctness={"passed": True, "kl_nats": 0.02},
                    facts={**(facts(rng, name) if facts else {}), "tokens_equal_generate": True},
                )
            )
        header = Header(
            experiment=experiment,
            block_id=f"b{index:02}",
            keys={n: f"key-{n}" for n in treatments},
            order=treatments,
            complete=True,
            started_utc="2026-12-01T00:00:00+00:00",
            updated_utc="2026-12-01T00:00:00+00:00",
            provenance={"fingerprint": {"cpu": "Some Processor 9000", "cores": 2, "memory_gib": 16}},
            trials=trials,
        )
        out.append(Block(header, Path("."), frame=typed_frame(pd.DataFrame(rows))))
    return Result(experiment, out, treatments=treatments)


def fake_memory(rng: np.random.Generator, name: str) -> dict[str, dict[str, int]]:
    held = WEIGHTS.get(name, WEIGHTS["standard"]) / 2**20
    extra = 90 if name == "flash" else 40
    levels = {
        "start": 310,
        "weights_loaded": 310 + held,
        "first_token": 340 + held + extra,
        "steady": 350 + held + extra,
    }
    phases = {
        p: {"rss_bytes": int(v * 2**20 * rng.normal(1, 0.01)), "uss_bytes": int(v * 2**20)}
        for p, v in levels.items()
    }
    top = int((350 + held + 1.4 * extra) * 2**20)
    return phases | {
        "initialisation_peak": {"peak_rss_bytes": top},
        "peak": {"peak_rss_bytes": int(top * 1.02)},
    }


def ceilings_result(blocks: int = 5) -> Result:
    speed = {16: 60e9, 64: 46e9, 128: 40e9, 256: 28e9, 512: 24e9, 1024: 22e9}

    def sample(rng, name):
        rows = [
            {
                "metric": f"{a}_bytes_per_s",
                "value": v * f * rng.normal(1, 0.03),
                "context_tokens": mib * 1024,
                "iteration": i,
            }
            for a, f in (("read", 1.0), ("copy", 0.62), ("gemv", 0.85))
            for mib, v in speed.items()
            for i in range(7)
        ]
        for dtype, value in (("bfloat16", 1.9e12), ("float32", 2.4e11)):
            rows += [
                {
                    "metric": f"matmul_{dtype}_flops_per_s",
                    "value": value * rng.normal(1, 0.03),
                    "batch": 2048,
                    "iteration": i,
                }
                for i in range(7)
            ]
        return rows

    return made("ceilings", ["standard"], blocks, sample)


def noise_result(blocks: int = 24) -> Result:
    def sample(rng, name):
        level = 0.0126 * SLOW[name] * rng.normal(1, 0.012)
        return [
            {"metric": "itl_s", "value": level * rng.lognormal(0, 0.05), "batch": 1, "iteration": i}
            for i in range(48)
        ]

    return made("noise", list(tables.AA), blocks, sample)


def latency_result(blocks: int = 6) -> Result:
    def sample(rng, name):
        rows = []
        for batch in (1, 2, 4, 8, 16):
            at = {"batch": batch, "context_tokens": 128}
            extra = 0.026 if name == "flash" else 0.0
            ttft = 0.05 * batch + 0.02 + extra
            steps = [(0.0115 + 0.001 * batch + extra) * rng.lognormal(0, 0.05) for _ in range(31)]
            rows += [{"metric": "ttft_s", "value": ttft * rng.normal(1, 0.02), **at}]
            rows += [{"metric": "itl_s", "value": s, "iteration": i, **at} for i, s in enumerate(steps)]
            rows += [{"metric": "throughput_tokens_per_s", "value": batch * 32 / (ttft + sum(steps)), **at}]
        return rows

    return made("latency", ["standard", "flash"], blocks, sample)


def context_result(blocks: int = 5) -> Result:
    def sample(rng, name):
        extra = 0.026 if name == "flash" else 0.0
        return [
            {
                "metric": "itl_s",
                "value": (0.012 + 2.4e-6 * n + extra) * rng.lognormal(0, 0.04),
                "batch": 1,
                "context_tokens": n,
                "iteration": i,
            }
            for n in (128, 512, 1024, 2048, 4096, 6144)
            for i in range(12)
        ]

    return made("context", ["standard", "flash"], blocks, sample)


def long_result() -> Result:
    def sample(rng, name):
        extra = 0.027 if name == "flash" else 0.0
        return [
            {
                "metric": "itl_s",
                "value": (0.012 + 2.4e-6 * n + extra) * rng.lognormal(0, 0.1),
                "batch": 1,
                "context_tokens": 128 + n,
                "iteration": n,
            }
            for n in range(5200)
        ]

    return made("long", ["standard", "flash"], 1, sample)


def memory_result(blocks: int = 5) -> Result:
    return made(
        "memory",
        ["standard", "flash"],
        blocks,
        lambda rng, name: [{"metric": "ttft_s", "value": 0.1}],
        memory=True,
    )


def capacity_result(blocks: int = 1) -> Result:
    most = {"standard": 22.0, "flash": 25.0}
    return made(
        "capacity",
        ["standard", "flash"],
        blocks,
        lambda rng, name: [{"metric": "largest_batch", "value": most[name]}],
        facts=lambda rng, name: {"largest_batch": most[name], "budget_bytes": 2**31},
    )


def task_result(blocks: int = 5) -> Result:
    def sample(rng, name):
        total = 24.0 * (2.1 if name == "flash" else 1.0) * rng.normal(1, 0.02)
        ends = np.sort(np.random.default_rng(1).uniform(0.15, 1, 16)) * total
        rows = [{"metric": "e2e_s", "value": e, "request": i, "batch": 16} for i, e in enumerate(ends)]
        rows += [
            {"metric": "task_s", "value": total},
            {"metric": "useful_slots", "value": 6100},
            {"metric": "computed_slots", "value": 17800},
        ]
        return rows

    return made("task", ["standard", "flash"], blocks, sample)


def reference_result(blocks: int = 5) -> Result:
    def sample(rng, name):
        return [
            {
                "metric": f"{call}{which}_s",
                "value": level * f * rng.lognormal(0, 0.03),
                "batch": 1,
                "iteration": i,
            }
            for call, level in (("prefill", 0.08), ("decode_step", 0.013))
            for which, f in (("", 1.01), ("_reference", 1.0))
            for i in range(20)
        ]

    return made("reference", ["standard"], blocks, sample)


def pictures(blocks: int) -> dict[str, Figure]:
    """Every picture, drawn from `blocks` blocks."""
    study = Study.load("cpu")
    ceilings, noise, latency = (
        ceilings_result(blocks),
        noise_result(max(blocks, 2) * 4 if blocks > 2 else blocks),
        latency_result(blocks),
    )
    context, long, memory, capacity = (
        context_result(blocks),
        long_result(),
        memory_result(blocks),
        capacity_result(),
    )
    task, reference = task_result(blocks), reference_result(blocks)
    shape = limits.model_shape(study, latency)
    results = {"task": task, "latency": latency, "context": context, "memory": memory}
    summary = tables.summary(results)
    claims = pd.DataFrame(
        [
            ("B2", "time for the task", "task", 2.12, 1.7, 2.6, 2.1, 2.05, 2.16, 5, "reproduced"),
            (
                "B4",
                "peak until the first token",
                "memory",
                1.23,
                1.1,
                1.4,
                0.86,
                0.85,
                0.87,
                5,
                "contradicted",
            ),
            (
                "B3",
                "growth with context, Flash over Standard",
                "context",
                np.nan,
                np.nan,
                np.nan,
                0.65,
                np.nan,
                np.nan,
                1,
                "",
            ),
        ],
        columns=[
            "id",
            "what",
            "experiment",
            "published",
            "band_low",
            "band_high",
            "value",
            "low",
            "high",
            "blocks",
            "verdict",
        ],
    )
    return {
        "ceilings": figures.ceilings(ceilings, limits.weights_bytes(latency)),
        "noise": figures.noise(noise, tables.power_curve(noise, repeats=60)),
        "trust": figures.trust(
            tables.reference_check(reference), tables.overheads_s([noise, latency]), reference, noise, latency
        ),
        "task": figures.task(task),
        "latency": figures.latency(latency, limits.bounds(study, latency, ceilings, shape)),
        "utilization": figures.utilization(
            limits.utilization(study, latency, ceilings, shape), latency, ceilings
        ),
        "context": figures.context(context, long, limits.bounds(study, context, ceilings, shape)),
        "memory": figures.memory(memory, capacity),
        "summary": figures.summary(
            summary, *results.values(), beside=summary.assign(value=summary["value"] * 1.07)
        ),
        "claims_ledger": figures.claims_ledger(claims, results),
    }


@pytest.fixture(scope="module")
def drawn() -> dict[str, Figure]:
    return pictures(5)


def texts(figure: Figure) -> str:
    return " ".join(t.get_text() for t in figure.texts).replace("\n", " ")


def test_every_picture_names_its_records_machine_and_n(drawn: dict[str, Figure]) -> None:
    """A picture passed on without its page must still say where it comes from."""
    for name, figure in drawn.items():
        said = texts(figure)
        assert "Records: " in said, name
        assert "blocks, local)" in said, name
        assert "Some Processor 9000" in said, name
        assert "n = " in said or name in ("summary", "claims_ledger"), name


def test_no_text_leaves_the_page_or_runs_into_the_caption(drawn: dict[str, Figure]) -> None:
    """Cut-off labels are the commonest fault of a generated picture."""
    for name, figure in drawn.items():
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        caption_top = figure.texts[2].get_window_extent(renderer).y1
        for ax in figure.axes:
            ticks = [*ax.get_xticklabels(), *ax.get_yticklabels()]
            shown = [
                t for t in ticks if ax.bbox.padded(2).contains(*ax.transData.transform(t.get_position()))
            ]
            labels = [*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label, *shown]
            for text in [t for t in labels if t.get_text() and t.get_visible()]:
                box = text.get_window_extent(renderer)
                inside = (
                    box.x0 >= 0
                    and box.x1 <= figure.bbox.x1
                    and caption_top <= box.y0
                    and box.y1 <= figure.bbox.y1
                )
                assert inside, f"{name}: '{text.get_text()}' at {box}"


def test_pictures_of_one_block_draw_no_interval_and_do_not_fail() -> None:
    """One block has no interval: an infinite bar or a crash would hide what there is."""
    for figure in pictures(1).values():
        FigureCanvasAgg(figure).draw()


def test_pictures_of_nothing_say_why() -> None:
    empty = Result("latency", [], source="none")
    for figure in (
        figures.latency(empty),
        figures.context(empty, empty),
        figures.memory(empty, empty),
        figures.task(empty),
        figures.ceilings(empty),
        figures.noise(empty, tables.power_curve(empty)),
        figures.summary(tables.summary({"latency": empty})),
    ):
        assert "No " in texts(figure) or "Fewer" in texts(figure)


def test_bound_is_below_every_time_it_bounds(drawn: dict[str, Figure]) -> None:
    """The roofline of these made-up times lies below them, and Flash's below Standard's in decode."""
    study, latency, ceilings = Study.load("cpu"), latency_result(), ceilings_result()
    bounds = limits.bounds(study, latency, ceilings, limits.model_shape(study, latency)).set_index(
        ["treatment", "batch"]
    )
    medians = tables.medians(latency, "itl_s", "batch").set_index(["treatment", "batch"])
    assert (bounds["itl_s"] < medians["value"]).all()
    assert (bounds.loc["flash", "itl_s"] < bounds.loc["standard", "itl_s"]).all()


def test_no_bounds_in_smoke() -> None:
    """A tiny model lives in the cache: a bound from main memory would be nonsense."""
    study = Study.load("smoke")
    assert limits.bounds(study, latency_result(), ceilings_result(), None).empty
    assert limits.Machine.of(study, ceilings_result()) is None


def test_smoke_is_watermarked_and_saved_where_git_ignores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGAP_ROOT", str(tmp_path))
    monkeypatch.delenv("FLASHGAP_REPLAY", raising=False)
    study = Study.load("smoke", Path(__file__).parents[1] / "params")
    figure = figures.task(task_result(2))
    image = figures.save(figure, "task", study)
    kept = tmp_path / "figures" / "local" / "smoke" / "task.png"
    assert kept.read_bytes() == image.data
    assert "random weights: not evidence" in texts(figure)


def test_replay_writes_the_same_bytes_into_the_committed_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures of the same records must be the same file, or each render would dirty the repository."""
    monkeypatch.setenv("FLASHGAP_ROOT", str(tmp_path))
    monkeypatch.setenv("FLASHGAP_REPLAY", "1")
    study = Study.load("cpu", Path(__file__).parents[1] / "params")
    first = figures.save(figures.task(task_result(2)), "task", study).data
    again = figures.save(figures.task(task_result(2)), "task", study).data
    assert first == again
    assert (tmp_path / "figures" / "cpu" / "task.png").is_file()


def test_the_look_does_not_leak_into_the_notebook() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    figures.task(task_result(1))
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("wanted", [[0.5, 0.5, 0.5], [0.1, 0.9], [0.4, 0.41]])
def test_direct_labels_keep_their_order_and_do_not_overlap(wanted: list[float]) -> None:
    placed = look.spread(wanted, [0.08] * len(wanted))
    assert all(b - a >= 0.08 - 1e-4 for a, b in itertools.pairwise(placed))


def test_the_summary_pairs_only_blocks_in_which_both_sides_ended_well() -> None:
    """If this fails, one side of block 1 is compared with the other side of block 2 and called paired."""
    results = {"task": task_result(5), "memory": memory_result(5)}
    for result in results.values():
        for block, name in ((0, "flash"), (2, "standard")):
            result.blocks[block].trials[name].status = "failed"
    summary = tables.summary(results)
    assert "resident weights" in set(summary["quantity"])
    assert set(summary["blocks"]) == {3}
    alone = tables.paired_blocks(results["task"], "standard", "flash")
    assert [block.block_id for block in alone.blocks] == ["b01", "b03", "b04"]
