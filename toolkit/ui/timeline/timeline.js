// The timeline: a canvas that draws views of a trace. It asks a provider for each range of time that the user looks at:
// Python in a notebook (kernelWidget in shared.js), or page.js in a self-contained page.
// A view is the bytes that Scene.view packs, or the object that parseView returns.
//   provider.first            a view to draw at once, or null
//   provider.view(request)    -> Promise of a view; provider.late(view) is called for answers that come after the timeout
//   provider.facts(track, row)-> Promise of [[label, text], ...]
//   provider.step(request)    -> Promise of [number, start, end] or null
//   provider.table()          -> Promise of [{title, columns, rows, note}, ...]
//   provider.sums(request)    -> Promise of [events, ns covered, bytes] of each track's lanes in a range
//   provider.find(request)    -> Promise of the next event that contains a text, or null
// The timeline opens on one step (meta.step), at which all tracks are aligned; the overview is aligned at the starts.

const GUTTER = 184, AXIS = 24, TITLE = 24, STRIP = 20, LANE = 22, GAP = 3, MARGIN = 0.04, LEAST = 2, MODELLED = 128, NO_TEXT = 65535;
const COPIES = new Set(["h2d", "d2h", "d2d", "p2p"]);
const WORDS = { launch: "host launches", sync: "host waits", mark: "host marks", kernel: "kernels", collective: "collectives", h2d: "H2D", d2h: "D2H", d2d: "D2D", p2p: "P2P", memset: "memset" };
const KEYS = "Arrow keys move and zoom, plus and minus zoom, o changes between one step and everything, n and p go to the next and "
  + "previous step, full stop and comma to the next and previous copy, slash searches, s sums up what is shown, Shift with the "
  + "arrow keys selects a range, Enter zooms to it, Escape closes.";

function parseView(bytes) {
  if (bytes.counts) return bytes; // a view that page.js made
  const [view, buffer, start] = readHeader(bytes);
  const n = view.counts.flat().reduce((sum, count) => sum + count, 0);
  let at = start;
  const take = (Type) => { const array = new Type(buffer, at, n); at += n * Type.BYTES_PER_ELEMENT; return array; };
  for (const name of ["row", "count"]) view[name] = take(Uint32Array);
  view.bytes = take(Float32Array);
  for (const name of ["x0", "x1", "text"]) view[name] = take(Uint16Array);
  for (const name of ["kind", "level"]) view[name] = take(Uint8Array);
  return view;
}

const percent = (share) => (share <= 0 ? "0 %" : share >= 0.0995 ? `${Math.round(share * 100)} %` : share >= 0.001 ? `${(share * 100).toFixed(1)} %` : "<0.1 %");

function swatch(kind, hatched) {
  const color = `var(--tk-${kind})`;
  const fill = hatched ? `repeating-linear-gradient(135deg, ${color} 0 2px, color-mix(in srgb, ${color} 35%, transparent) 2px 5px)` : color;
  return element("span", { class: "tk-swatch", style: `background:${fill}` });
}

function legend(meta) {
  const clocks = new Set(meta.tracks.map((track) => track.clock));
  const hatched = !clocks.has("measured") && !clocks.has("mixed");
  const kinds = new Set(meta.tracks.flatMap((track) => track.lanes.map((lane) => lane.kind)));
  const keys = Object.keys(WORDS).filter((kind) => kinds.has(kind)).map((kind) => element("span", { class: "tk-key" }, swatch(kind, hatched), WORDS[kind]));
  const solid = clocks.has("measured") || clocks.has("mixed"), drawn = clocks.has("modelled") || clocks.has("mixed");
  if (kinds.has("launch")) keys.splice(2, 0, element("span", { class: "tk-key" }, swatch("python", false), "Python"));
  if (kinds.size && solid) keys.push(element("span", { class: "tk-key" }, swatch("dim", false), "solid: measured time"));
  if (kinds.size && drawn) keys.push(element("span", { class: "tk-key" }, swatch("dim", true), "hatched: modelled time"));
  return element("div", { class: "tk-row tk-legend" }, ...keys, ...linkKey(meta));
}

function tableOf(sheet) {
  const head = element("tr", {}, ...sheet.columns.map((name) => element("th", { scope: "col" }, name)));
  const rows = sheet.rows.map((row) => element("tr", {}, ...row.map((text, i) => element(i ? "td" : "th", i ? {} : { scope: "row" }, text))));
  const caption = element("caption", {}, [sheet.title, sheet.note].filter(Boolean).join(" · "));
  return element("table", {}, caption, element("thead", {}, head), element("tbody", {}, ...rows));
}

class TimelinePainter extends CanvasPainter {
  // Draws one view on the canvas, and keeps the boxes that it drew, so that a position can be turned into an event.
  constructor(canvas, meta) {
    super(canvas, meta, [GUTTER, 0], ["bg", "bar", "fg", "dim", "line", "lane", "accent", "python", ...Object.keys(WORDS)]);
    this.layout();
    canvas.style.height = `${this.height}px`;
  }

