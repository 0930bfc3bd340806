// Memory over time: a canvas of stacked bands. It asks a provider for the columns of each range that the user looks at:
// Python in a notebook (kernelWidget in shared.js), or pageProvider below in a self-contained page.
//   provider.first            a view to draw at once, or null
//   provider.view(request)    -> Promise of a view; provider.late(view) is called for answers that come after the timeout
//   provider.at(position)     -> Promise of the blocks alive at that position, grouped by holder

const LEFT = 82, RIGHT = 10, TOP = 24, HIGH = 300, TICKS = 20, MARKS = 18, NEAR = 2;
const KEYS = "Arrow keys move and zoom, plus and minus zoom, 0 shows everything, p lists the blocks alive at the peak, "
  + "comma and full stop go to the previous and next change, Escape closes the list.";

function parseView(bytes) {
  if (bytes.total) return bytes; // a view that pageProvider made
  const [view, buffer, start] = readHeader(bytes);
  let at = start;
  for (const name of ["position", "total", "reserved", "time"]) { view[name] = new Float64Array(buffer, at, view.width); at += 8 * view.width; }
  view.held = view.bands.map(() => { const band = new Float32Array(buffer, at, view.width); at += 4 * view.width; return band; });
  return view;
}

class MemoryPainter extends CanvasPainter {
  // Draws one view on the canvas, stretched to the range on display, and turns positions into columns and bands.
  constructor(canvas, meta) {
    super(canvas, meta, [LEFT, RIGHT], ["bg", "bar", "fg", "dim", "line", "lane", "accent", "bad"]);
    this.bottom = TOP + HIGH;
    this.height = this.bottom + TICKS + (meta.divided ? MARKS : 0);
  }

  x(value) { return LEFT + ((value - this.now.x0) / (this.now.x1 - this.now.x0)) * this.plot; }
  value(x) { return this.now.x0 + ((x - LEFT) / this.plot) * (this.now.x1 - this.now.x0); }
  y(bytes) { return this.bottom - ((bytes - this.low) / (this.high - this.low)) * HIGH; }
  bytes(y) { return this.low + ((this.bottom - y) / HIGH) * (this.high - this.low); }
  column(x) {
    const i = Math.floor(((this.value(x) - this.view.x0) / (this.view.x1 - this.view.x0)) * this.view.width);
    return Math.min(Math.max(i, 0), this.view.width - 1);
  }

  scale(zoomed) {
    const { peak, reserved, limit } = this.meta;
    let top = Math.max(peak, reserved, 1), low = 0;
    if (limit && limit[0] <= NEAR * top) top = Math.max(top, limit[0]);
    if (zoomed) {
      const total = this.view.total.subarray(this.column(LEFT), this.column(LEFT + this.plot - 1) + 1);
      [low, top] = [Math.min(...total), Math.max(...total)];
      const pad = Math.max((top - low) * 0.1, top * 0.002, 512);
      const step = this.step(low - pad, top);
      low = Math.max(0, Math.floor((low - pad) / step) * step);
    }
    [this.low, this.high] = [low, top + Math.max((top - low) * 0.1, 1)];
  }

  text(label, x, y, color, align = "left", bold = false) {
    const pen = this.context;
    pen.font = `${bold ? "600 " : ""}12px ${this.font}`;
    Object.assign(pen, { textAlign: align, textBaseline: "middle", lineWidth: 3, lineJoin: "round", strokeStyle: this.colors.bg, fillStyle: this.colors[color] });
    pen.strokeText(label, x, y); // an outline, so that the text is readable on any band
    pen.fillText(label, x, y);
    return pen.measureText(label).width;
  }

  line(points, color, { width = 1, dash = [] } = {}) {
    const pen = this.context;
    pen.beginPath();
    points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    Object.assign(pen, { strokeStyle: this.colors[color], lineWidth: width });
    pen.setLineDash(dash);
    pen.stroke();
    pen.setLineDash([]);
  }

  paint(state) {
    Object.assign(this, { now: state.now, view: state.view });
    this.prepare(80);
    const pen = this.context;
    if (!this.view) return;
    this.scale(state.zoomed);
    this.grid();
    pen.save();
    pen.beginPath(); pen.rect(LEFT, 0, this.plot, this.bottom); pen.clip();
    this.areas(state.chosen);
    this.lines();
    if (state.hovered !== null) this.upright(state.hovered, "dim", 1);
    if (state.pinned) this.upright(state.pinned.x, "fg", 2);
    pen.restore();
    this.axis();
    this.marks();
    this.labels();
  }

