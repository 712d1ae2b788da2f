"""Executed notebooks as HTML pages, and all of them as one file to attach to a review.

The one idea: a page needs nothing but itself. nbconvert turns cells into fragments, this module puts them
into a small page of its own (no script, nothing fetched, readable in print), pictures are inside. Code is
folded away by a checkbox, since a reviewer reads findings first.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

from flashgap import keys
from flashgap.context import module_digests
from flashgap.study import Study

OUTSIDE = re.compile(
    r"<script\b|<link\b|<iframe\b|<object\b|<embed\b|@import\b|url\(\s*['\"]?(?:https?:)?//"
    r"|\b(?:src|srcset|poster|data)\s*=\s*['\"]?\s*(?:https?:)?//",
    re.IGNORECASE,
)
HEADING = re.compile(r"<h([12])([^>]*)>(.*?)</h\1>", re.DOTALL)

CSS = """
:root { --ink: #1b1b1b; --soft: #5f6368; --line: #d9dce0; --tint: #f6f7f8; --accent: #0b5cad; }
* { box-sizing: border-box; }
body { color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; margin: 0; }
header, main, footer { max-width: 60rem; margin: 0 auto; padding: 0 1.25rem; }
header { border-bottom: 1px solid var(--line); padding-top: 1.5rem; padding-bottom: 1rem; }
header h1 { margin: 0 0 .3rem; }
header dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .5rem 0; color: var(--soft); }
header dd { margin: 0; color: var(--ink); overflow-wrap: anywhere; }
nav { margin: 1rem 0; } nav ol { margin: 0; padding-left: 1.4rem; } nav ol ol { list-style: none; padding-left: 1rem; }
a { color: var(--accent); }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { font-size: 1.3rem; margin-top: 2rem; } h3 { font-size: 1.1rem; }
section { border-top: 3px solid var(--ink); margin-top: 3rem; padding-top: .5rem; }
section:first-of-type { border-top: 0; margin-top: 1rem; }
.banner { border-left: 4px solid #b35c00; background: #fff6ea; padding: .5rem .8rem; margin: .8rem 0; }
.watermark { position: fixed; inset: 0; display: flex; align-items: center; justify-content: center;
  pointer-events: none; z-index: 9; }
.watermark span { transform: rotate(-28deg); font-size: min(7vw, 4.5rem); font-weight: 700; color: rgb(180 0 0 / .13);
  white-space: nowrap; }
table { border-collapse: collapse; font-size: .88rem; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; vertical-align: top; }
th { text-align: left; } thead th { border-bottom: 2px solid var(--ink); }
td:first-child { text-align: left; }
.output_html, .output_markdown, .text_cell_render { overflow-x: auto; }
img, svg { max-width: 100%; height: auto; }
pre { font: .82rem/1.45 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  margin: .3rem 0; }
code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .88em; }
.input pre { background: var(--tint); border-left: 3px solid var(--line); padding: .5rem .8rem; }
.output_stderr pre { color: var(--soft); }
.output_prompt, .input_prompt, .prompt { display: none; }
#code:not(:checked) ~ main .input { display: none; }
.toggle { float: right; color: var(--soft); font-size: .9rem; cursor: pointer; }
#code { position: absolute; opacity: 0; } #code:focus-visible ~ header .toggle { outline: 2px solid var(--accent); }
#code:checked ~ header .toggle::after { content: "hide code"; }
#code:not(:checked) ~ header .toggle::after { content: "show code"; }
footer { color: var(--soft); font-size: .85rem; border-top: 1px solid var(--line); margin-top: 3rem; padding: 1rem 1.25rem; }
@page { margin: 16mm; }
@media print {
  body { font-size: 10.5pt; } header, main, footer { max-width: none; padding: 0; } .toggle { display: none; }
  section { break-before: page; border-top: 0; } section:first-of-type { break-before: auto; }
  h1, h2, h3 { break-after: avoid; } img, table, tr, pre { break-inside: avoid; } a { color: inherit; }
}
"""


class RenderError(RuntimeError):
    """A page that cannot be made, in one line."""


def render_all(study: Study, out: Path, order: list[str]) -> Path:
    """Write a page for each executed notebook in `out` and `index.html` of all; returns the latter's path.

    `order` names the notebooks of the project; those not executed yet are said to be missing. Pages are
    rewritten only when an executed notebook, or this module, has changed. Raises `RenderError`.
    """
    present = [name for name in order if (out / f"{name}.ipynb").is_file()]
    if not present:
        raise RenderError(
            f"profile '{study.profile}': nothing to render, no notebook was run yet; call make reproduce"
        )
    index, key_file = out / "index.html", out / "keys" / "html.json"
    key = {name: hashlib.sha256((out / f"{name}.ipynb").read_bytes()).hexdigest() for name in present}
    key |= module_digests(["flashgap.render"]) | {"css": keys.digest(CSS), "order": ",".join(order)}
    pages = [out / f"{name}.html" for name in present]
    if read_json(key_file) == key and all(page.is_file() for page in [*pages, index]):
        return index
    notebooks = {name: keys.read_notebook(out / f"{name}.ipynb") for name in present}
    bodies = {name: fragment(out / f"{name}.ipynb", name) for name in present}
    for name in present:
        text = page(title_of(bodies[name], name), {name: bodies[name]}, facts(study, [notebooks[name]]), [])
        keys.write_if_changed(out / f"{name}.html", text)
    missing = [name for name in order if name not in present]
    heading = f"flashgap: {study.profile}"
    keys.write_if_changed(index, page(heading, bodies, facts(study, list(notebooks.values())), missing))
    keys.write_if_changed(key_file, json.dumps(key, indent=1) + "\n")
    return index


def read_json(path: Path) -> Any:
    """The JSON data at `path`, or None."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def fragment(path: Path, name: str) -> str:
    """The cells of the notebook at `path` as HTML, headings with ids that start with `name`."""
    import nbformat
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic", embed_images=True, exclude_anchor_links=True)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    notebook: Any = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    body, _ = exporter.from_notebook_node(notebook)
    body = re.sub(
        r' id="cell-id=[^"]*"', "", body
    )  # may repeat between notebooks, and nothing points at them
    counter = iter(range(10_000))

    def numbered(match: re.Match[str]) -> str:
        attributes = re.sub(r'\s*id="[^"]*"', "", match[2])
        return f'<h{match[1]}{attributes} id="{name}-{next(counter)}">{match[3]}</h{match[1]}>'

    return HEADING.sub(numbered, body)