  layout() {
    this.lanes = [];
    this.headings = [];
    let y = AXIS;
    this.tops = this.meta.tracks.map((track, t) => {
      const top = { title: y, strip: y + TITLE };
      y += TITLE + (track.steps ? STRIP : 0);
      track.lanes.forEach((lane, i) => {
        const heading = lane.rank === track.lanes[i - 1]?.rank ? undefined : track.ranks?.find(({ rank }) => rank === lane.rank);
        if (heading) { this.headings.push({ y, text: heading.text }); y += HEADING; }
        const above = this.lanes.at(-1); // one row shows where the host's time goes: launches and, in the same place, waits
        const host = i && lane.kind === "sync" && above.kind === "launch" && above.rank === lane.rank;
        if (host) { above.hosts = true; this.lanes.push({ ...lane, track: t, index: i, y: above.y, top: true }); return; }
        this.lanes.push({ ...lane, track: t, index: i, y });
        y += LANE + GAP;
      });
      top.end = y;
      y += 6;
      return top;
    });
    this.height = y;
  }

  fill(kind, modelled) {
    const color = this.colors[kind];
    if (!modelled) return color;
    if (!this.patterns[kind]) {
      const tile = document.createElement("canvas"), r = this.ratio, n = Math.round(6 * r);
      tile.width = tile.height = n;
      const pen = tile.getContext("2d");
      pen.fillStyle = color; pen.globalAlpha = 0.38; pen.fillRect(0, 0, n, n);
      pen.globalAlpha = 1; pen.strokeStyle = color; pen.lineWidth = 1.7 * r;
      for (const d of [-n, 0, n]) { pen.beginPath(); pen.moveTo(d - 1, n + 1); pen.lineTo(d + n + 1, -1); pen.stroke(); }
      this.patterns[kind] = this.context.createPattern(tile, "repeat");
      this.patterns[kind].setTransform(new DOMMatrix().scale(1 / r));
    }
    return this.patterns[kind];
  }

  // Returns the x coordinate of a time.
  x(t) { return GUTTER + ((t - this.now.t0) / (this.now.t1 - this.now.t0)) * this.plot; }

  // Draws a text, shortened to its room; a `whole` one is left out instead. One with `ground` can be read over lines. Returns the width drawn.
  text(label, x, y, color, room, { size = 12, align = "left", bold = false, whole = false, ground = false } = {}) {
    const pen = this.context;
    pen.font = `${bold ? "600 " : ""}${size}px ${this.font}`;
    pen.fillStyle = this.colors[color]; pen.textAlign = align; pen.textBaseline = "middle";
    if (room < 14 || (whole && pen.measureText(label).width > room)) return 0;
    while (label.length > 1 && pen.measureText(label).width > room) label = label.slice(0, -2).trimEnd() + "…";
    const wide = pen.measureText(label).width;
    if (ground && wide <= room) this.ground(x - 3, y - size / 2 - 2, wide + 6, size + 4, color);
    if (wide <= room) pen.fillText(label, x, y);
    return wide;
  }

  // Draws what is behind a text that lies on bars or lines, and goes on in `color`.
  ground(x, y, wide, high, color) {
    const pen = this.context;
    pen.fillStyle = this.colors.bg; pen.globalAlpha = 0.86;
    pen.fillRect(x, y, wide, high);
    pen.fillStyle = this.colors[color]; pen.globalAlpha = 1;
  }

  paint(view, now, marks) {
    Object.assign(this, { now, view });
    this.prepare(60);
    const pen = this.context;
    for (const lane of this.lanes) {
      if (lane.top) continue;
      pen.fillStyle = this.colors.lane;
      pen.fillRect(GUTTER, lane.y, this.plot, LANE);
      if (lane.kind !== "launch" || !view) continue;
      const [x0, x1] = view.spans[lane.track].map((t) => Math.max(this.x(t), GUTTER)); // the host runs Python if nothing else
      pen.fillStyle = this.colors.python;
      pen.fillRect(x0, lane.y, Math.max(0, x1 - x0), LANE);
    }
    pen.save();
    pen.beginPath(); pen.rect(GUTTER, 0, this.plot, this.height); pen.clip();
    this.axis();
    this.boxes = [];
    if (view) { this.steps(view); this.segments(view); drawLinks(this, view, LANE); this.marks(marks); }
    pen.restore();
    this.labels();
  }