  step(low, high) { return 2 ** Math.max(0, Math.floor(Math.log2((high - low) / 5))); }

  grid() {
    const step = this.step(this.low, this.high);
    for (let n = this.low; n <= this.high; n += step) { // if the axis begins above 0: 45.6 MiB, +128 KiB, +256 KiB
      const y = Math.round(this.y(n)) + 0.5;
      this.line([[LEFT, y], [LEFT + this.plot, y]], "lane");
      if (y > 7) this.text(n === 0 ? "0" : n === this.low ? bytesText(n) : `${this.low ? "+" : ""}${bytesText(n - this.low)}`, LEFT - 8, y, "dim", "right");
    }
  }

  // Returns the corners of a step line over the columns, from left to right.
  stairs(heights) {
    const { view } = this, wide = (view.x1 - view.x0) / view.width, points = [];
    let last = null;
    for (let i = 0; i < view.width; i++) {
      if (heights[i] === last) continue;
      const x = this.x(view.x0 + i * wide);
      if (last !== null) points.push([x, this.y(last)]);
      points.push([x, this.y(heights[i])]);
      last = heights[i];
    }
    points.push([this.x(view.x1), this.y(last)]);
    return points;
  }

  areas(chosen) {
    const pen = this.context, { view } = this;
    let under = new Float64Array(view.width), edge = this.stairs(under);
    view.held.forEach((held, b) => {
      const over = under.map((n, i) => n + Math.max(held[i], 0)), next = this.stairs(over);
      pen.beginPath();
      next.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
      for (let i = edge.length - 1; i >= 0; i--) pen.lineTo(...edge[i]);
      pen.closePath();
      pen.fillStyle = view.bands[b][1];
      pen.globalAlpha = chosen === null || chosen === view.bands[b][0] ? 1 : 0.22;
      pen.fill();
      pen.globalAlpha = 1;
      [under, edge] = [over, next];
    });
  }

  lines() {
    const { limit, reserved } = this.meta;
    if (reserved) this.line(this.stairs(this.view.reserved), "fg", { dash: [5, 3] });
    if (limit && limit[0] <= this.high && limit[0] >= this.low) this.line([[LEFT, this.y(limit[0])], [LEFT + this.plot, this.y(limit[0])]], "bad", { width: 2 });
    for (const [at, asked] of this.view.shortages) {
      const x = this.x(at), i = this.column(x), y = this.y(this.view.total[i]);
      this.line([[x, y], [x, Math.max(this.y(this.view.total[i] + asked), TOP)]], "bad", { width: 2, dash: [3, 2] });
      for (const d of [-4, 4]) this.line([[x - 4, y - d], [x + 4, y + d]], "bad", { width: 2 });
    }
  }

  upright(value, color, width) { const x = this.x(value); this.line([[x, TOP - 8], [x, this.bottom]], color, { width }); }

  labels() {
    const { limit, peak } = this.meta, x = this.x(this.view.peakX), y = this.y(peak), inside = x >= LEFT - 1 && x <= LEFT + this.plot;
    if (limit && limit[0] <= this.high && limit[0] >= this.low) {
      const left = inside && x > LEFT + this.plot / 2;
      const words = `${limit[1]} ${bytesText(limit[0])}`, y = this.y(limit[0]) - 10, from = left ? LEFT + 6 : LEFT + this.plot - 6, pen = this.context;
      pen.font = `12px ${this.font}`;
      const wide = pen.measureText(words).width + 8;
      Object.assign(pen, { fillStyle: this.colors.bg, globalAlpha: 0.9 });
      pen.fillRect(left ? from - 4 : from - wide + 4, y - 8, wide, 16);
      pen.globalAlpha = 1;
      this.text(words, from, y, "bad", left ? "left" : "right");
    }
    const last = this.view.shortages.filter(([at]) => this.x(at) >= LEFT && this.x(at) <= LEFT + this.plot).at(-1);
    if (last) this.text(`× out of memory: ${bytesText(last[1])} more requested`, LEFT + this.plot, 9, "bad", "right", true);
    if (!peak || !inside) return;
    const pen = this.context, words = `peak ${bytesText(peak)}`;
    pen.beginPath(); pen.arc(Math.max(x, LEFT) + 0.5, y, 3.5, 0, 7);
    Object.assign(pen, { fillStyle: this.colors.bg, strokeStyle: this.colors.fg, lineWidth: 1.5 });
    pen.fill(); pen.stroke();
    pen.font = `600 12px ${this.font}`;
    const half = pen.measureText(words).width / 2 + 2;
    this.text(words, Math.min(Math.max(x, LEFT + half), LEFT + this.plot - half), y - 13, "fg", "center", true);
  }

