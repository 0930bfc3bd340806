// A page without Python: unpacks the embedded columns and answers the requests of timeline.js from them.
// It follows timeline.js in the same module. The binning is the same as in view.py; a test compares the two.

const DIRECTIONS = { h2d: "host to device", d2h: "device to host", d2d: "within the device", p2p: "device to device" };
const TYPES = { u1: Uint8Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, u4: Uint32Array };

async function unpack(packed) {
  const stored = fromBase64(packed.data), buffer = packed.deflated ? await inflate(stored) : stored.buffer;
  const columns = {}, { n } = packed;
  let at = 0;
  for (const [name, type, constant] of packed.columns) {
    if (constant !== null) { columns[name] = { at: () => constant }; continue; }
    const size = TYPES[type].BYTES_PER_ELEMENT;
    const array = new TYPES[type](buffer.slice(at, at + n * size));
    at += n * size;
    columns[name] = { at: (i) => array[i] };
  }
  const wide = (name) => Float64Array.from({ length: n }, (_, i) => columns[`${name}_high`].at(i) * 2 ** 32 + columns[`${name}_low`].at(i));
  const start = wide("start");
  for (let i = 1; i < n; i++) start[i] += start[i - 1]; // stored as differences, which compress well
  const seq = { at: (i) => columns.seq_high.at(i) * 2 ** 32 + columns.seq_low.at(i) };
  return { ...columns, seq, start, dur: wide("dur"), bytes: wide("bytes") };
}

class PageTrack {
  constructor(packed, columns, limits) {
    Object.assign(this, { packed, columns, limits, steps: packed.steps, names: packed.step_names });
    const rows = packed.meta.lanes.map((lane) => new Uint32Array(lane.count)), filled = rows.map(() => 0);
    for (let i = 0; i < packed.n; i++) { const lane = columns.lane.at(i); rows[lane][filled[lane]++] = i; }
    this.lanes = rows.map((mine, index) => this.lane(mine, packed.meta.lanes[index].kind));
  }

  lane(rows, kind) {
    const n = rows.length, lane = { rows, kind, code: this.limits.kinds.indexOf(kind), starts: new Float64Array(n), ends: new Float64Array(n), latest: new Float64Array(n), fresh: new Float64Array(n) };
    for (const name of ["busy", "bytes", "modelled"]) lane[name] = new Float64Array(n + 1);
    let latest = -Infinity;
    for (let k = 0; k < n; k++) {
      const i = rows[k], start = this.columns.start[i], end = start + this.columns.dur[i];
      lane.starts[k] = start; lane.ends[k] = end;
      lane.fresh[k] = Math.max(start, latest);
      latest = lane.latest[k] = Math.max(latest, end);
      lane.busy[k + 1] = lane.busy[k] + latest - lane.fresh[k];
      lane.bytes[k + 1] = lane.bytes[k] + this.columns.bytes[i];
      lane.modelled[k + 1] = lane.modelled[k] + this.columns.clock.at(i);
    }
    return lane;
  }

  stepRange(step) {
    let best = null;
    for (const entry of this.steps) if (!best || Math.abs(entry[0] - step) < Math.abs(best[0] - step)) best = entry;
    return best;
  }

  origin(align) { return align !== null && align !== undefined && this.steps.length ? this.stepRange(align)[1] : this.packed.start_ns; }

  segments(t0, t1, width, budget) {
    const ranges = this.lanes.map((lane) => { const first = search(lane.latest, t0); return [first, Math.max(first, search(lane.starts, t1))]; });
    const counts = ranges.map(([first, last]) => last - first), share = [];
    let left = budget;
    counts.map((_, i) => i).sort((a, b) => counts[a] - counts[b] || a - b).forEach((i, position) => {
      share[i] = Math.min(width, Math.floor(left / (counts.length - position)));
      left -= Math.min(counts[i], share[i]);
    });
    return this.lanes.map((lane, i) => (counts[i] <= share[i] ? this.singles(lane, ranges[i], t0, t1, width) : this.bins(lane, t0, t1, width, share[i])));
  }

