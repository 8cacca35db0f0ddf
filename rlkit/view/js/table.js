// The table of completions: search, conditions, sorting, columns, pages.

// ---------------------------------------------------------------- sort and filter, as rlkit/view/table_query.py does

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

// ---------------------------------------------------------------- the table

class Table {
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
}