  axis() {
    const { x0, x1, axis } = this.now, from = axis === "time" ? this.view.bounds[0] : 0;
    const [ticks, timeLabel] = this.timeTicks(x1 - x0, Math.abs(x1 - from), 110), step = axis === "time" ? ticks : Math.max(1, ticks);
    this.line([[LEFT, this.bottom + 0.5], [LEFT + this.plot, this.bottom + 0.5]], "dim");
    for (let v = Math.ceil((x0 - from) / step) * step; v + from <= x1; v += step) {
      const x = this.x(v + from), label = axis === "time" ? timeLabel(v) : grouped(Math.round(v));
      this.line([[x, this.bottom], [x, this.bottom + 4]], "dim");
      if (x < this.width - 34) this.text(label, x, this.bottom + 12, "dim", x < LEFT + 20 ? "left" : "center");
    }
  }

  marks() {
    if (!this.meta.divided) return;
    const y = this.bottom + TICKS;
    this.text(this.meta.divided, LEFT - 8, y + 7, "dim", "right");
    const widest = 7 * String(Math.max(...this.view.marks.map(([, number]) => number))).length + 12, seen = this.view.marks.filter(([at]) => at >= this.now.x0 && at < this.now.x1);
    let free = -1, every = 1;
    for (let p = 1; p < 1e9; p *= 10) for (const m of [1, 2, 5]) if (seen.filter(([, number]) => number % every === 0).length * widest > this.plot) every = m * p;
    for (const [at, number] of this.view.marks) {
      const x = this.x(at);
      if (x < LEFT - 1 || x > LEFT + this.plot) continue;
      this.line([[x, y], [x, y + 14]], "line");
      if (number >= 0 && number % every === 0 && x >= free && x < this.width - 26) free = x + this.text(String(number), x + 3, y + 7, "dim") + 9;
    }
  }

  // Returns the number of the band under a point, or -1 above all bands.
  band(x, y) {
    const i = this.column(x), wanted = this.bytes(y);
    let sum = 0;
    for (let b = 0; b < this.view.held.length; b++) { sum += Math.max(this.view.held[b][i], 0); if (wanted <= sum) return b; }
    return -1;
  }
}

function tableOf(moment) {
  const head = ["bytes", "share", "kind", "held by", "allocated in"].map((name) => element("th", { scope: "col" }, name));
  const total = Math.max(moment.total, 1);
  const line = (bytes, more, ...cells) => {
    const share = element("span", { class: "tk-share" }, element("i", { style: `width:${(100 * bytes) / total}%` }));
    const first = element("td", {}, bytesText(bytes), ...(more ? [" ", element("span", { class: "tk-dim" }, more)] : []));
    return element("tr", {}, first, element("td", {}, share, ` ${bytes && bytes / total < 0.005 ? "<1" : ((100 * bytes) / total).toFixed(0)} %`), ...cells.map((cell) => element("td", {}, ...[cell].flat())));
  };
  const rows = moment.rows.map(([bytes, blocks, owner, kind, code, place]) => line(
    bytes, blocks > 1 ? `in ${grouped(blocks)} blocks` : "", kind, owner.startsWith("(") ? element("span", { class: "tk-dim" }, owner) : element("code", {}, owner),
    [...(code ? [element("code", {}, code), " "] : []), element("span", { class: "tk-dim" }, place)],
  ));
  if (moment.rest[0] > 0) rows.push(line(moment.rest[0], "", "", moment.rest[1] ? `${grouped(moment.rest[1])} more` : "smaller blocks", ""));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
}