  labels() {
    drawHeadings(this);
    this.meta.tracks.forEach((track, t) => {
      const name = this.meta.tracks.length > 1 ? `${"AB"[t]}  ${track.title}` : track.title;
      const used = this.text(name, 4, this.tops[t].title + TITLE / 2, "fg", this.width * 0.55, { size: 13, bold: true });
      this.text(`${track.device} · ${track.clock} time · ${track.span}`, 16 + used, this.tops[t].title + TITLE / 2, "dim", this.width - used - 24);
      if (track.steps) this.text("steps", 4, this.tops[t].strip + STRIP / 2, "dim", GUTTER - 8);
    });
    for (const lane of this.lanes) {
      if (lane.top) continue;
      const share = this.shares?.[lane.track][lane.index] ?? 0, middle = lane.y + LANE / 2;
      const used = this.text(lane.hosts ? "host" : lane.label, 4, middle, "fg", 90);
      const place = lane.hosts ? `launch ${percent(share)}, wait ${percent(this.shares?.[lane.track][lane.index + 1] ?? 0)}` : lane.within;
      const right = lane.hosts ? 0 : this.text(percent(share), GUTTER - 6, middle, "dim", 60, { size: 11, align: "right" });
      this.text(place, 12 + used, middle, "dim", GUTTER - used - (right ? right + 22 : 14), { size: 11 });
    }
  }

  axis() {
    const { t0, t1 } = this.now, pen = this.context, [tick, label] = this.timeTicks(t1 - t0, Math.max(Math.abs(t0), Math.abs(t1)), 120);
    pen.strokeStyle = this.colors.line; pen.lineWidth = 1;
    for (let t = Math.ceil(t0 / tick) * tick; t <= t1; t += tick) {
      const x = Math.round(this.x(t)) + 0.5;
      pen.beginPath(); pen.moveTo(x, AXIS - 6); pen.lineTo(x, AXIS); pen.stroke();
      const right = this.text(label(t), x + 3, AXIS / 2 - 2, "dim", Math.min(110, this.width - x - 4), { size: 11, whole: true });
      if (!right && x - GUTTER > 110) this.text(label(t), x - 3, AXIS / 2 - 2, "dim", 60, { size: 11, align: "right", whole: true });
    }
  }

  steps(view) {
    const pen = this.context;
    view.steps.forEach((steps, t) => {
      const { strip, end } = this.tops[t];
      let free = -1e9;
      // narrow steps have a number only at round ones, which are also the only ones with a line through the lanes
      const widths = steps.reduce((sum, [, start, stop]) => sum + this.x(stop) - this.x(start), 0), least = (32 * steps.length) / widths;
      const power = 10 ** Math.floor(Math.log10(least)), every = view.every[t] > 1 || least <= 1 ? 1 : [1, 2, 5, 10].map((m) => m * power).find((n) => n >= least);
      for (const [i, [number, start, stop, name]] of steps.entries()) {
        const x0 = this.x(start), x1 = this.x(stop), next = i + 1 < steps.length ? this.x(steps[i + 1][1]) : x1; // steps of ranks overlap
        if (x1 < GUTTER || x0 > this.width) continue;
        pen.fillStyle = this.colors.lane;
        if (number % 2 === 0 && view.every[t] === 1) pen.fillRect(x0, strip, x1 - x0, STRIP - 3);
        pen.fillStyle = this.colors.line;
        pen.fillRect(Math.round(x0), strip, 1, number % every ? STRIP - 3 : end - strip);
        if (number % every) continue;
        const from = Math.max(x0, GUTTER) + 4, room = (view.every[t] === 1 && every === 1 ? Math.min(x1, next, this.width) : this.width) - from;
        const label = room > 90 && name && view.every[t] === 1 && every === 1 ? `${number} ${name}` : `${number}`;
        pen.font = `11px ${this.font}`;
        const wide = pen.measureText(label).width;
        if (from > free && wide < room) { this.text(label, from, strip + STRIP / 2 - 1, "fg", room, { size: 11 }); free = from + wide + 5; }
      }
    });
  }

