"""Copy as code: a row of buttons, one per action of a panel. Each copies Python that does the same in a cell, and shows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import anywidget
import traitlets

_JS = """
async function copied(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* not over http, or not allowed */ }
  const area = document.body.appendChild(document.createElement("textarea"));
  area.value = text;
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
function render({ model, el }) {
  const made = (tag, text, parent) => parent.appendChild(Object.assign(document.createElement(tag), { textContent: text }));
  el.classList.add("tk-code");
  const bar = made("div", "", el), code = made("pre", "", el), said = document.createElement("span");
  let open = null;
  const show = () => {
    const snippets = model.get("snippets"), found = snippets.find(([name]) => name === open);
    code.textContent = found ? found[1] : "";
    code.hidden = !found;
    return found;
  };
  const draw = () => {
    const names = model.get("snippets").map(([name]) => name).join();
    if (bar.dataset.names !== names) {
      bar.dataset.names = names;
      bar.textContent = "";
      made("span", "Copy as code:", bar);
      for (const [name] of model.get("snippets")) {
        const button = made("button", name, bar);
        button.type = "button";
        button.className = "jupyter-button";
        button.title = `Copy Python code for ${name}`;
        button.onclick = async () => { // a second click hides the code
          open = open === name ? null : name;
          const found = show();
          said.textContent = found ? ((await copied(found[1])) ? "Copied. Paste it into a cell." : "Select it and copy.") : "";
          button.focus();
        };
      }
      said.setAttribute("role", "status");
      bar.append(said);
    }
    const before = code.textContent;
    if (show() && before && code.textContent !== before) said.textContent = "It has changed since it was copied.";
  };
  model.on("change:snippets", draw);
  draw();
}
export default { render };
"""


class CopyAsCode(anywidget.AnyWidget):
    """The row of buttons. `snippets()` returns the code by action; it is called again when one of `fields` changes."""

    _esm = _JS
    snippets: traitlets.List[Any] = traitlets.List().tag(sync=True)

    def __init__(self, snippets: Callable[[], dict[str, str]], fields: Iterable[Any]) -> None:
        self._code, self._writing = snippets, threading.Lock()
        super().__init__()
        for one in fields:
            one.observe(lambda _: self.update(), "value")
        self.update()

    def update(self) -> None:
        """Write the code again, from the present values of the fields."""
        with self._writing:  # by two threads, the first one could write last, with older values
            self.snippets = [[name, f"import toolkit as tk\n\n{code}"] for name, code in self._code().items()]


def call(function: str, *arguments: Any, **options: Any) -> str:
    """Return the source of a call. Options that are None are left out."""
    parts = [repr(one) for one in arguments] + [f"{name}={value!r}" for name, value in options.items() if value is not None]
    return f"{function}({', '.join(parts)})"


class Name(str):
    """A name in the source of a call: shown without quotes."""

    def __repr__(self) -> str:
        return str(self)