function mount(root, provider, meta) {
  const state = { now: null, view: null, by: meta.by, hovered: null, pinned: null, chosen: null, zoomed: meta.stretched };
  const canvas = element("canvas", {
    tabindex: "0", role: "application", "aria-roledescription": "memory over time",
    "aria-label": `Memory over time: ${meta.title}. ${grouped(meta.events)} allocations and frees, ${meta.span} (${meta.clock}). ${KEYS}`,
  });
  const tip = element("div", { class: "tk-tip", hidden: "" }), status = element("div", { class: "tk-status", role: "status", "aria-live": "polite" });
  const legend = element("div", { class: "tk-keys tk-legend", role: "group", "aria-label": "Bands" });
  const detail = element("div", { class: "tk-detail", hidden: "", tabindex: "-1", role: "region", "aria-label": "Blocks alive at the selected moment" });
  const choice = (label, names, chosen, act) => {
    const made = element("select", { "aria-label": label, onchange: () => act(made.value) }, ...names.map(([value, text]) => element("option", { value, ...(value === chosen ? { selected: "" } : {}) }, text)));
    return made;
  };
  const byChoice = choice("Group the bands by", meta.groupings.map((by) => [by, `by ${by}`]), meta.by, (by) => { state.by = by; state.chosen = null; ask(); });
  const axisChoice = choice("Axis", [["events", "axis: events"], ["time", `axis: time (${meta.clock})`]], meta.axis, (axis) => turn(axis));
  const zoomButton = button("Stretch the visible range to the full height", "Stretch", () => { state.zoomed = !state.zoomed; zoomButton.setAttribute("aria-pressed", String(state.zoomed)); draw(); }, { "aria-pressed": String(meta.stretched) });
  const tools = element("div", { class: "tk-row" },
    button("Zoom in (+)", "+", () => zoom(0.5)), button("Zoom out (-)", "−", () => zoom(2)), button("Show everything (0)", "All", () => fit()), zoomButton,
    button("List the blocks alive at the peak (p)", "Peak", () => pinPeak()), element("span", { class: "tk-grow" }), byChoice, axisChoice);
  const notes = meta.notes.map((note) => element("p", { class: "tk-note" }, note));
  const frame = element("div", { class: "tk-memory tk-live", "data-lm-suppress-shortcuts": "true" }, element("div", { class: "tk-title" }, meta.title), ...notes, tools, canvas, legend, status, detail, tip);
  root.replaceChildren(frame);
  const painter = new MemoryPainter(canvas, meta);

  let failed = false, closed = false, listed = "";
  const draw = framePainter(frame, () => {
    if (closed || !state.now || !canvas.clientWidth) return false;
    painter.paint(state);
    list();
    say();
    return true;
  });
  const list = () => { // draws the legend, the topmost band first
    const key = JSON.stringify([state.view.bands, state.chosen]);
    if (key === listed) return;
    listed = key;
    const focused = legend.contains(document.activeElement) ? [...legend.children].indexOf(document.activeElement) : -1;
    legend.replaceChildren(...state.view.bands.map(([name, color, bytes]) => button(`${name}: ${bytesText(bytes)} at the peak`, "", () => { state.chosen = state.chosen === name ? null : name; draw(); }, { "aria-pressed": String(state.chosen === name) })).reverse());
    [...state.view.bands].reverse().forEach(([name, color, bytes], i) => legend.children[i].append(element("i", { style: `background:${color}` }), name.length > 64 ? `${name.slice(0, 63)}…` : name, " ", element("b", {}, bytesText(bytes))));
    if (meta.reserved) legend.append(element("span", { class: "tk-dim" }, `dashed: reserved by the allocator, peak ${bytesText(meta.reserved)}`));
    legend.children[focused]?.focus();
  };
  const say = () => {
    const { x0, x1, axis } = state.now, from = axis === "time" ? state.view.bounds[0] : 0, { position } = state.view;
    const parts = [axis === "time" ? `${timeText(x1 - x0)} shown, from ${x0 > from ? timeText(x0 - from) : 0} (${meta.clock})` : `events ${grouped(Math.max(0, Math.ceil(x0)))} to ${grouped(Math.min(Math.ceil(x1) - 1, meta.events))} of ${grouped(meta.events)}`];
    if (position.some((p, i) => i && p - position[i - 1] > 1)) parts.push("each pixel shows its highest moment: zoom in to see all");
    if (state.zoomed && painter.low > 0) parts.push(`stretched: the axis of bytes begins at ${bytesText(painter.low)}`);
    if (failed) parts.push("the kernel does not answer: this is the last view");
    const text = parts.join(" · ");
    if (status.textContent !== text) status.textContent = text;
  };
  const accept = (bytes, asked) => {
    const view = parseView(bytes);
    if (state.now && view.axis !== state.now.axis) return; // an answer to a request from before the axis was changed
    state.view = view;
    failed = false;
    if (!state.now) state.now = { x0: view.x0, x1: view.x1, axis: view.axis };
    Object.assign(frame.dataset, { seq: view.seq, bytes: bytes.byteLength ?? 0, ...(asked ? { ms: (performance.now() - asked).toFixed(1) } : {}) });
    draw();
  };
  const unanswered = () => { failed = true; if (state.view) say(); };
  const requests = viewRequests(provider, accept, unanswered);
  const ask = () => {
    if (!canvas.clientWidth || !state.now) return;
    requests.ask({ ...state.now, by: state.by, width: Math.round(canvas.clientWidth - LEFT - RIGHT) });
    if (state.view?.axis === state.now.axis) draw();
  };
  const look = (x0, x1) => {
    const [low, high] = state.view.bounds, least = state.now.axis === "events" ? 4 : 50;
    const span = Math.min(Math.max(x1 - x0, Math.min(least, high - low)), high - low);
    const middle = Math.min(Math.max((x0 + x1) / 2, low + span / 2), high - span / 2);
    state.now = { ...state.now, x0: middle - span / 2, x1: middle + span / 2 };
    hover(null);
    ask();
  };
  const zoom = (factor, x = LEFT + painter.plot / 2) => {
    const at = painter.value(x), { x0, x1 } = state.now;
    look(at - (at - x0) * factor, at + (x1 - at) * factor);
  };
  const pan = (share) => { const by = (state.now.x1 - state.now.x0) * share; look(state.now.x0 + by, state.now.x1 + by); };
  const fit = () => { if (state.view) look(...state.view.bounds); };
  const turn = async (axis) => { // shows the whole of another axis: x1 < x0 requests it
    unpin();
    requests.drop();
    const mine = (turn.latest = {});
    try {
      const view = parseView(await provider.view({ x0: 0, x1: -1, axis, by: state.by, width: Math.round(canvas.clientWidth - LEFT - RIGHT) }));
      if (turn.latest !== mine || view.axis !== axis) return;
      state.now = { x0: view.x0, x1: view.x1, axis }; // until here, the picture stays as it was
      accept(view);
    } catch { if (turn.latest === mine) { axisChoice.value = state.now.axis; unanswered(); } }
  };

  const when = (i) => `${timeText(state.view.time[i])} (${meta.clock}), ${state.view.position[i] > meta.first ? `after event ${grouped(state.view.position[i] - meta.first)}` : "before the first event"}`;
  const hover = (place) => {
    if (!place || !state.view) { if (!tip.hidden) { tip.hidden = true; state.hovered = null; draw(); } return; }
    const [x, y] = place, i = painter.column(x), b = painter.band(x, y), { view } = state;
    state.hovered = painter.value(x);
    const lines = [element("b", {}, b >= 0 ? `${view.bands[b][0]}: ${bytesText(view.held[b][i])}` : `${bytesText(view.total[i])} held`)];
    if (b >= 0) lines.push(element("div", {}, `of ${bytesText(view.total[i])} held`));
    if (meta.reserved) lines.push(element("div", {}, `${bytesText(view.reserved[i])} reserved`));
    lines.push(element("div", { class: "tk-dim" }, when(i)), element("div", { class: "tk-dim" }, "click to list the blocks alive then"));
    tip.replaceChildren(...lines);
    tip.hidden = false;
    const inside = frame.getBoundingClientRect(), own = canvas.getBoundingClientRect(), left = x + own.left - inside.left;
    tip.style.left = `${Math.max(4, left + 16 + tip.offsetWidth > inside.width ? left - tip.offsetWidth - 14 : left + 14)}px`;
    tip.style.top = `${y + own.top - inside.top + 16}px`;
    draw();
  };
  const unpin = () => { state.pinned = null; detail.hidden = true; if (state.view) draw(); };
  const pin = async (position, x) => {
    const mine = { position, x };
    state.pinned = mine;
    draw();
    try {
      const moment = await provider.at(position);
      if (state.pinned !== mine) return;
      const at = `${timeText(moment.time)} (${meta.clock})${moment.position > meta.first ? `, after event ${grouped(moment.position - meta.first)}` : ", before the first event"}`;
      const close = button("Close", "✕", () => { unpin(); canvas.focus({ preventScroll: true }); });
      detail.replaceChildren(close, element("div", { class: "tk-sub" }, `${bytesText(moment.total)} held${moment.position === meta.position ? " at the peak" : ""}, at ${at}`), element("div", { class: "tk-scroll" }, tableOf(moment)));
      detail.hidden = false;
    } catch { unanswered(); }
  };
  const pinColumn = (i) => pin(state.view.position[i], state.view.x0 + ((i + 0.5) * (state.view.x1 - state.view.x0)) / state.view.width);
  const pinPeak = () => { if (state.view) pin(meta.position, state.view.peakX); };
  const step = (by) => { // to the next column with another state
    if (!state.view) return;
    const { total, width, position } = state.view;
    let i = state.pinned ? painter.column(painter.x(state.pinned.x)) : by > 0 ? 0 : width - 1;
    const from = position[i];
    while (i + by >= 0 && i + by < width && position[i] === from) i += by;
    if (total.length) pinColumn(i);
  };

  let drag = null;
  const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const listen = {
    wheel: (event) => {
      if (!state.view) return;
      event.preventDefault();
      const scale = event.deltaMode ? 33 : 1;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX * scale) / painter.plot);
      else zoom(Math.exp(Math.max(-2, Math.min(2, event.deltaY * scale * 0.0022))), Math.max(LEFT, at(event)[0]));
    },
    pointerdown: (event) => {
      if (event.button !== 0 || !state.view) return;
      canvas.focus({ preventScroll: true });
      canvas.setPointerCapture(event.pointerId);
      const [x, y] = at(event);
      drag = { x, y, ...state.now, moved: false };
    },
    pointermove: (event) => {
      const [x, y] = at(event);
      if (!drag) return hover(x >= LEFT && x <= LEFT + painter.plot && y <= painter.bottom ? [x, y] : null);
      drag.moved ||= Math.abs(x - drag.x) > 3;
      if (!drag.moved) return undefined;
      canvas.classList.add("tk-dragging");
      const by = ((drag.x - x) / painter.plot) * (drag.x1 - drag.x0);
      return look(drag.x0 + by, drag.x1 + by);
    },
    pointerup: (event) => {
      const was = drag;
      drag = null;
      canvas.classList.remove("tk-dragging");
      if (was && !was.moved && at(event)[0] >= LEFT) pinColumn(painter.column(at(event)[0]));
    },
    pointercancel: () => { drag = null; },
    pointerleave: () => hover(null),
    dblclick: () => fit(),
    keydown: (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !state.view) return;
      const act = {
        ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => zoom(0.6), ArrowDown: () => zoom(1 / 0.6),
        "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: fit, Home: fit, p: pinPeak, ".": () => step(1), ",": () => step(-1), Escape: unpin,
      }[event.key];
      if (act) { event.preventDefault(); event.stopPropagation(); act(); }
    },
  };
  for (const [name, handler] of Object.entries(listen)) canvas.addEventListener(name, handler, name === "wheel" ? { passive: false } : undefined);

  const release = watchCanvas(canvas, ask, () => { painter.colors = null; if (state.view) draw(); });
  if (provider.first?.byteLength || provider.first?.total) accept(provider.first);
  return () => { closed = true; requests.drop(); release(); };
}

