// Several ranks on the canvas of a timeline: a heading above the lanes of each rank, and lines between the events of one
// collective, with a dot at the start of the rank that came last. `ranks.py` makes the data.

const HEADING = 20;

// Draws the headings that `layout` placed: painter.headings is [{ y, text }, ...].
function drawHeadings(painter) {
  for (const { y, text } of painter.headings) {
    const [name, ...rest] = text.split(" · "), pen = painter.context;
    pen.fillStyle = painter.colors.line;
    pen.fillRect(0, y + 1, painter.width, 1);
    const used = painter.text(name, 4, y + HEADING / 2 + 2, "fg", 90, { bold: true });
    painter.text(rest.join(" · "), 14 + used, y + HEADING / 2 + 2, "dim", painter.width - used - 20, { size: 11, ground: true }); // over the lines of collectives and steps
  }
}

// Draws the lines of a view: view.links has, for each track, [position of the last rank (-1: none), [lane, start], ...] per collective.
function drawLinks(painter, view, laneHeight) {
  const pen = painter.context;
  let first = 0;
  (view.links ?? []).forEach((links, t) => {
    for (const [last, ...points] of links) {
      const at = points.map(([lane, start]) => [painter.x(start), painter.lanes[first + lane].y]);
      pen.strokeStyle = pen.fillStyle = painter.colors.collective;
      pen.lineWidth = 1;
      pen.beginPath();
      [...at].sort((a, b) => a[1] - b[1]).forEach(([px, py], i, sorted) => {
        if (i) pen.lineTo(px, py);
        if (i < sorted.length - 1) pen.moveTo(px, py + laneHeight);
      });
      pen.stroke();
      if (last < 0) continue; // all came at the same time
      const [x, y] = at[last];
      pen.beginPath(); pen.arc(x, y + laneHeight / 2, 4, 0, 2 * Math.PI); pen.fill();
      pen.strokeStyle = painter.colors.bg; pen.lineWidth = 1.5; pen.stroke();
    }
    first += painter.meta.tracks[t].lanes.length;
  });
}

const linkKey = (meta) => (meta.tracks.some((track) => track.ranks?.length && track.lanes.some((lane) => lane.kind === "collective"))
  ? [element("span", { class: "tk-key" }, element("span", { class: "tk-last" }), "line: one collective; dot: the rank that came last")] : []);
