"""Chat templates: a checkpoint brings a Jinja program that turns the messages of a chat into a prompt.

The template is untrusted code. `render` runs it in Jinja's sandbox and in a process of its own, with limits on time and memory.
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
from toolkit.text import chat_renderer

SECONDS = 10.0


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return `template` rendered with `values`.

    The process that renders it may use 10 seconds and 1 GiB. Raises ToolkitError if it exceeds a limit, if the template
    fails, or if `values` cannot be written as JSON.
    """
    asked, do = "a chat prompt", "Check the messages against the model card, or give a plain prompt"
    try:
        done = subprocess.run(
            [sys.executable, "-P", chat_renderer.__file__],  # -P: the folder of the script is not on sys.path
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
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolkitError(asked, f"the chat template or its messages can't be rendered ({error!s:.200})", do) from error
    if "error" in answer:
        raise ToolkitError(asked, f"the chat template fails ({answer['error']})", do)
    return str(answer["text"])
