// The parts that the timeline (timeline.js) and the memory picture (memory.js) share. It is not a module of its own:
// assets.py puts this file before theirs, because anywidget and the self-contained pages take one ES module as text.

const three = (x) => (Math.abs(x) >= 100 ? x.toFixed(0) : Math.abs(x) >= 10 ? x.toFixed(1) : x.toFixed(2));
const TIME_UNITS = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]];
function timeText(ns) {
  for (const [unit, size] of TIME_UNITS) if (Math.abs(ns) >= size) return `${three(ns / size)} ${unit}`;
  return ns ? `${Math.round(ns)} ns` : "0 µs";
}
function bytesText(n) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) if (Math.abs(n) >= size) return `${three(n / size)} ${unit}`;
  return `${Math.round(n)} B`;
}
const grouped = (n) => n.toLocaleString("en"); // 1234567 becomes 1,234,567

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
const button = (label, text, act, extra = {}) => element("button", { type: "button", "aria-label": label, title: label, onclick: act, ...extra }, text);

// Reads the start of a packed view: a uint32 length, then a JSON header of that length. Returns the header, the buffer and
// the offset of the first column. The bytes are copied, because typed arrays need aligned offsets.
function readHeader(bytes) {
  const data = bytes instanceof DataView ? bytes : new DataView(bytes);
  const buffer = data.buffer.slice(data.byteOffset, data.byteOffset + data.byteLength);
  const size = new DataView(buffer).getUint32(0, true);
  return [JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size))), buffer, 4 + size];
}

// Returns the index of the first value that is not below `x` (with `after`: that is above `x`). `values` must be sorted.
function search(values, x, after = false) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < x || (after && values[middle] === x)) low = middle + 1; else high = middle;
  }
  return low;
}

async function inflate(bytes) {
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}
const fromBase64 = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

class CanvasPainter {
  // The size and the theme colors of a canvas. A subclass sets `height` before it calls `prepare`.
  constructor(canvas, meta, [left, right], colorNames) { Object.assign(this, { canvas, meta, left, right, colorNames, colors: null }); }

  prepare(leastPlot) {
    this.context = this.canvas.getContext("2d");
    const ratio = window.devicePixelRatio || 1, width = Math.max(this.canvas.clientWidth, this.left + leastPlot);
    if (!this.colors) {
      const style = getComputedStyle(this.canvas);
      this.font = style.fontFamily;
      this.colors = Object.fromEntries(this.colorNames.map((name) => [name, style.getPropertyValue(`--tk-${name}`).trim()]));
      this.patterns = {};
    }
    if (this.width !== width || this.ratio !== ratio) {
      [this.width, this.ratio] = [width, ratio];
      [this.canvas.width, this.canvas.height] = [Math.round(width * ratio), Math.round(this.height * ratio)];
      this.canvas.style.height = `${this.height}px`;
      this.patterns = {};
    }
    this.plot = width - this.left - this.right;
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.context.fillStyle = this.colors.bg;
    this.context.fillRect(0, 0, this.width, this.height);
  }

  // Returns the distance of the ticks, at least `room` pixels apart, and a function that formats a time at a tick.
  timeTicks(span, largest, room) {
    const raw = (span / this.plot) * room, power = 10 ** Math.floor(Math.log10(raw));
    const tick = [1, 2, 5, 10].map((m) => m * power).find((step) => step >= raw);
    const [unit, size] = TIME_UNITS.find(([, least]) => largest >= least) || ["ns", 1];
    const digits = Math.max(0, Math.ceil(-Math.log10(tick / size) - 1e-9));
    return [tick, (t) => `${(t / size).toFixed(digits).replace(/^-(0\.?0*)$/, "$1")} ${unit}`];
  }
}