  segments(view) {
    const pen = this.context, perPixel = (view.t1 - view.t0) / view.width / 16;
    let i = 0, first = 0;
    const shown = this.meta.tracks.map((track) => track.lanes.map(() => 0));
    view.counts.forEach((counts, t) => counts.forEach((count, index) => {
      const lane = this.lanes[first + index];
      let reached = GUTTER; // the end of the events so far, which may overlap
      for (const stop = i + count; i < stop; i++) {
        const x0 = this.x(view.t0 + view.x0[i] * perPixel), x1 = this.x(view.t0 + view.x1[i] * perPixel);
        if (x1 < GUTTER - 2 || x0 > this.width) continue;
        const wide = Math.max(x1 - x0 > 4 && view.count[i] === 1 ? x1 - x0 - 0.6 : x1 - x0, 1);
        // in proportion: an event that is narrower than a pixel is lower instead
        const share = (view.level[i] / 255) * Math.min(1, x1 - x0), high = Math.max(LEAST, LANE * share);
        const until = Math.max(reached, Math.min(x1, this.width));
        shown[lane.track][index] += (until - Math.max(x0, reached)) * (view.level[i] / 255);
        reached = until;
        pen.fillStyle = this.fill(lane.kind, view.kind[i] & MODELLED);
        pen.fillRect(x0, lane.top ? lane.y : lane.y + LANE - high, wide, high);
        this.boxes.push({ i, lane, x0, x1: x0 + wide });
        if (wide > 54 && view.count[i] === 1 && view.text[i] !== NO_TEXT) this.name(view.texts[view.text[i]][0], Math.max(x0, GUTTER), lane.y, Math.min(x0 + wide, this.width) - Math.max(x0, GUTTER));
      }
      if (index === counts.length - 1) first += counts.length;
    }));
    const within = view.spans.map((span) => { // the visible part of each run: a short run next to a long one isn't idle after its end
      const [x0, x1] = span.map((t) => Math.min(Math.max(this.x(t), GUTTER), this.width));
      return Math.max(1, x1 - x0);
    });
    this.shares = shown.map((lanes, t) => lanes.map((wide) => Math.min(1, wide / within[t])));
  }

  name(label, x, y, room) {
    const pen = this.context;
    pen.font = `11px ${this.font}`;
    if (!label || room < Math.min(96, pen.measureText(label).width + 16)) return; // a few letters are useless
    this.ground(x + 4, y + 4, Math.min(pen.measureText(label).width, room - 14) + 6, LANE - 8, "fg");
    this.text(label, x + 7, y + LANE / 2, "fg", room - 14, { size: 11 });
  }

  marks({ hovered, selected, range }) {
    const pen = this.context;
    const chosen = selected && this.boxes.find((box) => box.lane.track === selected.track && this.view.row[box.i] === selected.row && this.view.count[box.i] <= 1);
    for (const box of [hovered && this.boxes.find((b) => b.i === hovered.i), chosen]) {
      if (!box) continue;
      pen.strokeStyle = this.colors.fg; pen.lineWidth = 2;
      pen.strokeRect(box.x0 - 1, box.lane.y - 1, box.x1 - box.x0 + 2, LANE + 2);
    }
    if (range) {
      const [x0, x1] = range.map((t) => this.x(t)).sort((a, b) => a - b);
      pen.fillStyle = this.colors.accent; pen.globalAlpha = 0.16;
      pen.fillRect(x0, AXIS, x1 - x0, this.height);
      pen.globalAlpha = 1;
      for (const x of [x0, x1]) pen.fillRect(Math.round(x), AXIS, 1, this.height);
    }
  }

  // Returns the box (event or bin) under a point: the one that contains it, else the nearest within three pixels.
  hit(x, y) {
    let best = null, nearest = 3.01;
    for (const box of this.boxes || []) {
      if (y < box.lane.y - 1 || y > box.lane.y + LANE + 1) continue;
      const away = x < box.x0 ? box.x0 - x : x > box.x1 ? x - box.x1 : 0;
      if (away < nearest || (away === 0 && nearest === 0)) [best, nearest] = [box, away];
    }
    return best;
  }
}

