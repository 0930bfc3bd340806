"""Register the renderers of the toolkit's objects. `core.display.render` imports this file when an object is first drawn."""

from __future__ import annotations

from toolkit.core.display import register

for type_name, view, renderer in (
    ("toolkit.trace.events.Trace", "timeline", "timeline.widget:Timeline"),
    ("toolkit.trace.events.Trace", "page", "timeline.page:write_page"),
    ("toolkit.decode.run.Run", "timeline", "timeline.widget:Timeline"),
    ("toolkit.decode.run.Run", "page", "timeline.page:write_page"),
    ("toolkit.decode.compare.Comparison", "page", "timeline.page:write_comparison"),
    ("toolkit.core.progress.Reporter", "progress", "progress:CellProgress"),
    ("toolkit.models.costs.Shown", "text", "figures.model:text_of"),
    ("toolkit.models.costs.Shown", "html", "figures.model:html_of"),
    ("toolkit.planning.costs.Costs", "text", "figures.model:text"),
    ("toolkit.planning.costs.Costs", "html", "figures.model:html"),
    ("toolkit.planning.plans.Plan", "html", "figures.plan:html"),
    ("toolkit.exporting.exporter.Package", "html", "figures.plan:package_html"),
    ("toolkit.tune.results.Tuning", "html", "figures.tuning:html"),
    ("toolkit.vram.measure.MemoryUse", "timeline", "memory.widget:MemoryTimeline"),
    ("toolkit.vram.measure.MemoryUse", "page", "memory.page:write_memory_page"),
    ("toolkit.vram.measure.MemoryUse", "html", "memory.picture:html"),
):
    register(type_name, view, f"toolkit.ui.{renderer}")
