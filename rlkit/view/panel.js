// The panel of rlkit: completions table, group view, token lens, steps, comparison, pins and controls.
//
// Plain ESM, no build, no dependency. The default export is anywidget's factory; `mount(element, source)` shows the same
// panel on any page, where source = {
//   request(object) -> Promise(object)   answers of rlkit.view.data.answer, or {error: text}
//   subscribe(callback) -> unsubscribe   pushes {overview, table} while a run goes
//   live: boolean                        false: nothing will change and nobody takes commands
//   controls: boolean                    show pause, stop, save, numbers, export
//   snapshot: object                     optional: {overview, table, remembered}
//   remember(state)                      optional: keeps the reader's place for a page that is loaded later }
// `bundled(bundle)` makes a source of the answers of rlkit.view.data.bundle, for a page without a kernel.
//
// Rules: whatever comes from a run becomes a text node or an attribute by setAttribute, never markup. Control and
// direction characters are drawn as signs, every text stands in <bdi>. No request leaves the page.

const PAGE = 50; // rows of a table page
const PATIENCE = 1200; // ms until an unanswered request is explained
const STRONGEST = 0.6; // of a token's shade: its text keeps a contrast of 4.5 in light and dark
const OPERATORS = [[">=", "≥"], ["<=", "≤"], ["=", "="], ["!=", "≠"], ["contains", "contains"], ["missing", "is missing"]];
const CONTROL = /[\p{Cc}\p{Zl}\p{Zp}\p{Cs}]|(?!\u200d)\p{Cf}/gu;
const SPECIAL = /^(<[|｜/]?[\w▁|｜ /:.-]{1,60}[|｜]?>|\[[A-Z_]{2,20}\])$/;
const MINUS = "−";
const NAMES = "NUL SOH STX ETX EOT ENQ ACK BEL BS ⇥ ↵ VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");

// ---------------------------------------------------------------- elements and texts

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function sign(character) {
  const code = character.codePointAt(0);
  if (code < 32) return NAMES[code];
  if (code === 127) return "DEL";
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** A text with its control characters drawn as signs; line breaks also break where `lines` is true. */
export function visible(text, { lines = false, spaces = false } = {}) {
  const box = el("bdi", { class: "rl-said" });
  let from = 0;
  const plainly = (piece) => {
    if (!spaces) return [piece];
    return piece.split(/( )/).filter(Boolean).map((part) => (part === " " ? el("span", { class: "rl-space" }, "·") : part));
  };
  for (const match of text.matchAll(CONTROL)) {
    if (match.index > from) box.append(...plainly(text.slice(from, match.index)));
    const code = match[0].codePointAt(0);
    box.append(el("span", { class: "rl-sign", title: `U+${code.toString(16).toUpperCase().padStart(4, "0")}` }, sign(match[0])));
    if (lines && match[0] === "\n") box.append("\n");
    from = match.index + match[0].length;
  }
  if (from < text.length) box.append(...plainly(text.slice(from)));
  return box;
}

/** What a cell's text says as one string, control characters as signs: for labels. */
function spoken(value, limit = 120) {
  const text = typeof value === "object" && value !== null ? value.text : String(value ?? "");
  const shown = Array.from(text).slice(0, limit).join("");
  return shown.replace(CONTROL, sign) + (shown.length < text.length ? "…" : "");
}

const count = (number) => Number(number).toLocaleString("en-US");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** A number for people; NaN and the infinities come as texts and stay so. */
function say(value, decimals = null) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value.replace("-inf", `${MINUS}∞`).replace(/^inf$/, "∞");
  if (decimals !== null && typeof value === "number") return value.toFixed(decimals).replace(/^-(0(\.0*)?)$/, "$1").replace("-", MINUS);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value).replace("-", MINUS);
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-3 ? value.toExponential(2) : size < 0.1 ? value.toFixed(4) : value.toFixed(3);
  return text.replaceAll("-", MINUS);
}

const signed = (value, decimals = null) => (typeof value === "number" && value > 0 ? "+" : "") + say(value, decimals);

/** Decimals that align a column of numbers: none for integers, else three, or more for small ones. */
function decimalsOf(values) {
  const known = values.filter((value) => typeof value === "number");
  if (known.every(Number.isInteger)) return 0;
  const top = Math.max(...known.map(Math.abs));
  return top >= 0.1 ? 3 : top >= 0.001 ? 5 : null;
}

// ---------------------------------------------------------------- sort and filter, as rlkit/view/select.py does

const textOf = (cell) => (cell === null || cell === undefined ? "" : typeof cell === "object" ? cell.text : String(cell));
const numeric = (cell) => (typeof cell === "number" ? cell : typeof cell === "boolean" ? +cell : cell === "inf" ? Infinity : cell === "-inf" ? -Infinity : NaN);

function meets(cell, kind, { op, value }) {
  const missing = cell === null || cell === undefined || cell === "NaN";
  if (op === "missing") return missing;
  if (op === "contains") return textOf(cell).toLowerCase().includes(String(value).toLowerCase());
  if (missing) return op === "!=";
  const [left, right] = kind === "text"
    ? [textOf(cell).toLowerCase(), String(value).toLowerCase()]
    : [numeric(cell), /^true$/i.test(value) ? 1 : /^false$/i.test(value) ? 0 : parseFloat(value)];
  return op === "=" ? left === right : op === "!=" ? left !== right : op === ">=" ? left >= right : left <= right;
}

/** Rows of a whole table that meet the conditions, in order. */
export function select(table, { sort = null, descending = false, where = [], text = "" }) {
  const place = new Map(table.columns.map((column, index) => [column.name, index]));
  const part = text.toLowerCase();
  const said = ["prompt", "completion"].filter((name) => place.has(name));
  let rows = table.rows.filter(({ cells }) =>
    (!part || said.some((name) => textOf(cells[place.get(name)]).toLowerCase().includes(part))) &&
    where.every((one) => place.has(one.column) && meets(cells[place.get(one.column)], table.columns[place.get(one.column)].kind, one)));
  if (sort === null || !place.has(sort)) return rows;
  const index = place.get(sort), kind = table.columns[index].kind;
  const key = ({ cells }) => (kind === "text" ? (cells[index] === null ? null : textOf(cells[index]).toLowerCase()) : numeric(cells[index]));
  const keyed = rows.map((row) => [key(row), row]);
  const lost = (value) => value === null || Number.isNaN(value);
  keyed.sort(([a], [b]) => (lost(a) || lost(b) ? lost(a) - lost(b) : (a < b ? -1 : a > b ? 1 : 0) * (descending ? -1 : 1)));
  return keyed.map(([, row]) => row);
}

/** A source of answers that were written into the page. */
export function bundled(bundle) {
  const tables = new Map(Object.entries(bundle.answers));
  const table = (run, step) => {
    const steps = bundle.overview.runs[run]?.steps ?? [];
    return tables.get(`table ${run} ${step ?? steps[steps.length - 1]}`);
  };
  const groupOf = (request) => {
    const shown = table(request.run, request.step);
    const place = shown?.columns.findIndex((column) => column.name === "group_id") ?? -1;
    const row = shown?.rows.find((one) => one.row === request.row);
    return place < 0 ? request.row : row?.cells[place];
  };
  const answers = {
    overview: () => bundle.overview,
    table: ({ run, step }) => table(run, step),
    lens: ({ run, step, row }) => tables.get(`lens ${run} ${step} ${row}`),
    group: (request) => tables.get(`group ${request.run} ${request.step} ${groupOf(request)}`),
  };
  return {
    live: false,
    controls: false,
    kinds: new Set(Object.keys(answers)),
    snapshot: { overview: bundle.overview, table: table(0, null) ?? null },
    subscribe: () => () => {},
    request: async (request) => structuredClone(answers[request.kind]?.(request) ?? { error: "This page was saved without it: open the run folder with rlkit view." }),
  };
}

// ---------------------------------------------------------------- the panel

export function mount(element, source) {
  const panel = new PanelView(element, source);
  return () => panel.destroy();
}

