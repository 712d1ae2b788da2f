"""Text that a quantizer calibrates on, and text from another source to judge the result by.

The one idea: quality measured on the calibration text flatters a search, so the two texts come from
different places: Python's language reference, which every Python carries, and the English prose that the
installed packages and the system's licences carry. Both are known by their SHA-256, because they differ
between machines. Calibration is drawn as token chunks of one length, so that no quantizer has a reason to
drop one (AutoAWQ drops longer texts without a word).
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashgap import models
from flashgap.builds.weights import BuildError

SYSTEM_LICENCES = Path("/usr/share/common-licenses")
PROSE = re.compile(r"[A-Za-z0-9 ,.;:'\"()-]")  # characters that prose is made of
MIN_PARAGRAPH = 200  # characters; shorter ones are headings, badges and lists
MIN_PROSE_SHARE = 0.97  # of a paragraph's characters; below are tables, links and code


def calibration_text(name: str) -> tuple[str, str]:
    """Text and SHA-256 of `python_docs` or of a UTF-8 file."""
    if name == "python_docs":
        return models.held_out_text()
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise BuildError(f"calibration.text {name}: {reason}; name a text file, or python_docs") from None
    return text, hashlib.sha256(text.encode()).hexdigest()


def calibration_chunks(tokenizer: Any, calibration: Any) -> Tensor:
    """Token ids [samples, length_tokens], distinct pieces of the text drawn with the seed.

    Raises `BuildError` if the text has fewer such pieces than samples are asked for.
    """
    text, _ = calibration_text(calibration.text)
    length, samples = calibration.length_tokens, calibration.samples
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = len(ids) // length
    if pieces < samples:
        raise BuildError(
            f"calibration.text {calibration.text} has {pieces} pieces of {length} tokens, {samples} samples are "
            "asked for; lower samples or length_tokens, or give a longer text"
        )
    chosen = random.Random(calibration.seed).sample(range(pieces), samples)
    return torch.tensor([ids[i * length : (i + 1) * length] for i in chosen])


def other_english_text() -> tuple[str, str]:
    """Prose of installed packages' descriptions and licences and of the system's licences, with its SHA-256.

    Sorted by package and path; each paragraph once, however many packages carry the same licence.
    """
    seen: set[str] = set()
    kept = []
    for text in _documents():
        for paragraph in re.split(r"\n\s*\n", text):
            words = " ".join(paragraph.split())
            if words not in seen and _is_prose(words):
                seen.add(words)
                kept.append(words)
    joined = "\n\n".join(kept)
    return joined, hashlib.sha256(joined.encode()).hexdigest()


def _documents() -> Iterator[str]:
    """Descriptions, then licence and readme files of the packages, then the system's licences."""
    packages = {str(d.metadata["Name"]).lower(): d for d in metadata.distributions() if d.metadata["Name"]}
    for name in sorted(packages):
        yield str(packages[name].metadata.get_payload() or "")  # type: ignore[attr-defined]
    for name in sorted(packages):
        for file in sorted(packages[name].files or [], key=str):
            if ".dist-info" in str(file) and re.search(
                r"licen[cs]e|copying|readme|notice", file.name.lower()
            ):
                yield _read(Path(str(file.locate())))
    for path in sorted(SYSTEM_LICENCES.glob("*")):
        if not path.is_symlink():
            yield _read(path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="ignore")
    except OSError:
        return ""  # listed by the package, removed from the disk


def _is_prose(paragraph: str) -> bool:
    if len(paragraph) < MIN_PARAGRAPH or "://" in paragraph:
        return False
    return len(PROSE.findall(paragraph)) >= MIN_PROSE_SHARE * len(paragraph)