// ---- A page without Python: answers like view.py, from the moments and blocks that page.py embedded.

async function unpack(text) {
  const [packed, bytes, start] = readHeader(await inflate(fromBase64(text)));
  let at = start;
  const take = (Type, n, factor = 1) => { // stored as differences, which compress well
    const made = Float64Array.from(new Type(bytes, at, n));
    at += n * Type.BYTES_PER_ELEMENT;
    for (let i = 1; i < n; i++) made[i] += made[i - 1];
    return factor === 1 ? made : made.map((value) => value * factor);
  };
  const columns = {};
  for (const name of ["position", "total", "reserved", "time"]) columns[name] = take(Float64Array, packed.n);
  for (const name of ["begin", "end", "bytes"]) columns[name] = take(Float64Array, packed.blocks);
  columns.holder = take(Int32Array, packed.blocks);
  columns.held = Object.fromEntries(packed.sets.map(([by, bands]) => [by, bands.map(() => take(Int32Array, packed.n, packed.unit))]));
  return [packed, columns];
}

async function pageProvider(text) {
  const [packed, columns] = await unpack(text), { meta } = packed, bands = Object.fromEntries(packed.sets);
  const places = { events: columns.position.map((p) => p - meta.first), time: columns.time };
  let seq = 0;
  const view = ({ by, axis, x0, x1, width }) => {
    const bounds = packed.bounds[axis], x = places[axis], { total } = columns;
    if (!(x1 > x0)) [x0, x1] = bounds;
    const chosen = new Int32Array(width), edge = (c) => x0 + ((x1 - x0) * c) / width;
    for (let c = 0; c < width; c++) {
      const stop = search(x, edge(c + 1));
      let best = Math.max(search(x, edge(c), true) - 1, 0);
      for (let i = search(x, edge(c)); i < stop; i++) if (total[i] > total[best]) best = i;
      chosen[c] = best;
    }
    const pick = (values) => Float64Array.from(chosen, (i) => values[i]), which = axis === "events" ? 0 : 1;
    let marks = packed.marks.map((mark) => [mark[which], mark[2]]).filter(([at]) => at >= x0 && at < x1);
    for (let p = 1; marks.length > 60 && p < 1e9; p *= 10) for (const m of [1, 2, 5]) if (marks.length > 60) marks = marks.filter(([, number]) => number % (m * p) === 0);
    return {
      seq: ++seq, by, axis, x0, x1, width, bounds, bands: bands[by], marks, peakX: packed.peakX[which],
      shortages: packed.shortages.map((found) => [found[which], found[2]]), held: columns.held[by].map(pick),
      ...Object.fromEntries(["position", "total", "reserved", "time"].map((name) => [name, pick(columns[name])])),
    };
  };
  const at = (position) => {
    const state = Math.max(search(columns.position, position, true) - 1, 0), sums = new Map();
    for (let i = 0; i < packed.blocks && columns.begin[i] <= position; i++) {
      if (columns.end[i] <= position) continue;
      const sum = sums.get(columns.holder[i]) || [0, 0];
      sums.set(columns.holder[i], [sum[0] + columns.bytes[i], sum[1] + 1]);
    }
    const found = [...sums].sort((a, b) => b[1][0] - a[1][0]), total = columns.total[state], listed = found.slice(0, 20);
    const rest = total - listed.reduce((sum, [, [bytes]]) => sum + bytes, 0);
    const rows = listed.map(([holder, [bytes, blocks]]) => { const [owner, one, ...more] = packed.holders[holder]; return [bytes, blocks, blocks > 1 ? owner : one, ...more]; });
    return { position, time: columns.time[state], total, rows, rest: [rest, packed.all ? found.length - listed.length : 0] };
  };
  const whole = { by: meta.by, axis: meta.axis, x0: 0, x1: -1, width: 900 };
  return { meta, first: view(whole), late: null, view: async (request) => view(request), at: async (position) => at(position) };
}

async function startPage() { // unpacks each measurement when it first becomes visible
  const uses = JSON.parse(document.getElementById("tk-data").textContent);
  const show = async (place) => {
    const still = place.nextElementSibling;
    try {
      const provider = await pageProvider(uses[Number(place.dataset.use)]);
      mount(place, provider, provider.meta);
      window.tkProvider = provider; // for debugging in the console, and for tests
      still.classList.add("tk-replaced");
    } catch (error) { place.textContent = `This browser can't show the interactive picture (${error.message}). A still picture follows.`; }
  };
  const seen = new IntersectionObserver((entries) => entries.forEach(({ isIntersecting, target }) => { if (isIntersecting) { seen.unobserve(target); show(target); } }));
  document.querySelectorAll(".tk-place").forEach((place) => seen.observe(place));
}

export default kernelWidget(mount, (send) => ({ at: (position) => send({ type: "at", position }) }));
