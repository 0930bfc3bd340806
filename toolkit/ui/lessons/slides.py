"""A page of slides (reveal.js) from an executed notebook: one idea per slide, with still pictures in place of widgets.

A slide begins at each heading, and wherever the next part would no longer fit. An answer appears after its question. The page
loads reveal.js from the network, or contains it if a folder with it is given. Without both, it shows one slide at a time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.core.errors import ToolkitError

REVEAL = "https://unpkg.com/reveal.js@4.0.2"
FULL = 680  # pixels that a slide has room for
_WIDE, _WIDE_CODE = 92, 96  # characters of a line of text, and of code
_TEXT, _CODE, _ROW = 32, 22, 25  # heights in pixels: of a line of text, of a line of code, and of a row of a table
_PICTURE = 440
_IN_REVEAL = ("dist/reveal.css", "dist/theme/simple.css", "dist/reveal.js", "plugin/notes/notes.js")
_WIDGET = "application/vnd.jupyter.widget-view+json"

_PAGE = """{%- extends 'reveal/base.html.j2' -%}
{%- block header -%}<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
HEAD
{{ resources.include_css("static/index.css") }}{{ resources.include_css("static/theme-light.css") }}
{{ resources.include_css("static/custom_reveal.css") }}
<style>STYLE</style></head>{%- endblock header -%}
{%- block body_header -%}<body class="jp-Notebook" data-jp-theme-light="true"><main><div class="reveal"><div class="slides">
{%- endblock body_header -%}
{%- block body_footer -%}</div></div></main>{%- endblock body_footer -%}
{%- block footer -%}SCRIPTS<script>ALONE</script></body></html>{%- endblock footer -%}
"""

_STYLE = """
:root { --jp-ui-font-size1: 19px; --jp-content-font-size1: 21px; --jp-code-font-size: 16px; --jp-cell-prompt-width: 0px }
html, body, main { height: 100%; margin: 0 } body { background: #fff; color: #1b2430; overflow: hidden }
.reveal { font-size: 21px; font-family: system-ui, sans-serif }
.reveal .slides section { max-height: 700px; overflow: auto; text-align: left; box-sizing: border-box }
.reveal .slides section.stack { max-height: none; overflow: visible }
.reveal h1, .reveal h2 { font-family: inherit; text-transform: none; letter-spacing: 0; margin: 0 0 16px; font-size: 34px }
.jp-InputPrompt, .jp-OutputPrompt, a.anchor-link { display: none !important } .jp-Cell, .jp-Notebook { padding: 0; margin: 0 }
.reveal pre, .reveal code { line-height: 1.35 }
.reveal pre { width: 100% !important; box-sizing: border-box; white-space: pre-wrap; overflow-wrap: anywhere }
.reveal table { font-size: 15px; margin: 8px 0 }
.reveal .jp-RenderedHTMLCommon :is(td, th) { padding: 3px 8px }
.reveal [class^=tk-still] :is(table, h3, .tk-at-peak) { display: none }
.reveal [class^=tk-still] p { font-size: 14px; margin: 2px 0 }
.reveal img, .reveal svg { max-width: 100%; max-height: 430px } .jp-OutputArea-output { overflow: auto }
.alone .slides section { display: none; max-width: 960px; max-height: 96vh; margin: 2vh auto; padding: 0 16px }
.alone .slides section.shown { display: block } .alone aside.notes { display: none }
.alone .fragment:not(.seen) { visibility: hidden }
.alone.with-notes aside.notes { display: block; background: #fff5d6; padding: 8px }
"""

# Slides in a row, with arrow keys, where reveal.js can't be loaded. "s" shows the notes.
_ALONE = """
const fit = (slide) => {  // too long a slide becomes smaller, but not below half of its size: then it scrolls
  for (let size = 1; size > 0.5 && slide.scrollHeight > slide.clientHeight + 2; ) {
    size = Math.max(0.5, size - 0.05);
    for (const part of slide.children) part.style.zoom = size;
  }
};
if (window.Reveal) {
  Reveal.on("ready", (event) => fit(event.currentSlide));
  Reveal.on("slidechanged", (event) => fit(event.currentSlide));
  Reveal.initialize({ width: 960, height: 700, margin: 0.02, center: false, hash: true, slideNumber: true,
                      plugins: window.RevealNotes ? [RevealNotes] : [] });
} else {
  const root = document.querySelector(".reveal");
  for (const stack of root.querySelectorAll("section:has(section)")) stack.replaceWith(...stack.children);
  const all = [...root.querySelectorAll("section")];
  let at = 0;
  const next = () => {
    const answer = all[at].querySelector(".fragment:not(.seen)");
    if (answer) answer.classList.add("seen"); else show(at + 1);
  };
  const show = (n) => {
    at = Math.max(0, Math.min(n, all.length - 1));
    all.forEach((one, i) => one.classList.toggle("shown", i === at));
    fit(all[at]);
  };
  addEventListener("keydown", (event) => {
    if (["ArrowRight", "ArrowDown", "PageDown", " "].includes(event.key)) next();
    else if (["ArrowLeft", "ArrowUp", "PageUp"].includes(event.key)) show(at - 1);
    else if (event.key === "s") root.classList.toggle("with-notes");
    else return;
    event.preventDefault();
  });
  root.classList.add("alone");
  show(0);
}
"""


def without_widgets(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the executed notebook without widgets, so that every front end shows the still pictures next to them."""
    result = copy.deepcopy(notebook)
    result["metadata"].pop("widgets", None)
    for cell in result["cells"]:
        if "outputs" in cell:
            cell["outputs"] = [output for output in cell["outputs"] if _WIDGET not in output.get("data", {})]
    return result


def arranged(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with its cells split and marked as slides.

    Cells with the metadata "note" become notes of the speaker. Those with "answer", and what follows, appear at the next key.
    """
    result = without_widgets(notebook)
    cells: list[dict[str, Any]] = []
    room = 0
    for part in _parts(result["cells"]):
        source, height = "".join(part["source"]), _height(part)
        if part["metadata"].get("note"):
            kind = "notes"
        elif source.startswith(("# ", "## ")) or not cells:
            kind, room = "slide", FULL
        elif height > room:
            kind, room = "subslide", FULL
        elif part["metadata"].get("answer"):
            kind = "fragment"
        else:
            kind = "-"
        room -= 0 if kind == "notes" else height
        part["metadata"]["slideshow"] = {"slide_type": kind}
        part["id"] = f"slide-{len(cells)}"
        cells.append(part)
    return result | {"cells": cells}


def page(notebook: dict[str, Any], title: str, reveal: str | Path = REVEAL) -> str:
    """Return the HTML page of the slides. `reveal` is the address of reveal.js, or a folder, which the page then contains.

    Raises ToolkitError if the folder lacks a file of reveal.js.
    """
    import nbformat
    from nbconvert import SlidesExporter

    head, scripts = _reveal(reveal)
    filled = {"TITLE": title, "HEAD": head, "STYLE": _STYLE, "SCRIPTS": scripts, "ALONE": _ALONE}
    template = re.sub("|".join(filled), lambda found: _raw(filled[found[0]]), _PAGE)
    made = SlidesExporter(raw_template=template, exclude_input_prompt=True, exclude_output_prompt=True)
    text, _ = made.from_notebook_node(nbformat.from_dict(arranged(notebook)))
    return str(text)


def _reveal(reveal: str | Path) -> tuple[str, str]:
    """Return the tags of reveal.js for the head and the end of a page."""
    if not Path(reveal).is_dir():
        *styles, script, notes = (f"{reveal}/{name}" for name in _IN_REVEAL)
        head = "".join(f'<link rel="stylesheet" href="{address}">' for address in styles)
        return head, f'<script src="{script}"></script><script src="{notes}"></script>'
    if lacking := [name for name in _IN_REVEAL if not (Path(reveal) / name).is_file()]:
        asked = f"slides with the reveal.js of {reveal}"
        raise ToolkitError(asked, f"it has no {', '.join(lacking)}", "Unpack version 4 of the npm package reveal.js there")
    *styles, script, notes = ((Path(reveal) / name).read_text(encoding="utf-8") for name in _IN_REVEAL)
    return "".join(f"<style>{text}</style>" for text in styles), f"<script>{script}</script><script>{notes}</script>"


def _raw(text: str) -> str:
    """Return text for a template that Jinja copies as it is."""
    return f"{{% raw %}}{text}{{% endraw %}}"


def _parts(cells: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the cells: Markdown split at headings, Markdown and code split after full slides, and long outputs on their own."""
    for cell in cells:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            for text in _split(source, _WIDE, _TEXT):
                yield cell | {"source": text, "metadata": dict(cell["metadata"])}
        elif not source or _height(cell) <= FULL:
            yield cell | {"source": source, "metadata": dict(cell["metadata"])}
        else:
            for text in _split(source, _WIDE_CODE, _CODE):
                yield cell | {"source": text, "outputs": [], "metadata": dict(cell["metadata"])}
            for output in cell.get("outputs", []):
                yield cell | {"source": "", "outputs": [output], "metadata": {"transient": {"remove_source": True}}}


def _split(text: str, wide: int, each: int) -> Iterator[str]:
    """Yield text or code in pieces that fit on a slide. Lines of `wide` characters are `each` pixels high."""
    held: list[str] = []
    for paragraph in re.split(r"\n{2,}(?![ ]|```\w*\n)", text):
        if held and (paragraph.startswith("## ") or _text_lines("\n\n".join([*held, paragraph]), wide) * each > FULL):
            yield "\n\n".join(held)
            held = []
        held.append(paragraph)
    if held:
        yield "\n\n".join(held)


def _height(cell: dict[str, Any]) -> int:
    """Return about how many pixels a cell is high on a slide."""
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] == "markdown":
        return _TEXT * (_text_lines(source, _WIDE) + source.startswith("#"))
    shown = _CODE * (_text_lines(source, _WIDE_CODE) + 1) if source else 0
    return shown + sum(map(_output_height, cell.get("outputs", [])))


def _output_height(output: dict[str, Any]) -> int:
    data = output.get("data", {})
    html = "".join(data.get("text/html", ""))
    if html.count("<summary") == 1 and "<svg" not in html:  # a folded line about the memory of a cell
        return 2 * _CODE
    rows = 0 if 'class="tk-still' in html else html.count("<tr")  # slides show stills without their tables
    if picture := _PICTURE * ("image/png" in data or re.search(r"<svg|<img|<iframe", html) is not None) + _ROW * (
        rows + (rows > 0)
    ):
        return picture
    if lines := re.findall(r"<div>(.*?)</div>", html):  # a verdict, or a card of a lesson
        return _TEXT * sum(_text_lines(line, _WIDE) for line in lines)
    text = "".join(output.get("text", data.get("text/plain", "")))
    return _CODE * (_text_lines(text + "\n".join(output.get("traceback", ())), _WIDE_CODE) + 1)


def _text_lines(text: str, wide: int) -> int:
    return sum(1 + max(len(line) - 1, 0) // wide for line in text.splitlines())