function mount(root, provider, meta) {
  const state = { now: null, view: null, align: null, hovered: null, selected: null, range: null, step: null, way: 0 };
  const several = meta.tracks.length > 1, hasSteps = meta.tracks.some((track) => track.steps), home = meta.step ?? null;
  const canvas = element("canvas", {
    tabindex: "0", role: "application", "aria-roledescription": "timeline",
    "aria-label": `Timeline of ${meta.tracks.map((track) => `${track.title}: ${track.events} events, ${track.clock} time, ${track.span}`).join("; ")}. ${KEYS} The Table button shows the copies as a table.`,
  });
  const tip = element("div", { class: "tk-tip", hidden: "" }), status = element("div", { class: "tk-status", role: "status", "aria-live": "polite" });
  const detail = element("div", { class: "tk-detail", hidden: "", role: "region", "aria-label": "Selected event" });
  const sums = element("div", { class: "tk-detail tk-sums", hidden: "", role: "region", "aria-label": "Sums of a range", "aria-live": "polite" });
  const tables = element("div", { class: "tk-tables", hidden: "", tabindex: "0", role: "region", "aria-label": "Copies per step" });
  const stepInput = element("input", {
    type: "number", "aria-label": "Go to step", placeholder: "step", onchange: () => stepInput.value !== "" && goto(Number(stepInput.value)),
    onkeydown: (event) => event.key === "Enter" && canvas.focus({ preventScroll: true }), // in a notebook, Enter alone changes nothing
  });
  const tableButton = button("Copies per step as a table", "Table", () => toggleTable(), { "aria-expanded": "false" });
  const wholeButton = button("Everything, or one step (o)", "Overview", () => toggle());
  const found = element("span", { class: "tk-found", role: "status", "aria-live": "polite" });
  const searchInput = element("input", {
    type: "search", class: "tk-search", "aria-label": "Search names, lines and copies (/)", placeholder: "search ( / )", title: "Search names and lines, or h2d, d2h, d2d, p2p, layer 17 (/). Enter: next, Shift+Enter: previous",
    oninput: () => { found.textContent = ""; },
    onkeydown: (event) => {
      if (event.key === "Enter") find(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") canvas.focus({ preventScroll: true });
      event.stopPropagation();
    },
  });
  const tools = element("div", { class: "tk-row" },
    element("span", { class: "tk-tools" }, button("Zoom in (+)", "+", () => zoom(0.5)), button("Zoom out (-)", "−", () => zoom(2)), wholeButton),
    ...(hasSteps ? [element("span", { class: "tk-tools" }, button("Previous step (p)", "◀", () => move(-1)), stepInput, button("Next step (n)", "▶", () => move(1)))] : []),
    element("span", { class: "tk-tools" }, searchInput, found), element("span", { class: "tk-grow" }),
    button("Sums of what is shown (s)", "Sums", () => sumUp()), tableButton);
  const notes = [...new Set(meta.tracks.flatMap((track) => track.notes))].map((note) => element("p", { class: "tk-note" }, note));
  const clocks = [...new Set(meta.tracks.map((track) => track.clock))].join(" and ");
  const answer = meta.sentence ? [element("p", { class: "tk-answer" }, meta.sentence, element("span", {}, ` (${home === null ? "all" : `step ${home}`}, ${clocks} time)`))] : [];
  const plot = element("div", { class: "tk-plot" }, canvas);
  const frame = element("div", { class: "tk-timeline", "data-lm-suppress-shortcuts": "true" }, ...answer, tools, legend(meta), ...notes, plot, status, detail, sums, tables, tip);
  root.replaceChildren(frame);
  const painter = new TimelinePainter(canvas, meta);

  let failed = false, closed = false;
  const draw = framePainter(frame, () => {
    if (closed || !state.now || !canvas.clientWidth) return false;
    if (state.view && state.view.align !== state.align) return false; // the next view has another origin of time
    painter.paint(state.view, state.now, state);
    say();
    return true;
  });
  const say = () => {
    if (!state.view) return;
    wholeButton.textContent = state.align === null && hasSteps ? "One step" : "Overview";
    const gathered = state.view.count.some((n) => n > 1), every = Math.max(...state.view.every);
    const { t0, t1 } = state.now, early = state.align !== null && t0 <= -1;
    const from = Math.abs(t0) < 1 ? 0 : timeText(early ? -t0 : t0), place = early ? "before the start of" : "of";
    const parts = [`${timeText(t1 - t0)} shown, from ${from}${state.align === null ? "" : ` ${place} step ${state.align}`}`];
    if (gathered) parts.push("the height of a bar is the busy share of several events: zoom in to see single events");
    if (every > 1) parts.push(`one step in ${every} is marked`);
    if (failed) parts.push("the kernel does not answer: this is the last view");
    const text = parts.join(" · ");
    if (status.textContent !== text) status.textContent = text;
  };
  const accept = (bytes, asked) => {
    state.view = parseView(bytes);
    failed = false;
    if (!state.now) {
      state.now = { t0: state.view.t0, t1: state.view.t1 };
      state.align = state.view.align;
      if (state.align !== null) stepInput.value = state.step = state.align;
    }
    Object.assign(frame.dataset, { seq: state.view.seq, bytes: bytes.byteLength ?? 0, ...(asked ? { ms: (performance.now() - asked).toFixed(1) } : {}) });
    draw();
    rescue();
  };
  const unanswered = () => {
    failed = true;
    if (state.view && state.view.align !== state.align) { state.align = state.view.align; state.now = { t0: state.view.t0, t1: state.view.t1 }; }
    draw();
    say();
  };
  const requests = viewRequests(provider, accept, unanswered);
  const look = (t0, t1, way = 0) => {
    if (state.view?.align === state.align) {
      const [low, high] = state.view.bounds, pad = (high - low) * 0.02;
      const span = Math.min(Math.max(t1 - t0, 50), high - low + 2 * pad);
      const middle = Math.min(Math.max((t0 + t1) / 2, low - pad + span / 2), high + pad - span / 2);
      [t0, t1] = [middle - span / 2, middle + span / 2];
    }
    state.now = { t0, t1 };
    state.way = way;
    hover(null);
    ask();
  };
  // An empty view moves to the nearest event, or to the next one in the direction of the last move.
  const rescue = () => {
    const { view, now, way } = state;
    if (!view.near || drag || view.t0 !== now.t0 || view.t1 !== now.t1) return;
    const [before, after] = view.near, half = (now.t1 - now.t0) / 2;
    if (before === null && after === null) return;
    const forward = after !== null && (before === null || (way ? way > 0 : after - now.t1 < now.t0 - before));
    const at = forward ? after : before;
    look(at - half, at + half);
  };
  const ask = () => {
    if (!canvas.clientWidth || !state.now) return;
    requests.ask({ ...state.now, width: Math.round(canvas.clientWidth - GUTTER), align: state.align });
    draw();
  };

  const zoom = (factor, x = GUTTER + painter.plot / 2) => {
    const at = state.now.t0 + ((x - GUTTER) / painter.plot) * (state.now.t1 - state.now.t0);
    look(at - (at - state.now.t0) * factor, at + (state.now.t1 - at) * factor);
  };
  const pan = (share) => { const by = (state.now.t1 - state.now.t0) * share; look(state.now.t0 + by, state.now.t1 + by, share); };
  const fit = () => { state.align = null; const [low, high] = meta.whole, pad = (high - low) * 0.01; look(low - pad, high + pad); };
  const toggle = () => (state.align === null && hasSteps ? goto(state.step ?? home ?? 0) : fit());
  const show = (steps) => {
    const ranges = steps.filter(Boolean);
    if (!ranges.length) return;
    state.step = ranges[0][0];
    stepInput.value = state.step;
    const t0 = Math.min(...ranges.map((r) => r[1])), t1 = Math.max(...ranges.map((r) => r[2]));
    look(t0 - (t1 - t0) * MARGIN, t1 + (t1 - t0) * MARGIN);
  };
  const goto = async (step) => {
    if (!Number.isFinite(step)) return;
    try {
      const steps = await Promise.all(meta.tracks.map((_, track) => provider.step({ align: step, step, track })));
      state.align = steps.find(Boolean)?.[0] ?? state.align; // the nearest step there is
      show(steps);
    } catch { unanswered(); }
  };
  let moving = Promise.resolve(); // a queue, so that two quick presses move two steps
  const move = (by) => { moving = moving.then(() => step(by)); };
  const step = async (by) => {
    const from = state.step === null ? { near: state.now.t0, move: by > 0 ? 1 : 0 } : { step: state.step, move: by };
    try {
      const steps = await Promise.all(meta.tracks.map((_, track) => provider.step({ ...from, align: state.align, track })));
      const numbers = steps.filter(Boolean).map(([number]) => number).filter((number) => state.step === null || (number - state.step) * by > 0);
      if (numbers.length) await goto(by > 0 ? Math.min(...numbers) : Math.max(...numbers));
    } catch { unanswered(); }
  };

  const find = async (by) => {
    const text = searchInput.value.trim(), last = find.last?.text === text && find.last.align === state.align ? find.last.number : null;
    if (!text || !state.now) return;
    try {
      const hit = await provider.find({ text, near: state.now.t0 - 1, last, move: by, align: state.align });
      found.textContent = hit ? `${grouped(hit.number)} of ${grouped(hit.count)}` : "not found";
      if (!hit) return;
      find.last = { text, number: hit.number, align: state.align };
      const span = Math.min(state.now.t1 - state.now.t0, Math.max(hit.end - hit.start, 1) * 40), middle = (hit.start + hit.end) / 2;
      state.selected = { track: hit.track, row: hit.row };
      look(middle - span / 2, middle + span / 2);
      const lane = painter.lanes.find((one) => one.track === hit.track);
      describe(hit.track, hit.row, [["", text]], lane);
    } catch { unanswered(); }
  };

  const sumsTable = (t0, t1, tracks) => {
    const rows = [];
    meta.tracks.forEach((track, t) => {
      const [start, end] = state.view.spans[t], span = Math.max(1, Math.min(t1, end) - Math.max(t0, start)); // a run isn't in Python after its end
      const add = (title, label, count, busy, bytes) => rows.push([title, label, count, `${timeText(busy)} (${percent(busy / span)})`, bytes]);
      const title = several ? `${"AB"[t]} ${track.title}` : track.title;
      track.lanes.forEach((lane, i) => { const [count, busy, bytes] = tracks[t][i]; add(title, `${lane.label} ${lane.place}`.trim(), grouped(count), busy, bytes ? bytesText(bytes) : ""); });
      for (const { rank, place } of track.lanes.filter((lane) => lane.kind === "launch")) {
        const busy = track.lanes.reduce((sum, lane, i) => sum + (lane.rank === rank && ["launch", "sync"].includes(lane.kind) ? tracks[t][i][1] : 0), 0);
        add(title, `host${place && ` of ${place}`}, neither launching nor waiting: Python`, "", Math.max(0, span - busy), "");
      }
    });
    return tableOf({ title: `Sums of ${timeText(t1 - t0)}, from ${timeText(t0)}`, columns: ["run", "lane", "events", "time", "bytes"], rows });
  };
  const sumUp = async (t0 = state.now.t0, t1 = state.now.t1) => {
    const mine = (sumUp.latest = {}); // an answer that comes after Escape must not open the sums again
    try {
      const tracks = await provider.sums({ t0, t1, align: state.align });
      if (sumUp.latest !== mine) return;
      sums.replaceChildren(button("Close", "✕", closing(() => clear())), button("Zoom to this range (Enter)", "Zoom", () => toRange()), sumsTable(t0, t1, tracks));
      sums.hidden = false;
    } catch { unanswered(); }
  };
  const clear = () => { sumUp.latest = null; sums.hidden = true; state.range = null; draw(); };
  const closing = (act) => () => { act(); canvas.focus({ preventScroll: true }); }; // keys go on working after a panel is closed
  const toRange = () => { if (!state.range) return; const range = state.range; state.range = null; look(Math.min(...range), Math.max(...range)); };
  // Grows the selected range with the keys; it starts in the middle of the view.
  const extend = (share) => {
    const { t0, t1 } = state.now, by = (t1 - t0) * share, [from, to] = state.range ?? [(t0 + t1) / 2, (t0 + t1) / 2];
    state.range = [from, to + by];
    draw();
    sumUp(Math.min(...state.range), Math.max(...state.range));
  };

  const short = (i) => {
    const [name, where] = state.view.text[i] === NO_TEXT ? ["", ""] : state.view.texts[state.view.text[i]];
    return { name, where, bytes: state.view.bytes[i], count: state.view.count[i] };
  };
  const summary = (box) => {
    const { name, where, bytes, count } = short(box.i), modelled = state.view.kind[box.i] & MODELLED;
    if (count > 1) {
      const busyShare = Math.round((state.view.level[box.i] / 255) * 100);
      return [["", `${grouped(count)} × ${box.lane.label}`], ...(bytes ? [["bytes", bytesText(bytes)]] : []), ["busy", `${busyShare < 1 ? "under 1" : busyShare} % of this bar`], ["time", modelled ? "modelled" : "measured"]];
    }
    const span = ((state.view.x1[box.i] - state.view.x0[box.i]) / 16 / state.view.width) * (state.view.t1 - state.view.t0);
    return [["", name || box.lane.label], ...(bytes ? [["bytes", bytesText(bytes)]] : []), ["duration", `about ${timeText(span)}, ${modelled ? "modelled" : "measured"}`], ...(where ? [["caused by", where]] : [])];
  };
  const listOf = (pairs) => element("dl", {}, ...pairs.filter(([label]) => label).flatMap(([label, text]) => [element("dt", {}, label), element("dd", {}, text)]));
  const hover = (box, x = 0, y = 0) => {
    if (!box) { if (!tip.hidden) { tip.hidden = true; state.hovered = null; draw(); } return; }
    if (state.hovered?.i !== box.i) {
      state.hovered = { i: box.i };
      const fill = (pairs) => tip.replaceChildren(element("b", {}, pairs[0][1]), ...pairs.slice(1).map(([label, text]) => element("div", {}, `${label}: ${text}`)));
      fill(summary(box));
      draw();
      if (state.view.count[box.i] <= 1) {
        const mine = state.hovered, wantedFacts = ["bytes", "caused by", "source", "duration", "operation", "waited", "step", "layer", "stream", "host memory"];
        clearTimeout(hover.timer);
        hover.timer = setTimeout(() => provider.facts(box.lane.track, state.view.row[box.i]).then((facts) => {
          if (state.hovered === mine && facts.length) fill([["", facts.find(([l]) => l === "name")?.[1] || box.lane.label], ...facts.filter(([label]) => wantedFacts.includes(label))]);
        }, () => {}), 60);
      }
    }
    tip.hidden = false;
    const inside = frame.getBoundingClientRect(), own = canvas.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + own.left - inside.left + 14, inside.width - tip.offsetWidth - 8))}px`;
    tip.style.top = `${y + own.top - inside.top + 20}px`;
  };
  const choose = (box) => {
    if (!box) { detail.hidden = true; state.selected = null; return draw(); }
    const row = state.view.row[box.i], single = state.view.count[box.i] <= 1;
    state.selected = { track: box.lane.track, row };
    draw();
    return describe(box.lane.track, row, summary(box), box.lane, single);
  };
  const describe = async (track, row, pairs, lane, single = true) => {
    const fill = () => {
      const title = several ? `${"AB"[track]} ${meta.tracks[track].title}: ${pairs[0][1]}` : pairs[0][1];
      detail.replaceChildren(button("Close", "✕", closing(() => choose(null))), element("b", {}, title), listOf(pairs.slice(1)));
      detail.hidden = false;
    };
    fill();
    const mine = state.selected;
    if (single) {
      try {
        const facts = await provider.facts(track, row);
        if (facts.length && state.selected === mine) { pairs = [["", facts.find(([label]) => label === "name")?.[1] || lane.label], ...facts.filter(([label]) => label !== "name")]; fill(); }
      } catch { /* without a kernel, the summary stays */ }
    }
  };
  const nextCopy = (by) => {
    const copies = (painter.boxes || []).filter((box) => COPIES.has(box.lane.kind) && state.view.count[box.i] <= 1).sort((a, b) => a.x0 - b.x0);
    if (!copies.length) return;
    const at = copies.findIndex((box) => state.selected && box.lane.track === state.selected.track && state.view.row[box.i] === state.selected.row);
    choose(copies[at < 0 ? (by > 0 ? 0 : copies.length - 1) : Math.min(Math.max(at + by, 0), copies.length - 1)]);
  };
  const toggleTable = async () => {
    tables.hidden = !tables.hidden;
    tableButton.setAttribute("aria-expanded", String(!tables.hidden));
    if (tables.hidden || tables.childElementCount) return;
    try { tables.replaceChildren(...(await provider.table()).map(tableOf)); }
    catch { tables.replaceChildren(); tables.hidden = true; tableButton.setAttribute("aria-expanded", "false"); status.textContent = "The kernel does not answer: press again when it is idle, or run the cell again."; }
  };

  let drag = null;
  const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const listen = {
    wheel: (event) => {
      const plot = canvas.parentElement, scrolls = plot.scrollHeight > plot.clientHeight && Math.abs(event.deltaY) >= Math.abs(event.deltaX);
      if (!state.now || (scrolls && at(event)[0] < GUTTER)) return; // over the names of lanes, it scrolls
      event.preventDefault();
      const scale = event.deltaMode ? 33 : 1;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX * scale) / painter.plot);
      else zoom(Math.exp(Math.max(-2, Math.min(2, event.deltaY * scale * 0.0022))), Math.max(GUTTER, at(event)[0]));
    },
    pointerdown: (event) => {
      if (event.button !== 0 || !state.now) return;
      canvas.focus({ preventScroll: true });
      canvas.setPointerCapture(event.pointerId);
      const [x, y] = at(event);
      const { t0, t1 } = state.now;
      drag = { x, y, t0, t1, select: event.shiftKey, moved: false, time: (px) => t0 + ((px - GUTTER) / painter.plot) * (t1 - t0) };
    },
    pointermove: (event) => {
      const [x, y] = at(event);
      if (!drag) return hover(painter.hit(x, y), x, y);
      drag.moved ||= Math.abs(x - drag.x) > 3;
      if (!drag.moved) return undefined;
      if (drag.select) { state.range = [drag.x, x].map(drag.time); return draw(); }
      canvas.classList.add("tk-dragging");
      const by = ((drag.x - x) / painter.plot) * (drag.t1 - drag.t0);
      return look(drag.t0 + by, drag.t1 + by, by);
    },
    pointerup: (event) => {
      const [x, y] = at(event), was = drag;
      drag = null;
      canvas.classList.remove("tk-dragging");
      if (!was) return;
      if (!was.moved) choose(painter.hit(x, y));
      else if (was.select) state.range && sumUp(Math.min(...state.range), Math.max(...state.range));
      else if (state.view) rescue();
    },
    pointercancel: () => { drag = null; state.range = null; },
    pointerleave: () => hover(null),
    dblclick: () => fit(),
    keydown: (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !state.now) return;
      const selecting = event.shiftKey && { ArrowLeft: () => extend(-0.02), ArrowRight: () => extend(0.02) }[event.key];
      const act = selecting || {
        ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => zoom(0.6), ArrowDown: () => zoom(1 / 0.6),
        "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), Home: fit, o: toggle, s: () => sumUp(), "/": () => searchInput.focus(), Enter: toRange, n: () => move(1), p: () => move(-1),
        ".": () => nextCopy(1), ",": () => nextCopy(-1), Escape: () => { choose(null); clear(); },
      }[event.key];
      if (act) { event.preventDefault(); event.stopPropagation(); act(); }
    },
  };
  for (const [name, handler] of Object.entries(listen)) canvas.addEventListener(name, handler, name === "wheel" ? { passive: false } : undefined);

  const release = watchCanvas(canvas, () => { ask(); draw.now(); }, () => { painter.colors = null; draw(); });
  if (provider.first?.byteLength) accept(provider.first);
  else if (home === null) fit();
  else goto(home);
  return () => { closed = true; requests.drop(); release(); };
}

export default kernelWidget(mount, (send) => ({
  facts: (track, row) => send({ type: "facts", track, row }),
  step: (request) => send({ type: "step", ...request }),
  table: () => send({ type: "table" }),
  sums: (request) => send({ type: "sums", ...request }),
  find: (request) => send({ type: "find", ...request }),
}));
