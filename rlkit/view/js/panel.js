// The panel as a whole: what is shown, questions and answers, head with steps and controls, keyboard and focus.
//
// Plain ESM, no build, no dependency. The default export is anywidget's factory; `mount(element, source)` shows the same
// panel on any page, where source = {
//   request(object) -> Promise(object)   answers of rlkit.view.panel_data.answer, or {error: text}
//   subscribe(callback) -> unsubscribe   pushes {overview, table} while a run goes
//   live: boolean                        false: nothing will change and nobody takes commands
//   controls: boolean                    show pause, stop, save, numbers, export
//   snapshot: object                     optional: {overview, table, remembered}
//   remember(state)                      optional: keeps the reader's place for a page that is loaded later }
// `bundled(bundle)` makes a source of the answers of rlkit.view.panel_data.bundle, for a page without a kernel.
//
// Rules: whatever comes from a run becomes a text node or an attribute by setAttribute, never markup. Control and
// direction characters are drawn as signs, every text stands in <bdi>. No request leaves the page.

export function mount(element, source) {
  const panel = new PanelView(element, source);
  return () => panel.destroy();
}

class PanelView extends Compare {
  constructor(element, source) {
    super();
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
      : el("strong", { class: "rl-name" }, runs.length ? visible(String(run.name ?? "")) : "The run has not begun.");
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