// Returns a function that schedules `paint` for the next animation frame, once however often it is called; its `now` paints
// at once. `data-painted` of the frame counts the paints, for tests.
function framePainter(frame, paint) {
  let scheduled = false;
  const now = () => {
    scheduled = false;
    if (paint()) frame.dataset.painted = String(Number(frame.dataset.painted || 0) + 1);
  };
  const draw = () => {
    if (!scheduled) requestAnimationFrame(() => { if (scheduled) now(); });
    scheduled = true;
  };
  return Object.assign(draw, { now });
}

// Asks `provider` for views, one request at a time. If several requests arrive meanwhile, only the latest is sent.
function viewRequests(provider, accept, failed) {
  const state = { wanted: null, busy: false };
  const pump = async () => {
    if (state.busy || !state.wanted) return;
    state.busy = true;
    const request = state.wanted, asked = performance.now();
    state.wanted = null;
    try { accept(await provider.view(request), asked); } catch { failed(); }
    state.busy = false;
    pump();
  };
  provider.late = (bytes) => accept(bytes);
  return { ask: (request) => { state.wanted = request; pump(); }, drop: () => { state.wanted = null; } };
}

// Calls `sized` when the canvas gets another width or is shown again, before the browser shows it, and when pixels get another size,
// as by the browser's zoom. Calls `repaint` when the theme changes. A hidden canvas has no width and is not painted. Returns a
// function that stops all.
function watchCanvas(canvas, sized, repaint) {
  let width = 0, pixels = null;
  const zoomed = () => {
    pixels?.removeEventListener("change", zoomed);
    pixels = window.matchMedia(`(resolution: ${window.devicePixelRatio}dppx)`); // matches until the next change
    pixels.addEventListener("change", zoomed);
    if (width) sized();
  };
  const sizes = new ResizeObserver(() => {
    const before = width;
    width = canvas.clientWidth;
    if (width && width !== before) sized();
  });
  const themes = new MutationObserver(repaint), system = window.matchMedia("(prefers-color-scheme: dark)");
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind", "class"] });
  system.addEventListener("change", repaint);
  sizes.observe(canvas);
  zoomed();
  return () => { sizes.disconnect(); themes.disconnect(); system.removeEventListener("change", repaint); pixels.removeEventListener("change", zoomed); };
}

// The definition of the notebook widget: `mount` draws, and the kernel answers. Requests go to Python as messages. Views come
// back as the `view` trait, so that a saved notebook keeps the last one; other answers come back as messages.
// `questions(send)` returns the provider's methods other than `view`.
function kernelWidget(mount, questions) {
  return {
    render({ model, el }) {
      const mine = Math.random().toString(36).slice(2), waiting = new Map();
      let seq = 0, newest = 0;
      const send = (content) => new Promise((resolve, reject) => {
        const id = ++seq;
        const settle = (act) => (value) => { clearTimeout(timer); waiting.delete(id); act(value); };
        const timer = setTimeout(() => settle(reject)(new Error("no answer")), 4000);
        waiting.set(id, settle(resolve));
        try { model.send({ ...content, vid: mine, seq: id }); } catch (error) { settle(reject)(error); }
      });
      const provider = { first: model.get("view"), late: null, view: (request) => send({ type: "view", ...request }), ...questions(send) };
      const viewed = () => {
        const bytes = model.get("view"), [header] = readHeader(bytes);
        if (header.vid !== mine || header.seq < newest) return;
        newest = header.seq;
        if (waiting.has(header.seq)) waiting.get(header.seq)(bytes);
        else provider.late?.(bytes);
      };
      const answered = (message) => { if (message?.vid === mine) waiting.get(message.seq)?.(message.answer); };
      model.on("change:view", viewed);
      model.on("msg:custom", answered);
      const unmount = mount(el, provider, model.get("meta"));
      const hide = el.appendChild(element("style")), hides = () => { hide.textContent = model.get("hide"); };
      model.on("change:hide", hides);
      hides();
      return () => { unmount(); model.off("change:hide", hides); model.off("change:view", viewed); model.off("msg:custom", answered); };
    },
  };
}
