"""Chat templates: a checkpoint's own Jinja program lays out the messages of a chat, boxed in.

The template is somebody else's program: it runs sandboxed, in a process of its own, bounded in time and memory. Knows no
tokenizer and no model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from toolkit.core.errors import ToolkitError

SECONDS, BYTES = 10.0, 1 << 30

_RENDER = f"""
import datetime, json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({BYTES}, {BYTES}))
except ImportError:
    pass
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
class Generation(Extension):
    tags = {{"generation"}}
    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True)).set_lineno(line)
def refuse(message):
    raise TemplateError(message)
def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
given = json.load(sys.stdin)
try:
    parts = ["jinja2.ext.loopcontrols", Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=parts)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = tojson
    answer = dict(text=environment.from_string(given["template"]).render(**given["values"]))
except MemoryError:
    answer = dict(error="it needs more than 1 GiB")
except Exception as error:
    answer = dict(error=f"{{type(error).__name__}}: {{error!s:.300}}")
json.dump(answer, sys.stdout)
"""


def render(template: str, values: Mapping[str, Any]) -> str:
    """`template` rendered with `values` in a process of its own, which may use 10 seconds and 1 GiB. Raises ToolkitError."""
    asked, do = "a chat prompt", "Check the messages against the model card, or give a plain prompt"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _RENDER],
            input=json.dumps({"template": template, "values": values}),
            capture_output=True,
            encoding="utf-8",
            timeout=SECONDS,
            cwd=tempfile.gettempdir(),
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise ToolkitError(asked, f"the chat template ran for {SECONDS:.0f} s", do) from error
    except (TypeError, ValueError) as error:
        raise ToolkitError(asked, f"the chat template or its messages can't be rendered ({error!s:.200})", do) from error
    if "error" in answer:
        raise ToolkitError(asked, f"the chat template fails ({answer['error']})", do)
    return str(answer["text"])
