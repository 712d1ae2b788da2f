"""What a person or a log sees while trials run.

The one idea: one line per trial in batch, a text bar for someone who watches, never a widget (hosted
viewers refuse notebooks with widgets).
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from tqdm.std import tqdm


class Progress:
    """Counts trials of one experiment. `FLASHGAP_PROGRESS` names a file that gets the lines; without
    it they go to stderr, as a bar if that is a terminal or a notebook."""

    def __init__(self, experiment: str, total: int, trial_s: float | None) -> None:
        self.experiment, self.total, self.done = experiment, total, 0
        self.trial_s, self.spent_s = trial_s, 0.0
        self.path = os.environ.get("FLASHGAP_PROGRESS")
        watched = not self.path and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        bar = "{desc} {n_fmt}/{total_fmt} |{bar:24}| {postfix}"
        self.bar = tqdm(total=total, desc=experiment, leave=False, bar_format=bar) if watched else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def trial(self, block: int, treatment: str, status: str, seconds: float) -> None:
        """One trial has ended after `seconds`."""
        self.done += 1
        self.spent_s += seconds
        text = f"{self.experiment} block {block} {treatment} {status} {seconds:.1f} s"
        if self.bar is not None:
            self.bar.set_postfix_str(f"{treatment} {status} {seconds:.1f} s{self._left()}", refresh=False)
            self.bar.update()
        else:
            note(f"[{self.done}/{self.total}] {text}{self._left()}")

    def say(self, text: str) -> None:
        """Something worth a line that is not a trial."""
        if self.bar is not None:
            self.bar.set_postfix_str(text)
        else:
            note(f"{self.experiment}: {text}")

    def _left(self) -> str:
        mean_s = self.spent_s / self.done if self.done else self.trial_s or 0.0
        left_s = mean_s * (self.total - self.done)
        return f", at most {duration(left_s)} left" if left_s > 0 else ""


def note(text: str) -> None:
    """A line for who waits: to the file that `FLASHGAP_PROGRESS` names, else to stderr."""
    path = os.environ.get("FLASHGAP_PROGRESS")
    if not path:
        print(text, file=sys.stderr, flush=True)
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError:
        print(text, file=sys.stderr, flush=True)  # a lost progress line must not cost a measurement


def duration(seconds: float) -> str:
    """`12 s`, `3 min` or `1.5 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
