"""Make the finished local records of a profile the committed reference ones.

The one idea: the reference is replaced experiment by experiment and only by finished ones, after all of
them have been looked at; nothing is half published.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashgap.records import Block, Store
from flashgap.study import Study
from flashgap.survey import Wanted, present, stop_reason, survey


class PublishError(RuntimeError):
    """Local records that cannot become the reference, in one line."""


def publish(study: Study, only: Sequence[str] = ()) -> None:
    """Copy the usable local blocks of every experiment, or of those named in `only`, to `results/reference/<profile>/`.

    An opt-in experiment without local blocks keeps its reference. Raises `PublishError` or `RecordError`.
    """
    now, reference = present(study), Store.reference(study.profile)
    published = {name: list(blocks) for name, blocks in reference.contents().items()}
    chosen = {name: finished_blocks(study, name, now) for name in only or study.experiments}
    for name, blocks in chosen.items():
        if not blocks:
            print(f"{name}: opt-in and not measured here; its reference stays as it is")
            continue
        files = reference.replace(name, blocks)
        published[name] = [block.block_id for block in blocks]
        size_kib = sum(path.stat().st_size for path in files) / 1024
        print(f"{name}: {len(blocks)} blocks, {size_kib:.0f} KiB")
    reference.write_contents(published)
    if any(block.header.provenance.get("dirty") for blocks in chosen.values() for block in blocks):
        print(
            "note: some of these were measured with uncommitted changes in the checkout; their records say so"
        )


def finished_blocks(study: Study, name: str, now: dict) -> list[Block]:
    """The local blocks of experiment `name` as the last run left them; empty only for an opt-in one."""
    wanted = Wanted.of(study, name)
    found = survey(Store.local(study.profile), wanted, now, None)
    cure = f"call make reproduce PROFILE={study.profile}{' LONG=1' * wanted.experiment.opt_in} first"
    if not found.usable and wanted.experiment.opt_in:
        return []
    ids = [block.block_id for block in found.usable]
    if stop_reason(wanted.experiment, found.usable) is None or any(
        b.header.series != ids for b in found.usable
    ):
        why = f" ({found.notes[0]})" if found.notes else ""
        raise PublishError(
            f"experiment '{name}': its local records are not a finished, present set{why}; {cure}"
        )
    return found.usable
