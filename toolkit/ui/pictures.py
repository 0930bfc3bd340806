"""Still pictures (SVG) that follow the theme of the page.

A browser shows an SVG in an `<img>` with the color scheme of its place. The picture holds the colors of both themes
(`in_the_dark`), and its place the style sheet `PLACE`. Front ends that leave out style sheets show the light picture.
"""

from __future__ import annotations

from collections.abc import Mapping

_HERE = ".tk-place-of-picture"
PLACE = (
    f'<style>[data-jp-theme-light="false"] {_HERE},body[data-vscode-theme-kind*="dark"] {_HERE}{{color-scheme:dark}}</style>'
)


def in_the_dark(colors: Mapping[str, str]) -> str:
    """Return a style sheet for an SVG: in a dark place, it has no background, and `colors` replace fills and strokes."""
    rules = "".join(f'[fill="{day}"]{{fill:{night}}}[stroke="{day}"]{{stroke:{night}}}' for day, night in colors.items())
    return f"<style>@media (prefers-color-scheme:dark){{svg{{background:none!important}}{rules}}}</style>"


def placed(html: str) -> str:
    """Return HTML with pictures, in a place that has the color scheme of the front end's theme."""
    return f'<div class="{_HERE[1:]}">{PLACE}{html}</div>'