class PanelView {
  constructor(element, source) {
    this.source = source;
    this.gone = new AbortController();
    this.turn = new Map();
    this.tables = new Map();
    this.timers = new Set();
    const remembered = source.snapshot?.remembered ?? {};
    this.state = {
      tab: "rows", run: 0, step: null, follow: true, sort: null, descending: true, where: [], text: "", page: 0,
      chosen: null, detail: "tokens", quantity: "credit", lensPage: 0, figures: false, pins: [], hidden: null,
      left: { run: 0, step: null }, right: { run: 0, step: null }, ...remembered,
    };
    this.overview = { runs: [] };
    this.build(element);
    this.stop = source.subscribe((pushed) => this.pushed(pushed)) ?? (() => {});
    if (source.snapshot?.table) this.keep(source.snapshot.table);
    if (source.snapshot?.overview?.runs) this.seeOverview(source.snapshot.overview);
    else this.ask({ kind: "overview" }).then((answer) => answer && this.seeOverview(answer));
    if (source.live) this.every(15000, () => this.drawHead());
  }

  build(element) {
    this.root = el("div", { class: "rlkit-panel", role: "region", "aria-label": "Completions of the run", "data-lm-suppress-shortcuts": "true" });
    for (const kind of ["keydown", "keyup", "keypress"]) this.root.addEventListener(kind, (event) => event.stopPropagation());
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.parts = {};
    for (const name of ["head", "steps", "tools", "main", "detail"]) this.root.append((this.parts[name] = el("div", { class: `rl-${name}` })));
    this.word = el("div", { class: "rl-word", role: "status", "aria-live": "polite" });
    this.root.append(this.word);
    this.buildSteps();
    // What is replaced between the press and the release of a button never sees the click: pushes wait for the hand.
    const { signal } = this.gone;
    this.root.addEventListener("pointerdown", (event) => {
      this.pressed = true;
      for (const box of this.root.querySelectorAll("details[open]")) if (!box.contains(event.target)) box.open = false;
    });
    for (const kind of ["pointerup", "pointercancel", "blur"]) window.addEventListener(kind, () => this.released(), { signal });
    element.append(this.root);
  }

  destroy() {
    this.gone.abort();
    this.stop();
    for (const timer of this.timers) clearInterval(timer);
    clearTimeout(this.waiting);
    this.root.remove();
    this.tables.clear();
  }

  every(milliseconds, work) {
    this.timers.add(setInterval(work, milliseconds));
  }

  // ---- questions and answers

  /** Ask; null where the answer is an error (which is said), or where a newer question of that kind was asked. */
  async ask(request, { slot = request.kind } = {}) {
    const turn = (this.turn.get(slot) ?? 0) + 1;
    this.turn.set(slot, turn);
    const wait = setTimeout(() => this.tell("Waiting for the kernel: while a cell runs it may not answer. run.start(loop) keeps it free.", "wait"), PATIENCE);
    let answer;
    try {
      answer = await this.source.request(request);
    } catch (error) {
      answer = { error: String(error?.message ?? error) };
    }
    clearTimeout(wait);
    if (this.gone.signal.aborted || this.turn.get(slot) !== turn) return null;
    if (this.word.dataset.kind === "wait") this.tell("");
    if (answer?.error) {
      this.tell(answer.error, "error");
      return null;
    }
    return answer;
  }

  tell(text, kind = "note") {
    this.word.dataset.kind = text ? kind : "";
    this.word.replaceChildren(text ? visible(String(text)) : "");
  }

  remember() {
    this.source.remember?.({ ...this.state });
  }

  released() {
    this.pressed = false;
    const late = this.late;
    this.late = null;
    if (late) setTimeout(() => this.pushed(late));
  }

  pushed({ overview, table }) {
    if (this.gone.signal.aborted) return;
    if (this.pressed) {
      if (table?.columns) this.keep(table);
      this.late = { overview };
      return;
    }
    if (table?.columns) this.keep(table);
    if (overview?.runs) this.seeOverview(overview);
  }

  keep(table) {
    if (table.step === null) return;
    const key = `${table.run} ${table.step}`;
    const known = this.tables.get(key);
    if (!known || table.rows.length >= known.rows.length) this.tables.set(key, table);
    while (this.tables.size > 12) this.tables.delete(this.tables.keys().next().value);
  }

  get run() {
    return this.overview.runs[this.state.run] ?? { steps: [], numbers: {}, notes: [] };
  }

  get step() {
    const steps = this.run.steps;
    return this.state.follow || this.state.step === null ? steps[steps.length - 1] ?? null : this.state.step;
  }

  seeOverview(overview) {
    this.overview = overview;
    if (this.sent && (overview.runs[this.sent.run]?.taken ?? -1) >= this.sent.number) {
      this.tell(`${this.sent.told}: taken by the run.`);
      this.sent = null;
    }
    if (this.state.run >= overview.runs.length) this.state.run = 0;
    this.drawHead();
    if (this.drawnTab !== this.state.tab) this.drawTools();
    const fresh = this.drawnTab !== this.state.tab;
    this.drawnTab = this.state.tab;
    if (this.state.tab === "rows") {
      if (fresh || !this.table || this.table.run !== this.state.run || this.table.step !== this.step) this.loadTable();
    } else if (fresh) this.loadMain();
    else if (JSON.stringify(overview.runs.map((run) => run.steps.at(-1))) !== this.seen) this.soon();
  }

  /** Draw pins or comparison anew for a new step, but not more often than a person can read. */
  soon() {
    if (this.waiting) return;
    this.waiting = setTimeout(() => {
      this.waiting = null;
      if (!this.gone.signal.aborted && this.state.tab !== "rows" && !this.focused(this.parts.main)?.matches("select")) this.loadMain();
    }, 2000);
  }

  change(what, { load = true } = {}) {
    Object.assign(this.state, what);
    this.remember();
    this.drawHead();
    if (!load) return;
    if (this.drawnTab !== this.state.tab) this.drawTools();
    this.drawnTab = this.state.tab;
    this.loadMain();
  }

  loadMain() {
    this.seen = JSON.stringify(this.overview.runs.map((run) => run.steps.at(-1)));
    if (this.state.tab === "rows") return this.loadTable();
    if (this.state.tab === "compare") return this.loadCompare();
    return this.loadPins();
  }

  // ---- head: run, state, steps, controls

  drawHead() {
    const { run } = this;
    this.drawSteps(run);
    const focus = this.focused(this.parts.head);
    if (focus?.matches("input[type=number], select")) { // somebody types, or looks at the list of runs
      this.parts.head.querySelector(".rl-state")?.replaceWith(this.stateBadge(run));
      return;
    }
    const controls = this.controls(run);
    this.parts.head.replaceChildren(this.headLine(run), ...(controls ? [controls] : []));
    this.refocus(this.parts.head, focus);
  }

  stateBadge(run) {
    const status = String(run.status ?? "");
    const alive = status === "running" || status === "paused";
    const silent = alive && typeof run.time === "number" ? Date.now() / 1000 - run.time : 0;
    const long = silent > 120 ? ` · no sign for ${silent > 5400 ? `${Math.round(silent / 3600)} h` : `${Math.round(silent / 60)} min`}` : "";
    const progress = run.step === null || run.step === undefined ? "" : `step ${run.step}${run.max_steps ? ` of ${run.max_steps}` : ""}`;
    const mark = { running: "●", paused: "❚❚", done: "✓" }[status] ?? "■";
    return el("span", { class: "rl-state", "data-status": status }, el("span", { class: "rl-mark", "aria-hidden": true }, status ? mark : ""), ` ${status}${status && progress ? " · " : ""}${progress}${long}`);
  }