  singles(lane, [first, last], t0, t1, width) {
    const scale = (width * 16) / (t1 - t0), clip = (t) => Math.min(Math.max((t - t0) * scale, 0), width * 16), made = [];
    for (let k = first; k < last; k++) {
      if (lane.ends[k] < t0) continue;
      const modelled = lane.modelled[k + 1] - lane.modelled[k];
      made.push([lane.rows[k], 1, lane.bytes[k + 1] - lane.bytes[k], clip(lane.starts[k]), clip(lane.ends[k]), lane.code + MODELLED * modelled, 255]);
    }
    return made;
  }

  covered(lane, t) {
    const n = search(lane.fresh, t, true);
    return n ? lane.busy[n - 1] + Math.min(Math.max(t - lane.fresh[n - 1], 0), lane.busy[n] - lane.busy[n - 1]) : 0;
  }

  bins(lane, t0, t1, width, bins) {
    const made = [], edge = (b) => t0 + ((t1 - t0) * b) / bins, x = (b) => Math.round((width * 16 * b) / bins);
    let first = search(lane.starts, t0), before = this.covered(lane, t0);
    for (let b = 0; b < bins; b++) {
      const next = search(lane.starts, edge(b + 1)), after = this.covered(lane, edge(b + 1)), count = next - first;
      const busy = (after - before) / (edge(b + 1) - edge(b));
      if (count || busy > 0) {
        const row = count ? first : Math.max(first - 1, 0), last = count ? next : row + 1;
        const modelled = lane.modelled[last] > lane.modelled[row];
        made.push([lane.rows[row], count, lane.bytes[last] - lane.bytes[row], x(b), x(b + 1), lane.code + MODELLED * modelled, Math.min(Math.max(Math.ceil(busy * 255), 1), 255)]);
      }
      [first, before] = [next, after];
    }
    return made;
  }

  stepsIn(t0, t1) {
    let touching = this.steps.map((step, i) => [step, i]).filter(([step]) => step[2] >= t0 && step[1] < t1), every = 1;
    for (let p = 1; touching.length / every > this.limits.steps; p *= 10) for (const m of [1, 2, 5]) { every = m * p; if (touching.length / every <= this.limits.steps) break; }
    if (every > 1) touching = touching.filter(([step]) => step[0] % every === 0);
    return [touching.map(([step, i]) => [...step, this.names[i]]), every];
  }

  linksIn(t0, t1, origin) {
    const inside = this.packed.links.filter(([, ...points]) => points.some(([, , start]) => start < t1) && points.some(([, row, start]) => start + this.columns.dur[row] >= t0));
    return inside.length > this.limits.links ? [] : inside.map(([last, ...points]) => [last, ...points.map(([lane, , start]) => [lane, start - origin])]);
  }

  waited(row) {
    const found = this.packed.links.find(([, ...points]) => points.some(([, event]) => event === row));
    if (!found) return undefined;
    const [last, ...points] = found;
    if (last < 0) return "not: all ranks came at the same time";
    const from = points[last][2];
    const wait = ([, event, start]) => Math.max(Math.min(from, start + this.columns.dur[event]) - start, 0);
    if (points[last][1] === row) return `not: it came last, and others waited up to ${timeText(Math.max(...points.map(wait)))}`;
    return `${timeText(wait(points.find(([, event]) => event === row)))} for rank ${this.columns.rank.at(points[last][1])}, which came last`;
  }

  facts(row) {
    const get = (name) => this.columns[name].at(row), text = (name) => this.packed.strings[get(name)], kind = this.limits.kinds[get("kind")];
    const known = (name, say = String) => (get(name) >= 0 ? say(get(name)) : undefined), group = [text("group"), known("group_size", (n) => `${n} ranks`)];
    const size = this.columns.bytes[row], lines = [
      ["name", text("name")], ["kind", DIRECTIONS[kind] ? `${kind} (${DIRECTIONS[kind]})` : kind],
      ["bytes", size >= 1024 ? `${bytesText(size)} (${grouped(size)} B)` : size ? `${size} B` : undefined], // 0: none, or not known
      ["caused by", text("where")], ["source", this.packed.source[text("where")]], ["duration", `${timeText(this.columns.dur[row])}, ${get("clock") ? "modelled" : "measured"}`],
      ["start", `${timeText(this.columns.start[row] - this.packed.start_ns)} after the first event`],
      ["operation", text("operation")], ["algorithm", text("algorithm")], ["process group", group.filter((part) => part !== undefined).join(", ") || undefined],
      ["number", known("seq")], ["other end", known("peer", (n) => (text("operation") ? `rank ${n}` : `GPU ${n}`))], ["waited", this.waited(row)],
      ["step", get("step") >= 0 ? String(get("step")) : "outside all steps"], ["layer", known("layer")], ["stream", get("stream") >= 0 ? String(get("stream")) : undefined],
      ["device", get("device") >= 0 ? `GPU ${get("device")}` : "host"], ["host memory", ["pageable", "pinned"][get("pinned")]],
      ["cell", get("cell") >= 0 ? String(get("cell")) : undefined], ["rank", get("rank") || this.packed.meta.ranks.length ? String(get("rank")) : undefined], ["owner", text("owner")],
    ];
    return lines.filter(([, value]) => value !== undefined);
  }
}