def headings(body: str) -> list[tuple[int, str, str]]:
    """(level, id, text) of the numbered first- and second-level headings of a fragment."""
    found = []
    for level, attributes, text in HEADING.findall(body):
        anchor = re.search(r'id="([^"]*)"', attributes)
        if anchor:
            found.append((int(level), anchor[1], re.sub(r"<[^>]+>", "", text).strip()))
    return found


def title_of(body: str, name: str) -> str:
    """The first heading of a fragment as text, else `name`."""
    return next((html.unescape(text) for _, _, text in headings(body)), name)


def watermark(study: Study) -> str:
    """What pages of random weights say across every page; empty for real weights.

    The tiny model of the tests is evidence of nothing. At real size, speed does not depend on weight
    values; quality does.
    """
    if study.model.source != "random":
        return ""
    return "random weights: not evidence" if study.profile == "smoke" else "random weights: speed only"


def facts(study: Study, notebooks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the head of a page says: profile, machines, date, replay, watermark."""
    marks = [nb.get("metadata", {}).get("flashgap", {}) for nb in notebooks]
    return {
        "profile": f"{study.profile}: {study.description}",
        "machine": join(mark.get("machine") for mark in marks),
        "measured": join(name for mark in marks for name in mark.get("measured_on", [])),
        "date": max((str(mark.get("executed_utc", "")) for mark in marks), default=""),
        "replay": any(mark.get("replay") for mark in marks),
        "watermark": watermark(study),
    }


def join(values: Any) -> str:
    """The different values, in order, as text."""
    return "; ".join(dict.fromkeys(str(value) for value in values if value)) or "not known"


def page(title: str, bodies: dict[str, str], about: dict[str, Any], missing: list[str]) -> str:
    """A whole HTML page of the fragments in `bodies`; `RenderError` if it would fetch anything."""
    from pygments.formatters import HtmlFormatter

    for name, body in bodies.items():
        outside = OUTSIDE.search(body)
        if outside:
            raise RenderError(
                f"notebooks/{name}.ipynb: output has '{outside[0]}': pages must not run or fetch anything"
            )
    styles = CSS + HtmlFormatter(style="default").get_style_defs(".highlight")
    sections = "\n".join(f'<section id="{name}">\n{body}\n</section>' for name, body in bodies.items())
    mark = about["watermark"]
    lines = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title>\n<style>{styles}</style>\n</head>\n<body>",
        '<input type="checkbox" id="code" aria-label="show code">',
        f'<div class="watermark" aria-hidden="true"><span>{html.escape(mark)}</span></div>' if mark else "",
        f'<header><label class="toggle" for="code"></label>{head(title, about, len(bodies) > 1)}',
        f'<nav aria-label="contents">{contents(bodies)}</nav>',
        f"<p>Not run yet: {html.escape(', '.join(missing))}.</p>" if missing else "",
        f"</header>\n<main>\n{sections}\n</main>",
        "<footer>Every number here is computed from stored raw records by the notebook shown; see its last section "
        "for commit, versions and machine.</footer>\n</body>\n</html>\n",
    ]
    return "\n".join(line for line in lines if line)


def head(title: str, about: dict[str, Any], merged: bool) -> str:
    """The title (a single notebook brings its own) and what the page is made from."""
    rows = {"profile": about["profile"], "measured on": about["measured"], "rendered": about["date"]}
    if about["measured"] != about["machine"]:
        rows["rendered on"] = about["machine"]
    items = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in rows.items())
    parts = [f"<h1>{html.escape(title)}</h1>" if merged else "", f"<dl>{items}</dl>"]
    if about["replay"]:
        text = f"Replayed from the reference records measured on {about['measured']}. Nothing was measured for this page."
        parts.append(f'<p class="banner">{html.escape(text)}</p>')
    if about["watermark"]:
        parts.append(f'<p class="banner">{html.escape(about["watermark"])}</p>')
    return "".join(parts)


def contents(bodies: dict[str, str]) -> str:
    """The table of contents: first-level headings, and the second-level ones below them."""
    entries = []
    for name, body in bodies.items():
        found = headings(body)
        below = "".join(
            f'<li><a href="#{anchor}">{text}</a></li>' for level, anchor, text in found if level == 2
        )
        title = next((text for _, _, text in found), html.escape(name))
        entries.append(
            f'<li><a href="#{name}">{title}</a>' + (f"<ol>{below}</ol>" if below else "") + "</li>"
        )
    return f"<ol>{''.join(entries)}</ol>"