  headLine(run) {
    const runs = this.overview.runs;
    const idle = !["running", "paused"].includes(run.status);
    const name = runs.length > 1
      ? el("select", { "aria-label": "Run", "data-key": "run", onchange: (event) => this.change({ run: +event.target.value, step: null, follow: true, page: 0, chosen: null }) },
          runs.map((one) => el("option", { value: one.run, selected: one.run === this.state.run }, spoken(one.name, 60))))
      : el("strong", { class: "rl-name" }, visible(String(run.name ?? "")));
    const tabs = [["rows", "Completions"], ["compare", "Compare"], ["pins", `Pinned${this.state.pins.length ? ` (${this.state.pins.length})` : ""}`]]
      .filter(([tab]) => tab === "rows" || !this.source.kinds || this.source.kinds.has(tab === "pins" ? "pin" : "compare"));
    return el("div", { class: "rl-line" }, name, this.stateBadge(run), el("span", { class: "rl-fill" }),
      idle && this.source.live && this.source.controls && this.exportButton(),
      tabs.length > 1 && el("div", { class: "rl-tabs", role: "tablist", "aria-label": "View" }, tabs.map(([tab, label]) =>
        el("button", { type: "button", role: "tab", "aria-selected": this.state.tab === tab, "data-key": `tab-${tab}`, onclick: () => this.change({ tab }) }, label))));
  }

  /** The step line is made once: a slider that is replaced while it is dragged would be lost to the hand. */
  buildSteps() {
    const go = (index) => {
      const steps = this.run.steps;
      if (steps.length) this.change({ step: steps[Math.min(steps.length - 1, Math.max(0, index))], follow: false, page: 0 });
    };
    const at = () => Math.max(0, nearest(this.run.steps, this.step));
    const slider = el("input", { type: "range", min: 0, "data-key": "slider", "aria-label": "Step", oninput: (event) => go(+event.target.value) });
    const back = el("button", { type: "button", class: "rl-icon", "data-key": "back", "aria-label": "Stored step before", onclick: () => go(at() - 1) }, "‹");
    const on = el("button", { type: "button", class: "rl-icon", "data-key": "on", "aria-label": "Stored step after", onclick: () => go(at() + 1) }, "›");
    const shown = el("output", { class: "rl-step" });
    const stored = el("span", { class: "rl-dim" });
    const follow = el("input", { type: "checkbox", "data-key": "follow", onchange: () => this.change({ follow: follow.checked, step: follow.checked ? null : this.step, page: 0 }) });
    this.parts.steps.replaceChildren(el("div", { class: "rl-line rl-steps" }, el("span", { class: "rl-label" }, "Step"), back, slider, on, shown, stored,
      this.source.live && el("label", { class: "rl-check" }, follow, "follow the newest")));
    this.stepParts = { following: follow.parentElement, slider, back, on, shown, stored, follow };
  }

  drawSteps(run) {
    const { slider, back, on, shown, stored, follow, following } = this.stepParts;
    const steps = run.steps, at = nearest(steps, this.step);
    this.parts.steps.hidden = this.state.tab !== "rows";
    slider.max = Math.max(0, steps.length - 1);
    slider.value = Math.max(0, at);
    slider.disabled = steps.length < 2;
    slider.setAttribute("aria-valuetext", at < 0 ? "no step" : `step ${steps[at]}`);
    back.disabled = at <= 0;
    on.disabled = at >= steps.length - 1;
    shown.textContent = at < 0 ? "–" : String(steps[at]);
    stored.textContent = steps.length ? `${plural(steps.length, "step")} stored` : "No completions are stored yet.";
    follow.checked = this.state.follow;
    if (following) following.hidden = run.status === "done";
  }

  controls(run) {
    const status = run.status;
    if (!this.source.controls || !this.source.live) return null;
    if (status !== "running" && status !== "paused") return null;
    const send = (command, more = {}) => this.command({ command, ...more });
    const button = (label, hint, command) => el("button", { type: "button", "data-key": command, title: hint, onclick: () => send(command) }, label);
    const box = el("div", { class: "rl-line rl-controls", role: "group", "aria-label": "Controls" });
    box.append(
      status === "paused" ? button("Resume", "Go on with the next step", "resume") : button("Pause", "Wait after this step", "pause"),
      button("Stop", "Stop after this step; everything is saved", "stop"), button("Save", "Save a checkpoint after this step", "save"));
    for (const [name, value] of Object.entries(run.numbers ?? {})) box.append(this.numberField(name, value));
    box.append(el("span", { class: "rl-fill" }), this.exportButton());
    return box;
  }

  exportButton() {
    return el("button", { type: "button", "data-key": "export", title: "Write the script of this notebook", onclick: () => this.export(null) }, "Export");
  }