function pageProvider(tracks, limits) {
  const bounds = (align) => {
    const low = Math.min(...tracks.map((track) => track.packed.start_ns - track.origin(align)));
    return [low, Math.max(low + 1000, ...tracks.map((track) => track.packed.end_ns - track.origin(align)))];
  };
  const ofLanes = (align, ask) => tracks.flatMap((track) => track.lanes.map((lane) => ask(lane, track.origin(align), track)));
  const nearest = (t0, t1, align) => {
    const found = ofLanes(align, (lane, origin) => { const at = search(lane.starts, t0 + origin); return [at ? lane.latest[at - 1] - origin : -Infinity, at < lane.starts.length ? lane.starts[at] - origin : Infinity]; });
    const near = [Math.max(...found.map(([before]) => before)), Math.min(...found.map(([, after]) => after))];
    return near.map((t) => (Number.isFinite(t) ? t : null));
  };
  const sums = ({ t0, t1, align = null }) => tracks.map((track) => track.lanes.map((lane) => {
    const [from, to] = [t0, t1].map((t) => t + track.origin(align)), first = search(lane.starts, from), last = search(lane.starts, to);
    return [last - first, track.covered(lane, to) - track.covered(lane, from), lane.bytes[last] - lane.bytes[first]];
  }));
  const find = ({ text, near, move, align = null, last = null }) => {
    const wanted = text.toLowerCase(), code = wanted in DIRECTIONS ? limits.kinds.indexOf(wanted) : -1, hits = [];
    const number = Number(/^layer (\d{1,5})$/.exec(wanted)?.[1] ?? NaN); // equal to no layer if none was asked for
    tracks.forEach((track, t) => {
      const known = new Set(track.packed.strings.flatMap((string, code) => (string.toLowerCase().includes(wanted) ? [code] : [])));
      const origin = track.origin(align), { start, dur, kind, layer, name, where, operation } = track.columns;
      for (let row = 0; row < track.packed.n; row++) if (kind.at(row) === code || layer.at(row) === number || [name, where, operation].some((column) => known.has(column.at(row)))) hits.push({ track: t, row, start: start[row] - origin, end: start[row] + dur[row] - origin });
    });
    if (!wanted || !hits.length) return null;
    hits.sort((a, b) => a.start - b.start);
    const after = last === null ? search(hits.map((hit) => hit.start), near, move > 0) : last - (move < 0), at = ((move > 0 ? after : after - 1) + hits.length) % hits.length;
    return { ...hits[at], number: at + 1, count: hits.length };
  };
  let asked = 0;
  const view = ({ t0, t1, width, align = null }) => {
    const made = { seq: ++asked, near: null, t0, t1, width, align, bounds: bounds(align), spans: tracks.map((track) => [track.packed.start_ns, track.packed.end_ns].map((t) => t - track.origin(align))), links: [], counts: [], steps: [], every: [], texts: [] };
    const parts = [], codes = new Map();
    for (const track of tracks) {
      const origin = track.origin(align), segments = track.segments(t0 + origin, t1 + origin, width, Math.floor(limits.segments / tracks.length));
      made.links.push(track.linksIn(t0 + origin, t1 + origin, origin));
      made.counts.push(segments.map((lane) => lane.length));
      for (const lane of segments) for (const segment of lane) parts.push([track, segment]);
      const [steps, every] = track.stepsIn(t0 + origin, t1 + origin);
      made.steps.push(steps.map(([n, start, end, name]) => [n, start - origin, end - origin, name]));
      made.every.push(every);
    }
    if (!parts.length) made.near = nearest(t0, t1, align);
    ["row", "count", "bytes", "x0", "x1", "kind", "level"].forEach((name, k) => {
      const Type = { row: Uint32Array, count: Uint32Array, bytes: Float32Array, kind: Uint8Array, level: Uint8Array }[name] || Uint16Array;
      made[name] = Type.from(parts, ([, segment]) => segment[k]);
    });
    made.text = Uint16Array.from(parts, ([track, [row, count]]) => {
      if (count > 1) return NO_TEXT;
      const pair = ["name", "where"].map((name) => track.packed.strings[track.columns[name].at(row)] || ""), key = pair.join("\0");
      if (!codes.has(key)) { codes.set(key, made.texts.length); made.texts.push(pair); }
      return codes.get(key);
    });
    return made;
  };
  const step = ({ track, step: number, near = 0, move = 0, align = null }) => {
    const chosen = tracks[track], origin = chosen.origin(align);
    if (!chosen.steps.length) return null;
    const at = search(chosen.steps.map((entry) => entry[1]), near + origin + 0.5, true) - 1;
    const numbers = move && number !== undefined ? [...new Set(chosen.steps.map(([n]) => n))].sort((a, b) => a - b) : null;
    const beside = (found) => chosen.stepRange(numbers[Math.min(Math.max(found, 0), numbers.length - 1)]);
    const found = numbers ? beside(search(numbers, number, move > 0) - (move < 0)) : number !== undefined ? chosen.stepRange(number) : chosen.steps[Math.min(Math.max(at + move, 0), chosen.steps.length - 1)];
    return [found[0], found[1] - origin, found[2] - origin];
  };
  return {
    first: null, late: null, makeView: view, whole: bounds(null), sums: async (request) => sums(request), find: async (request) => find(request),
    view: async (request) => view(request), step: async (request) => step(request),
    facts: async (track, row) => tracks[track].facts(row), table: async () => tracks.map((track) => sheetOf(track.packed)),
  };
}

