"""What the Lab shows of a model on the ranks of a cluster: where it is, what each rank loaded, and the memory of each."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from toolkit.core.errors import ToolkitError
from toolkit.core.units import bytes_text, seconds_text
from toolkit.models.model import Model
from toolkit.ranks.cluster import Cluster
from toolkit.ranks.remote import RankedModel

IN_RANKS = "its memory is in the processes of the ranks. In a cell, lab.cluster.memory measures a function there"


def place_of(model: Model | RankedModel) -> str:
    """Return the name of the device of a model: "virtual:h200", or "2 x virtual:h200" of a cluster."""
    return name_of(model.cluster) if isinstance(model, RankedModel) else model.device.name


def name_of(cluster: Cluster) -> str:
    """Return the name of the devices of a cluster: "2 x virtual:h200"."""
    return f"{cluster.ranks} x {cluster.device}"


def loaded_html(model: RankedModel) -> str:
    """Return the table of what each rank has loaded."""
    rows = []
    for rank, report in enumerate(model.reports):
        kinds = escape(", ".join(f"{bytes_text(size)} {kind}" for kind, size in report.bytes_by_kind.items()))
        peak = "-" if report.peak_bytes is None else bytes_text(report.peak_bytes)
        rows.append((str(rank), bytes_text(report.weight_bytes), kinds, peak, seconds_text(report.seconds)))
    return _table(("rank", "weights", "stored as", "peak", "loaded in"), rows)


def now_html(cluster: Cluster) -> str:
    """Return the present memory of each rank's device, or why it is not known."""
    try:
        found = cluster.memory_now()
    except ToolkitError as error:
        return f"The memory of {escape(name_of(cluster))} is not known: {escape(error.found)}."
    rows = [
        (
            str(rank),
            *(bytes_text(size) for size in (each.allocated_bytes, each.reserved_bytes, each.peak_bytes, each.total_bytes)),
        )
        for rank, each in enumerate(found)
    ]
    counted = any(each.total_bytes for each in found)
    head = f"<b>{escape(name_of(cluster))}</b> now, by rank" if counted else "The memory of the CPU isn't counted."
    return head + (_table(("rank", "allocated", "reserved", "peak", "memory"), rows) if counted else "")


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="tk-wrap tk-ranks"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