  numberField(name, value) {
    const field = el("input", { type: "number", step: "any", "data-key": `number-${name}`, "aria-label": `${spoken(name, 40)}, now ${say(value)}`, value: typeof value === "number" ? value : "" });
    const apply = () => field.value !== "" && Number.isFinite(+field.value) && this.command({ command: "set", name, value: +field.value });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") apply(), field.blur();
      if (event.key === "Escape") (field.value = value), field.blur();
    });
    return el("span", { class: "rl-number" }, el("label", {}, visible(name), " ", field), el("button", { type: "button", "data-key": `set-${name}`, "aria-label": `Set ${spoken(name, 40)}`, onclick: apply }, "set"));
  }

  async command(request) {
    const told = request.command === "set" ? `${request.name} = ${request.value}` : request.command;
    this.tell(`${told}: sent …`);
    const answer = await this.ask({ kind: "command", run: this.state.run, ...request }, { slot: `command ${told}` });
    if (!answer) return;
    this.sent = typeof answer.number === "number" ? { told, number: answer.number, run: this.state.run } : null;
    this.tell(`${told}: sent; the run takes it between two steps.`);
  }

  async export(path) {
    const answer = await this.ask({ kind: "export", path });
    if (!answer) return;
    const field = el("input", { type: "text", size: 40, placeholder: "my_notebook.ipynb", "aria-label": "Path of the notebook" });
    const again = () => field.value.trim() && this.export(field.value.trim());
    field.addEventListener("keydown", (event) => event.key === "Enter" && again());
    this.word.dataset.kind = answer.script ? "done" : "note";
    this.word.replaceChildren(el("div", { class: "rl-export" },
      el("button", { type: "button", class: "rl-icon rl-close", "aria-label": "Close", onclick: () => this.tell("") }, "×"),
      visible(answer.said),
      answer.needs_path && el("div", { class: "rl-line" }, field, el("button", { type: "button", onclick: again }, "Export")),
      answer.problems.length > 0 && el("ul", {}, answer.problems.map((one) =>
        el("li", {}, el("code", {}, one.code), one.cell ? ` cell ${one.cell}${one.line ? `, line ${one.line}` : ""}: ` : ": ", visible(one.reason), one.fix ? [" ", el("em", {}, "Fix: "), visible(one.fix)] : "")))));
    if (answer.needs_path) field.focus();
  }

  // ---- tools: search and conditions

  drawTools() {
    this.parts.tools.replaceChildren();
    if (this.state.tab !== "rows") return;
    let soon;
    this.search = el("input", {
      type: "search", placeholder: "Search the texts  ( / )", "aria-label": "Search in prompts and completions", value: this.state.text, "data-key": "search",
      oninput: () => { clearTimeout(soon); soon = setTimeout(() => this.change({ text: this.search.value, page: 0 }), 150); },
    });
    this.chips = el("span", { class: "rl-chips" });
    this.pager = el("span", { class: "rl-pager" });
    this.parts.tools.append(el("div", { class: "rl-line" }, this.search, this.conditionForm(), this.chips, el("span", { class: "rl-fill" }), this.pager));
  }

  conditionForm() {
    const columns = el("select", { "aria-label": "Column of the condition" });
    const ops = el("select", { "aria-label": "Comparison" }, OPERATORS.map(([op, label]) => el("option", { value: op }, label)));
    const value = el("input", { type: "text", size: 8, "aria-label": "Value to compare with" });
    const box = el("details", { class: "rl-pop" }, el("summary", { "data-key": "filter" }, "Filter"));
    const add = () => {
      this.change({ where: [...this.state.where, { column: columns.value, op: ops.value, value: value.value }], page: 0 });
      value.value = "";
      box.open = false;
    };
    value.addEventListener("keydown", (event) => event.key === "Enter" && add());
    box.addEventListener("toggle", () => {
      const names = this.table?.columns.map((column) => column.name) ?? [];
      const before = columns.value || "reward";
      columns.replaceChildren(...names.map((name) => el("option", { value: name, selected: name === before }, spoken(name, 40))));
    });
    box.append(el("div", { class: "rl-popped" }, columns, ops, value, el("button", { type: "button", onclick: add }, "Add")));
    return box;
  }

  drawChips() {
    if (!this.chips) return;
    const label = (one) => `${spoken(one.column, 30)} ${OPERATORS.find(([op]) => op === one.op)?.[1] ?? one.op}${one.op === "missing" ? "" : ` ${spoken(one.value, 30)}`}`;
    this.chips.replaceChildren(...this.state.where.map((one, index) =>
      el("button", { type: "button", class: "rl-chip", "data-key": `chip-${index}`, "aria-label": `Remove the condition ${label(one)}`, onclick: () => this.change({ where: this.state.where.filter((_, i) => i !== index), page: 0 }) }, label(one), " ×")));
  }

  // ---- table

  async loadTable() {
    const { run, sort, descending, where, text } = this.state;
    const step = this.step;
    if (step === null) return this.parts.main.replaceChildren();
    let whole = this.tables.get(`${run} ${step}`);
    const enough = () => whole && whole.rows.length >= whole.total && !(text && whole.cut && this.source.live);
    if (whole) this.showTable(this.locally(whole), whole.rows.length < whole.total);
    if (enough()) return;
    if (!whole || whole.rows.length < whole.total) {
      const answer = await this.ask({ kind: "table", run, step });
      if (!answer) return;
      this.keep(answer);
      whole = answer;
      if (enough() || !this.source.live) return this.showTable(this.locally(whole));
    }
    const answer = await this.ask({ kind: "table", run, step, sort, descending, where, text, offset: this.state.page * PAGE, limit: PAGE });
    if (answer) this.showTable({ ...answer, offset: answer.offset });
  }

  locally(whole) {
    const rows = select(whole, this.state);
    const pages = Math.max(1, Math.ceil(rows.length / PAGE));
    const page = Math.min(this.state.page, pages - 1);
    return { ...whole, found: rows.length, offset: page * PAGE, rows: rows.slice(page * PAGE, (page + 1) * PAGE) };
  }

  showTable(table) {
    this.table = table;
    if (!this.state.chosen?.by && table.rows.length) this.state.chosen = { run: table.run, step: table.step, row: table.rows[0].row };
    this.drawTable();
    this.loadDetail();
  }

  shownColumns() {
    const hidden = this.state.hidden ?? this.table.columns.filter((column, index) => column.hidden || index > 13).map((column) => column.name);
    return this.table.columns.map((column, index) => ({ ...column, index })).filter((column) => !hidden.includes(column.name));
  }

  drawTable() {
    const { table, state } = this;
    const main = this.parts.main;
    const focus = this.focused(main);
    const columns = this.shownColumns();
    const decimals = new Map(columns.map((column) => [column.name, decimalsOf(table.rows.map((row) => row.cells[column.index]))]));
    const top = Math.max(1e-9, ...columns.filter((column) => column.name === "advantage").flatMap((column) => table.rows.map((row) => Math.abs(numeric(row.cells[column.index])) || 0)));
    const order = (column) => {
      const first = column.kind !== "text";
      const same = state.sort === column.name;
      this.change(!same ? { sort: column.name, descending: first, page: 0 } : state.descending === first ? { descending: !first, page: 0 } : { sort: null, page: 0 });
    };
    const head = el("tr", {}, columns.map((column) => el("th", {
      scope: "col", class: `rl-${column.kind}`, "aria-sort": state.sort === column.name ? (state.descending ? "descending" : "ascending") : "none",
    }, el("button", { type: "button", "data-key": `sort-${column.name}`, title: column.hint || null, onclick: () => order(column) },
      el("span", { class: "rl-arrow", "aria-hidden": true }, state.sort === column.name ? (state.descending ? "▼" : "▲") : ""), shortName(column.name)))));
    const place = new Map(table.columns.map((column, index) => [column.name, index]));
    const chosen = state.chosen;
    const isChosen = (row) => chosen && chosen.run === table.run && chosen.step === table.step && chosen.row === row.row;
    const entry = table.rows.find(isChosen) ?? table.rows[0];
    const body = table.rows.map((row) => el("tr", {
      "data-key": `row-${row.row}`, "data-row": row.row, tabindex: row === entry ? 0 : -1, "aria-selected": Boolean(isChosen(row)),
      onclick: () => this.choose(row.row),
    }, columns.map((column) => this.cell(column, row.cells[column.index], decimals.get(column.name), top, (name) => row.cells[place.get(name)]))));
    const scroller = main.querySelector(".rl-scroll") ?? el("div", { class: "rl-scroll" });
    const scrolled = [scroller.scrollLeft, scroller.scrollTop];
    scroller.replaceChildren(el("table", { role: "grid", "aria-label": `Completions of step ${table.step}`, "aria-rowcount": table.found },
      el("thead", {}, head), el("tbody", {}, body)),
      table.rows.length ? "" : el("p", { class: "rl-dim rl-empty" }, table.total ? "No completion meets the filter." : "This step has no completions."));
    main.replaceChildren(table.said ? el("p", { class: "rl-note" }, table.said) : "", scroller);
    [scroller.scrollLeft, scroller.scrollTop] = scrolled;
    this.refocus(main, focus);
    this.drawChips();
    this.drawPager();
  }

  cell(column, value, decimals, top, other) {
    if (column.name === "completion" || column.name === "prompt" || column.kind === "text") {
      const cut = typeof value === "object" && value !== null;
      return el("td", { class: `rl-text rl-c-${column.name.replace(/\W/g, "_")}` }, el("span", { class: "rl-clip" }, value === null ? el("span", { class: "rl-dim" }, "–") : visible(cut ? value.text : String(value))),
        cut && el("span", { class: "rl-more", title: "Select the row and open Text for all of it" }, `… ${count(value.length)} characters`));
    }
    const attributes = { class: `rl-${column.kind}` };
    if (typeof value === "string") attributes.class += " rl-odd";
    if (column.name === "advantage" && typeof value === "number") attributes.style = { "background-color": shade(value / top, 0.32) };
    if (column.name === "truncated") return el("td", attributes, value ? el("span", { title: "cut off by the length limit" }, "✂ cut") : el("span", { class: "rl-dim" }, "–"));
    if (column.name === "clipped" && typeof value === "number") return el("td", attributes, value > 0 ? "▲ high" : value < 0 ? "▼ low" : el("span", { class: "rl-dim" }, "–"));
    const marks = {
      length: other("truncated") === true ? el("span", { class: "rl-flag", title: "The length limit cut the completion off", "aria-label": "cut off" }, "✂") : el("span", { class: "rl-flag" }),
      ratio: el("span", { class: "rl-flag", title: other("clipped") ? "clipped" : null, "aria-label": other("clipped") > 0 ? "clipped above" : other("clipped") < 0 ? "clipped below" : null }, other("clipped") > 0 ? "▲" : other("clipped") < 0 ? "▼" : ""),
    };
    return el("td", attributes, say(value, typeof value === "number" && column.kind === "number" ? decimals : null), marks[column.name]);
  }

  drawPager() {
    if (!this.pager) return;
    const { table } = this, pages = Math.max(1, Math.ceil(table.found / PAGE)), page = Math.floor(table.offset / PAGE);
    const focus = this.focused(this.pager);
    const turn = (to) => this.change({ page: to });
    const found = table.found === table.total ? plural(table.total, "completion") : `${count(table.found)} of ${plural(table.total, "completion")}`;
    this.pager.replaceChildren(el("span", { class: "rl-dim" }, found), this.columnChooser(),
      ...(pages > 1 ? [el("button", { type: "button", class: "rl-icon", "data-key": "page-back", "aria-label": "Page before", disabled: page <= 0, onclick: () => turn(page - 1) }, "‹"),
        el("span", {}, `${page + 1} / ${pages}`),
        el("button", { type: "button", class: "rl-icon", "data-key": "page-on", "aria-label": "Page after", disabled: page >= pages - 1, onclick: () => turn(page + 1) }, "›")] : []));
    this.refocus(this.pager, focus);
  }

  columnChooser() {
    const open = this.pager.querySelector("details")?.open;
    const shown = new Set(this.shownColumns().map((column) => column.name));
    const names = this.table.columns.map((column) => column.name);
    const flip = (name, on) => this.change({ hidden: names.filter((one) => (one === name ? !on : !shown.has(one))) });
    return el("details", { class: "rl-pop", open }, el("summary", { "data-key": "columns" }, "Columns"),
      el("div", { class: "rl-popped rl-list" }, names.map((name) => el("label", { class: "rl-check" },
        el("input", { type: "checkbox", "data-key": `column-${name}`, checked: shown.has(name), onchange: (event) => flip(name, event.target.checked) }), spoken(name, 40)))));
  }

  choose(row, { step = this.table.step, run = this.table.run, detail = this.state.detail } = {}) {
    Object.assign(this.state, { chosen: { run, step, row, by: "reader" }, lensPage: 0, detail });
    this.remember();
    for (const line of this.parts.main.querySelectorAll("tr[data-row]")) {
      const is = this.state.tab === "rows" && run === this.table?.run && step === this.table?.step && line.dataset.row === String(row);
      line.setAttribute("aria-selected", is);
      if (this.state.tab === "rows") line.tabIndex = is ? 0 : -1;
    }
    for (const answer of this.parts.main.querySelectorAll("[data-answer]")) answer.setAttribute("aria-pressed", answer.dataset.answer === `${run} ${step} ${row}`);
    this.loadDetail();
  }

  // ---- detail of one completion: tokens, group, text

  loadDetail() {
    const chosen = this.state.chosen;
    if (!chosen) return this.parts.detail.replaceChildren();
    const key = JSON.stringify([chosen.run, chosen.step, chosen.row, this.state.detail, this.state.lensPage]);
    if (this.detailKey === key) return;
    this.detailKey = key;
    const { run, step, row } = chosen;
    const work = { tokens: () => this.loadLens({ run, step, row }), group: () => this.loadGroup({ run, step, row }), text: () => this.loadText({ run, step, row }) };
    work[this.state.detail]();
  }

  detailHead(about = []) {
    const chosen = this.state.chosen;
    const tabs = [["tokens", "Tokens"], ["group", "Group"], ["text", "Text"]].filter(([tab]) => tab !== "text" || !this.source.kinds || this.source.kinds.has("text"));
    const name = this.overview.runs.length > 1 ? `${spoken(this.overview.runs[chosen.run]?.name, 40)} · ` : "";
    return el("div", { class: "rl-line rl-about" },
      el("div", { class: "rl-tabs", role: "tablist", "aria-label": "Detail of the completion" }, tabs.map(([tab, label]) =>
        el("button", { type: "button", role: "tab", "aria-selected": this.state.detail === tab, "data-key": `detail-${tab}`, onclick: () => { this.state.detail = tab; this.remember(); this.loadDetail(); } }, label))),
      el("span", { class: "rl-where" }, `${name}step ${chosen.step}, row ${chosen.row}`), about, el("span", { class: "rl-fill" }));
  }

  drawDetail(...nodes) {
    const focus = this.focused(this.parts.detail);
    this.parts.detail.replaceChildren(...nodes);
    this.refocus(this.parts.detail, focus);
  }

  async loadLens(request) {
    const answer = await this.ask({ kind: "lens", ...request, page: this.state.lensPage }, { slot: "detail" });
    if (answer) { this.lens = answer; this.drawLens(); }
  }

  drawLens() {
    const { lens, state } = this;
    const usable = lens.quantities.filter((one) => one.values);
    const quantity = usable.find((one) => one.name === state.quantity) ?? usable[0] ?? null;
    const facts = [["reward", lens.about.reward], ["advantage", lens.about.advantage], ["KL", lens.about.kl]].filter(([, value]) => value !== null)
      .map(([name, value]) => el("span", { class: "rl-fact" }, `${name} `, el("b", {}, say(value))));
    facts.push(el("span", { class: "rl-fact" }, plural(lens.length, "token")));
    const picker = el("div", { class: "rl-line rl-picker", role: "radiogroup", "aria-label": "Quantity that shades the tokens" }, lens.quantities.map((one) =>
      el("button", { type: "button", role: "radio", class: "rl-pick", "aria-checked": quantity === one, disabled: !one.values, title: one.values ? one.label : `not available: ${one.why}`, "data-key": `quantity-${one.name}`,
        onclick: () => { state.quantity = one.name; this.remember(); this.drawLens(); } }, one.name)),
      el("label", { class: "rl-check" }, el("input", { type: "checkbox", "data-key": "figures", checked: state.figures, onchange: (event) => { state.figures = event.target.checked; this.remember(); this.drawLens(); } }), "numbers"));
    const readout = el("div", { class: "rl-readout", role: "status", "aria-live": "polite" });
    const text = el("div", { class: `rl-tokens${state.figures ? " rl-figures" : ""}`, role: "listbox", "aria-label": `Tokens shaded by ${quantity?.name ?? "nothing"}`, dir: "ltr" });
    lens.tokens.forEach((token, index) => text.append(...this.token(token, index, quantity, readout)));
    if (lens.page === lens.pages - 1) text.append(lens.truncated ? el("span", { class: "rl-cut", title: "The length limit cut the completion off here" }, "✂ cut off") : "");
    this.drawDetail(this.detailHead(facts), picker, quantity ? this.legend(quantity, lens) : el("p", { class: "rl-note" }, "The step stored no numbers per token."),
      lens.said ? el("p", { class: "rl-note" }, lens.said) : "", text, readout, this.lensPager(lens));
    if (lens.tokens.length) readout.append(el("span", { class: "rl-dim" }, "Point at a token, or walk through them with the arrow keys, for its numbers."));
  }

  token(token, index, quantity, readout) {
    const { lens } = this;
    const said = typeof token === "object" ? token.text : token;
    const masked = lens.mask && !lens.mask[index];
    const at = lens.first + index;
    const end = !lens.truncated && at === lens.length - 1;
    const value = quantity ? quantity.values[index] : null;
    const classes = ["rl-token"];
    if (masked) classes.push("rl-masked");
    if (SPECIAL.test(said)) classes.push("rl-special");
    if (end) classes.push("rl-end");
    if (!masked && typeof value === "string") classes.push("rl-odd");
    const state = [end && "end token", masked && "masked: not in the loss"].filter(Boolean).join(", ");
    const style = !masked && typeof value === "number" && quantity.scale > 0 ? { "background-color": shade(value / quantity.scale, STRONGEST) } : {};
    const node = el("span", {
      class: classes.join(" "), role: "option", tabindex: index === 0 ? 0 : -1, "data-token": index, "data-key": `token-${at}`, "aria-selected": false, style,
      "aria-label": `token ${at + 1}: ${spoken(said, 40) || "empty"}${state ? `, ${state}` : ""}${quantity ? `, ${quantity.name} ${say(value)}` : ""}`,
      onmouseenter: () => this.read(readout, index, false), onfocus: () => this.read(readout, index, true),
      onclick: (event) => event.currentTarget.focus(),
    }, said === "" ? el("span", { class: "rl-sign" }, "∅") : visible(said, { spaces: true }), typeof token === "object" ? el("span", { class: "rl-more" }, `… ${count(token.length)}`) : "",
      this.state.figures ? el("span", { class: "rl-figure" }, masked ? "masked" : quantity ? figure(quantity, value) : "") : "");
    return said.includes("\n") ? [node, document.createElement("br")] : [node];
  }

  /** All numbers of a token, in the line under the tokens: for the mouse and for the keyboard. */
  read(readout, index, focused) {
    const { lens } = this;
    if (!lens.tokens.length) return;
    const text = this.parts.detail.querySelector(".rl-tokens");
    for (const node of text?.querySelectorAll(".rl-token[aria-selected=true]") ?? []) node.setAttribute("aria-selected", "false");
    const node = text?.querySelector(`[data-token="${index}"]`);
    node?.setAttribute("aria-selected", "true");
    if (focused && node) for (const other of text.querySelectorAll('[tabindex="0"]')) if (other !== node) other.tabIndex = -1;
    if (focused && node) node.tabIndex = 0;
    const token = lens.tokens[index], at = lens.first + index;
    const said = typeof token === "object" ? token.text : token;
    const id = lens.ids ? ` · id ${lens.ids[index]}` : "";
    readout.replaceChildren(
      el("span", { class: "rl-read-token" }, `${at + 1} / ${lens.length} `, el("code", {}, visible(said, { spaces: true })), id,
        lens.mask && !lens.mask[index] ? " · masked" : "", !lens.truncated && at === lens.length - 1 ? " · end" : ""),
      ...lens.quantities.filter((one) => one.values).map((one) => el("span", { class: "rl-fact" }, `${one.name} `, el("b", {}, figure(one, one.values[index])))));
  }

  legend(quantity, lens) {
    const scale = quantity.scale;
    const stops = [];
    for (let i = 0; i <= 10; i++) stops.push(shade(quantity.signed ? i / 5 - 1 : i / 10, STRONGEST));
    const bar = el("span", { class: "rl-bar", "aria-hidden": true, style: { "background-image": `linear-gradient(to right, ${stops.join(", ")})` } });
    const row = lens.about;
    const clip = quantity.name === "ratio" && typeof row.ratio === "number"
      ? el("span", { class: "rl-fact" }, "ratio of the row ", el("b", {}, say(row.ratio)), row.clipped > 0 ? " ▲ clipped above" : row.clipped < 0 ? " ▼ clipped below" : " not clipped", typeof row.epsilon === "number" ? ` (1 ${MINUS} ${say(row.epsilon)} to 1 + ${say(typeof row.epsilon_high === "number" ? row.epsilon_high : row.epsilon)})` : "")
      : "";
    return el("div", { class: "rl-line rl-legend" },
      el("span", { class: "rl-scale" }, quantity.signed ? figure(quantity, typeof scale === "number" ? -scale : scale) : "0", bar, figure(quantity, scale)),
      el("span", { class: "rl-dim" }, `${quantity.label}, ${quantity.unit}`), el("span", { class: "rl-fact" }, "sum ", el("b", {}, figure(quantity, quantity.sum))), clip);
  }

  lensPager(lens) {
    if (lens.pages < 2) return "";
    const turn = (page) => { this.state.lensPage = page; this.loadDetail(); };
    return el("div", { class: "rl-line" },
      el("button", { type: "button", "data-key": "lens-back", disabled: lens.page <= 0, onclick: () => turn(lens.page - 1) }, "‹ before"),
      el("span", {}, `tokens ${lens.first + 1} to ${lens.first + lens.tokens.length} of ${count(lens.length)}`),
      el("button", { type: "button", "data-key": "lens-on", disabled: lens.page >= lens.pages - 1, onclick: () => turn(lens.page + 1) }, "after ›"));
  }

  async loadGroup(request) {
    const answer = await this.ask({ kind: "group", ...request }, { slot: "detail" });
    if (answer) this.drawGroup(answer);
  }

  drawGroup(group) {
    const pinned = this.state.pins.some((pin) => pin.run === group.run && pin.row_id === group.row_id);
    const canPin = group.row_id !== null && (!this.source.kinds || this.source.kinds.has("pin"));
    const penalty = group.beta !== null;
    const n = group.rows.length;
    const all = decimalsOf(group.rows.flatMap((row) => [row.r, row.advantage, row.mean]));
    const fixed = (value) => say(value, typeof value === "number" ? all : null);
    const term = (value, first) => (typeof value === "number" && value < 0 && !first ? `(${fixed(value)})` : fixed(value));
    const sum = (row) => (row.others ? `(${row.others.map((value, i) => term(value, i === 0)).join(" + ")}) / ${row.count}` : `(${fixed(row.total)} ${MINUS} ${term(row.r)}) / ${row.count}`);
    const partDecimals = group.parts.map((_, index) => decimalsOf(group.rows.map((row) => row.parts[index])));
    const columns = ["row", "completion", ...group.parts, ...(penalty ? ["R", `β·KL`] : []), penalty ? "r = R − β·KL" : "r", "mean of the others", "A = r − mean", "stored A"];
    const number = (value, decimals = null) => el("td", { class: `rl-number ${typeof value === "string" ? "rl-odd" : ""}` }, say(value, typeof value === "number" ? decimals : null));
    const lines = group.rows.map((row) => {
      const chosen = this.state.chosen?.row === row.row;
      return el("tr", { "data-key": `member-${row.row}`, tabindex: chosen ? 0 : -1, "data-row": row.row, "data-member": true, "aria-selected": chosen, onclick: () => this.choose(row.row, { run: group.run, step: group.step }) },
        number(row.row), el("td", { class: "rl-text" }, el("span", { class: "rl-clip rl-three" }, visible(typeof row.completion === "object" ? row.completion.text : row.completion)), typeof row.completion === "object" && el("span", { class: "rl-more" }, `… ${count(row.completion.length)} characters`), row.truncated === true && el("span", { class: "rl-more", title: "cut off by the length limit" }, " ✂")),
        row.parts.map((value, index) => number(value, partDecimals[index])),
        penalty && [number(row.reward, all), number(typeof row.kl === "number" ? group.beta * row.kl : row.kl, all)],
        number(row.r, all),
        row.scored ? el("td", { class: "rl-sum" }, row.count ? [el("span", { class: "rl-dim rl-whole-line" }, sum(row)), " ", el("span", { class: "rl-whole-line" }, el("span", { class: "rl-dim" }, "= "), fixed(row.mean))] : el("span", { class: "rl-dim" }, "no other")) : el("td", { class: "rl-sum rl-dim" }, "no reward: left out of every mean"),
        el("td", { class: "rl-sum" }, row.scored && row.count ? [el("span", { class: "rl-dim rl-whole-line" }, `${fixed(row.r)} ${MINUS} ${term(row.mean)}`), " ", el("span", { class: "rl-whole-line" }, el("span", { class: "rl-dim" }, "= "), el("b", {}, fixed(row.advantage)))] : fixed(row.advantage)),
        row.stored === null ? el("td", { class: "rl-number rl-dim" }, "–") : el("td", { class: `rl-number ${row.agrees ? "" : "rl-differs"}` }, el("span", { "aria-label": row.agrees ? "agrees" : "differs" }, row.agrees ? "✓ " : "≠ "), fixed(row.stored)));
    });
    this.drawDetail(this.detailHead([el("span", { class: "rl-fact" }, `group ${say(group.group)} · ${plural(group.total, "completion")}`)]),
      el("div", { class: "rl-prompt" }, el("span", { class: "rl-label" }, "prompt "), visible(typeof group.prompt === "object" ? `${group.prompt.text}` : group.prompt, { lines: true }), typeof group.prompt === "object" && el("span", { class: "rl-more" }, `… ${count(group.prompt.length)} characters`)),
      el("div", { class: "rl-line" }, el("span", { class: `rl-rule rl-rule-${group.rule.replace(/\W/g, "-")}` }, group.explained), group.rows.some((row) => row.count && !row.others) && el("span", { class: "rl-fact" }, "sum of all r ", el("b", {}, fixed(group.rows[0].total))),
        el("span", { class: "rl-fact", title: "The sums are made with all digits and shown rounded." }, all ? `rounded to ${all} decimals` : ""), el("span", { class: "rl-fill" }),
        canPin && el("button", { type: "button", "data-key": "pin", "aria-pressed": pinned, onclick: () => this.pin(group, pinned) }, pinned ? "★ pinned" : "☆ pin prompt")),
      el("div", { class: "rl-scroll rl-group" }, el("table", { role: "grid", "aria-label": "Advantages of the group" }, el("thead", {}, el("tr", {}, columns.map((name, index) => el("th", { scope: "col", class: index === 1 ? "rl-text" : name === "mean of the others" ? "rl-sum" : "rl-number" }, name)))), el("tbody", {}, lines))),
      group.total > n ? el("p", { class: "rl-note" }, `${count(n)} of ${count(group.total)} completions are shown.`) : "");
  }

  pin(group, pinned) {
    const rest = this.state.pins.filter((one) => !(one.run === group.run && one.row_id === group.row_id));
    this.state.pins = pinned ? rest : [...rest, { run: group.run, row_id: group.row_id }];
    this.remember();
    this.drawHead();
    this.drawGroup(group);
  }

  async loadText(request, offset = 0, column = "completion") {
    const answers = await Promise.all(["prompt", "completion"].map((name) => this.ask({ kind: "text", ...request, column: name, offset: name === column ? offset : 0 }, { slot: `text ${name}` })));
    if (this.state.detail !== "text") return;
    const blocks = answers.filter(Boolean).map((one) => el("div", { class: "rl-block" },
      el("div", { class: "rl-line" }, el("span", { class: "rl-label" }, one.column), el("span", { class: "rl-dim" }, one.length > one.text.length ? `characters ${count(one.offset + 1)} to ${count(Math.min(one.length, one.offset + one.page))} of ${count(one.length)}` : `${count(one.length)} characters`),
        one.length > one.page && [el("button", { type: "button", "data-key": `text-back-${one.column}`, disabled: one.offset <= 0, onclick: () => this.loadText(request, one.offset - one.page, one.column) }, "‹"),
          el("button", { type: "button", "data-key": `text-on-${one.column}`, disabled: one.offset + one.page >= one.length, onclick: () => this.loadText(request, one.offset + one.page, one.column) }, "›")]),
      el("div", { class: "rl-whole", tabindex: 0, role: "document", "aria-label": one.column }, visible(one.text, { lines: true }))));
    this.drawDetail(this.detailHead(), ...blocks);
  }

  // ---- comparison and pins

  async loadCompare() {
    const { left, right } = this.state;
    const answer = await this.ask({ kind: "compare", left, right });
    if (answer) this.drawCompare(answer);
  }

  sidePicker(key) {
    const side = this.state[key], runs = this.overview.runs, steps = runs[side.run]?.steps ?? [];
    const set = (what) => this.change({ [key]: { ...side, ...what } });
    return el("span", { class: "rl-side" }, el("span", { class: "rl-label" }, key === "left" ? "A" : "B"),
      runs.length > 1 && el("select", { "aria-label": `Run of ${key}`, "data-key": `${key}-run`, onchange: (event) => set({ run: +event.target.value, step: null }) }, runs.map((one) => el("option", { value: one.run, selected: one.run === side.run }, spoken(one.name, 40)))),
      el("select", { "aria-label": `Step of ${key}`, "data-key": `${key}-step`, onchange: (event) => set({ step: event.target.value === "" ? null : +event.target.value }) },
        el("option", { value: "" }, "newest step"), steps.slice(-2000).map((step) => el("option", { value: step, selected: step === side.step }, `step ${step}`))));
  }

  drawCompare(found) {
    const [a, b] = found.sides;
    const name = (side) => `${this.overview.runs.length > 1 ? `${spoken(this.overview.runs[side.run]?.name, 30)}, ` : ""}step ${side.step ?? "–"}`;
    const blocks = found.prompts.map((one) => el("div", { class: "rl-pair" },
      el("div", { class: "rl-prompt" }, el("span", { class: "rl-label" }, "prompt "), visible(typeof one.prompt === "object" ? one.prompt.text : one.prompt, { lines: true }),
        el("span", { class: "rl-change", style: { "background-color": typeof one.change === "number" ? shade(one.change, 0.5) : "" } }, `mean reward ${say(one.left.mean, 3)} → ${say(one.right.mean, 3)}  (${signed(one.change, 3)})`)),
      el("div", { class: "rl-two" }, this.answers(one.left, a.run, a.step), this.answers(one.right, b.run, b.step))));
    const focus = this.focused(this.parts.main), scrolled = this.scrolled();
    this.parts.main.replaceChildren(
      el("div", { class: "rl-line" }, this.sidePicker("left"), el("span", { class: "rl-dim" }, "against"), this.sidePicker("right"), el("span", { class: "rl-fill" }),
        el("span", { class: "rl-dim" }, `${plural(found.shared, "prompt")} in both (${count(a.prompts)} in A, ${count(b.prompts)} in B)`)),
      ...[a, b].filter((side) => side.said).map((side) => el("p", { class: "rl-note" }, side.said)),
      found.shared ? el("div", { class: "rl-two rl-heads" }, el("b", {}, `A · ${name(a)}`), el("b", {}, `B · ${name(b)}`)) : el("p", { class: "rl-note" }, "The two have no prompt in common. Other steps of the same data, or two runs at the same step, may have."),
      el("div", { class: "rl-scroll rl-tall" }, blocks),
      found.shared > found.prompts.length ? el("p", { class: "rl-note" }, `The ${count(found.prompts.length)} prompts that changed most are shown.`) : "");
    this.scrolled(scrolled);
    this.refocus(this.parts.main, focus);
    if (this.state.chosen?.by) this.loadDetail(); else this.parts.detail.replaceChildren();
  }

  answers(side, run, step) {
    const decimals = decimalsOf(side.rows.map((row) => row.reward));
    const chosen = (row) => this.state.chosen?.by && this.state.chosen.run === run && this.state.chosen.step === step && this.state.chosen.row === row;
    return el("div", { class: "rl-answers" }, side.rows.map((row) => el("button", { type: "button", class: "rl-answer", "aria-pressed": Boolean(chosen(row.row)), "data-answer": `${run} ${step} ${row.row}`, "data-key": `answer-${run}-${step}-${row.row}`, onclick: () => this.choose(row.row, { run, step }) },
      el("span", { class: "rl-reward" }, say(row.reward, typeof row.reward === "number" ? decimals : null)), el("span", { class: "rl-clip rl-three" }, visible(typeof row.completion === "object" ? row.completion.text : row.completion)),
      typeof row.completion === "object" && el("span", { class: "rl-more" }, `… ${count(row.completion.length)} characters`), row.truncated === true && el("span", { class: "rl-more" }, " ✂"))),
      side.total > side.rows.length && el("p", { class: "rl-dim" }, `and ${count(side.total - side.rows.length)} more`));
  }

  async loadPins() {
    const found = [];
    for (const pin of this.state.pins.slice(-6)) found.push([pin, await this.ask({ kind: "pin", ...pin }, { slot: `pin ${pin.run} ${pin.row_id}` })]);
    if (this.state.tab !== "pins") return;
    const focus = this.focused(this.parts.main), scrolled = this.scrolled();
    this.parts.main.replaceChildren(found.length ? el("div", { class: "rl-scroll rl-tall" }, found.filter(([, answer]) => answer).map(([pin, answer]) => this.pinned(pin, answer)))
      : el("p", { class: "rl-note" }, "No prompt is pinned. Open the group of a completion and pin its prompt: its answers of all stored steps are shown here."));
    this.scrolled(scrolled);
    this.refocus(this.parts.main, focus);
    if (this.state.chosen?.by) this.loadDetail(); else this.parts.detail.replaceChildren();
  }

  pinned(pin, answer) {
    const means = answer.steps.map((one) => one.mean).filter((value) => typeof value === "number");
    const top = Math.max(1e-9, ...means.map(Math.abs));
    const width = (mean) => (typeof mean === "number" ? `${Math.round((100 * Math.max(0, mean)) / top)}%` : "0");
    return el("div", { class: "rl-pair" },
      el("div", { class: "rl-prompt" }, el("span", { class: "rl-label" }, "prompt "), visible(typeof answer.prompt === "object" ? answer.prompt.text : answer.prompt || `row ${pin.row_id}`, { lines: true }), el("span", { class: "rl-fill" }),
        el("button", { type: "button", "data-key": `unpin-${pin.run}-${pin.row_id}`, onclick: () => { this.change({ pins: this.state.pins.filter((one) => one !== pin) }); } }, "unpin")),
      answer.steps.length ? "" : el("p", { class: "rl-note" }, `Not among the ${plural(answer.looked, "newest step")} that are stored.`),
      answer.steps.map((one) => el("div", { class: "rl-at" },
        el("div", { class: "rl-when" }, `step ${one.step}`, el("span", { class: "rl-meter", "aria-hidden": true }, el("span", { style: { width: width(one.mean) } })), el("span", { class: "rl-dim" }, `mean ${say(one.mean, 3)}`)),
        this.answers(one, answer.run, one.step))),
      answer.older !== null ? el("button", { type: "button", "data-key": `older-${pin.run}-${pin.row_id}`, onclick: (event) => this.older(event.target, pin, answer.older) }, "older steps") : "");
  }

  async older(button, pin, before) {
    const answer = await this.ask({ kind: "pin", ...pin, before });
    if (answer) button.replaceWith(...Array.from(this.pinned(pin, answer).children).slice(1));
  }

  // ---- keyboard and focus

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = event.target;
    const typing = target.matches?.("input:not([type=range]):not([type=checkbox]), select, textarea");
    const done = () => event.preventDefault();
    if (event.key === "/" && !typing) { done(); this.search?.focus(); this.search?.select(); return; }
    if (event.key === "Escape" && target === this.search) { this.search.blur(); this.focusRow(); return; }
    if (event.key === "Escape") { for (const box of this.root.querySelectorAll("details[open]")) box.open = false; }
    if (typing) { if (event.key === "ArrowDown" && target === this.search) { done(); this.focusRow(); } return; }
    const line = target.closest?.("tr[data-row]");
    const token = target.closest?.(".rl-token");
    if (line && target === line) this.rowKey(event, line, done);
    else if (token) this.tokenKey(event, token, done);
    else if (target.closest?.("[role=tablist], [role=radiogroup]") && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
      const all = Array.from(target.closest("[role=tablist], [role=radiogroup]").querySelectorAll("button:not([disabled])"));
      const next = all[(all.indexOf(target) + (event.key === "ArrowRight" ? 1 : all.length - 1)) % all.length];
      const key = next?.dataset.key;
      done(); next?.click();
      this.root.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
    }
  }

  rowKey(event, line, done) {
    const lines = Array.from(line.parentElement.querySelectorAll("tr[data-row]"));
    const at = lines.indexOf(line);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: lines.length - 1 }[event.key];
    const go = (index) => { const next = lines[Math.min(lines.length - 1, Math.max(0, index))]; for (const one of lines) one.tabIndex = one === next ? 0 : -1; next.focus(); if (!next.dataset.member) next.click(); };
    if (to !== undefined) { done(); go(to); }
    else if (event.key === "Enter" || event.key === " ") { done(); line.click(); if (event.key === "Enter") this.enterLens = true, this.openLens(); }
    else if (event.key === "g") { done(); this.state.detail = "group"; this.loadDetail(); }
    else if (event.key === "t") { done(); this.state.detail = "tokens"; this.loadDetail(); }
    else if ((event.key === "PageDown" || event.key === "PageUp") && !line.dataset.member) {
      const pages = Math.ceil(this.table.found / PAGE), page = Math.floor(this.table.offset / PAGE) + (event.key === "PageDown" ? 1 : -1);
      if (page >= 0 && page < pages) { done(); this.change({ page }); }
    }
  }

  async openLens() {
    this.state.detail = "tokens";
    this.detailKey = null;
    const { run, step, row } = this.state.chosen;
    await this.loadLens({ run, step, row });
    this.parts.detail.querySelector('.rl-token[tabindex="0"]')?.focus();
  }

  tokenKey(event, token, done) {
    const all = Array.from(this.parts.detail.querySelectorAll(".rl-token"));
    const at = all.indexOf(token);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 10, ArrowUp: at - 10, Home: 0, End: all.length - 1 }[event.key];
    if (to !== undefined) { done(); all[Math.min(all.length - 1, Math.max(0, to))]?.focus(); }
    else if (event.key === "Escape") { done(); this.focusRow(); }
  }

  /** How far pins or comparison are scrolled; sets it again after they were drawn anew. */
  scrolled(to = null) {
    const box = this.parts.main.querySelector(".rl-tall");
    if (box && to !== null) box.scrollTop = to;
    return box?.scrollTop ?? null;
  }

  focusRow() {
    this.parts.main.querySelector('tr[data-row][tabindex="0"]')?.focus();
  }

  focused(part) {
    const active = this.root.getRootNode().activeElement;
    return active && part.contains(active) ? active : null;
  }

  refocus(part, before) {
    if (!before?.dataset.key || part.contains(this.root.getRootNode().activeElement)) return;
    part.querySelector(`[data-key="${CSS.escape(before.dataset.key)}"]`)?.focus({ preventScroll: true });
  }
}