// Returns the table of the copies per step that the page shows below the timeline.
function sheetOf({ number }) {
  const sheet = document.querySelectorAll(".tk-sheet")[number], texts = (parent, tag) => [...parent.querySelectorAll(tag)].map((cell) => cell.textContent);
  const rows = [...sheet.querySelectorAll("tbody tr")].map((row) => texts(row, "th, td"));
  return { title: sheet.querySelector("summary").textContent, note: sheet.querySelector("p")?.textContent ?? "", columns: texts(sheet, "thead th"), rows };
}

async function start() {
  const { traces, limits, openings } = JSON.parse(document.getElementById("tk-data").textContent);
  traces.forEach((packed, number) => { packed.number = number; });
  const place = document.getElementById("tk-place"), first = document.getElementById("tk-a"), second = document.getElementById("tk-b");
  const ready = new Map();
  const track = async (i) => {
    if (!ready.has(i)) ready.set(i, new PageTrack(traces[i], await unpack(traces[i]), limits));
    return ready.get(i);
  };
  let unmount = () => {};
  const show = async () => {
    const chosen = [first, second].map((select) => (select && select.value !== "" ? Number(select.value) : null));
    const indices = [chosen[0] ?? 0, ...(chosen[1] === null ? [] : [chosen[1]])], mine = (show.latest = {});
    const tracks = await Promise.all(indices.map(track));
    if (show.latest !== mine) return; // another choice was made meanwhile
    unmount();
    const provider = pageProvider(tracks, limits);
    unmount = mount(place, provider, { tracks: tracks.map((t) => t.packed.meta), kinds: limits.kinds, whole: provider.whole, ...openings[indices] });
    window.tkProvider = provider; // for debugging in the console, and for tests
  };
  for (const select of [first, second]) select?.addEventListener("change", show);
  try { await show(); } catch (error) {
    place.insertAdjacentText("afterbegin", `This browser can't show the interactive timeline (${error.message}). A still picture follows.`);
    place.insertAdjacentHTML("beforeend", document.querySelector("noscript").textContent); // its text, where scripts run
  }
}
start();
