"""Renders one chat template in a process of its own: `chat_templates.render` runs this file as a program.

It reads {"template": ..., "values": ...} as JSON from standard input and writes {"text": ...} or {"error": ...} to standard
output. Memory is limited before Jinja is imported. The file imports nothing of the toolkit, so that it runs from any directory.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any

MAX_BYTES = 1 << 30


def main() -> None:
    """Render the template on standard input."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    except ImportError:  # Windows
        pass
    given = json.load(sys.stdin)
    try:
        answer = json.dumps({"text": _render(given["template"], given["values"])})
    except MemoryError:
        answer = json.dumps({"error": f"it needs more than {MAX_BYTES >> 30} GiB"})
    except Exception as error:
        answer = json.dumps({"error": f"{type(error).__name__}: {error!s:.300}"})
    sys.stdout.write(answer)


def _render(template: str, values: dict[str, Any]) -> str:
    """Render as transformers does: its extensions, its filters and its two functions."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's words for training; its content is rendered as it is."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    def fail(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = ["jinja2.ext.loopcontrols", Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals |= {"raise_exception": fail, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    environment.filters["tojson"] = tojson
    return environment.from_string(template).render(**values)


if __name__ == "__main__":
    main()