function nearest(steps, wanted) {
  let best = -1;
  steps.forEach((step, index) => { if (best < 0 || Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = index; });
  return best;
}

/** A value of a quantity, with decimals that suit its scale. */
function figure(quantity, value) {
  if (typeof value === "number" && typeof quantity.scale === "number" && quantity.scale > 0 && quantity.scale < 1e-4) {
    return (quantity.signed && value > 0 ? "+" : "") + value.toExponential(1).replaceAll("-", MINUS);
  }
  const digits = typeof quantity.scale === "number" && quantity.scale > 0 ? Math.min(6, Math.max(2, 2 - Math.floor(Math.log10(quantity.scale)))) : 3;
  const decimals = typeof value === "number" ? digits : null;
  return quantity.signed ? signed(value, decimals) : say(value, decimals);
}

const shortName = (name) => spoken(name.replace(/^rewards\//, "").replace("group_id", "group").replace("truncated", "cut off").replace(/^kl$/, "KL"), 28);

/** Blue for positive, orange for negative, in strength: told apart with every common kind of colour vision. */
function shade(share, most) {
  if (!Number.isFinite(share)) return "transparent";
  const strength = (Math.min(1, Math.abs(share)) * most).toFixed(3);
  return share >= 0 ? `rgba(38, 118, 201, ${strength})` : `rgba(230, 120, 16, ${strength})`;
}

// ---------------------------------------------------------------- anywidget

export default () => ({
  render({ model, el: element }) {
    const waiting = new Map();
    const listeners = new Set();
    const name = Math.random().toString(36).slice(2); // several views of one widget get each other's answers
    let next = 0;
    const receive = (message) => {
      if (message?.kind === "answer" && waiting.has(message.id)) {
        waiting.get(message.id)(message.answer);
        waiting.delete(message.id);
      } else if (message?.kind === "changed") {
        for (const listener of listeners) listener(message);
      }
    };
    model.on("msg:custom", receive);
    const snapshot = model.get("snapshot");
    const unmount = mount(element, {
      live: true,
      controls: Boolean(snapshot?.controls),
      snapshot: typeof snapshot === "object" ? snapshot : null,
      subscribe: (listener) => { listeners.add(listener); return () => listeners.delete(listener); },
      request: (request) => new Promise((resolve) => {
        const id = `${name}-${next++}`;
        waiting.set(id, resolve);
        model.send({ kind: "request", id, request });
      }),
      remember: (state) => model.send({ kind: "remember", state }),
    });
    // plotly measures its place at a resize of the window only; the charts beside this panel were drawn before they had one
    let width = 0;
    const sized = new ResizeObserver(() => {
      if (element.clientWidth === width) return;
      width = element.clientWidth;
      window.dispatchEvent(new Event("resize"));
    });
    sized.observe(element);
    return () => {
      sized.disconnect();
      model.off("msg:custom", receive);
      waiting.clear();
      listeners.clear();
      unmount();
    };
  },
});
