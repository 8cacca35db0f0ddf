// One completion: its tokens shaded by a quantity, its group with the arithmetic written out, its text.

class Detail extends Table {
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
    const style = !masked && quantity ? { "background-color": shade(strength(quantity, value), STRONGEST) } : {};
    const node = el("span", {
      class: classes.join(" "), role: "option", tabindex: index === 0 ? 0 : -1, "data-token": index, "data-key": `token-${at}`, "aria-selected": false, style,
      "aria-label": `token ${at + 1}: ${spoken(said, 40) || "empty"}${state ? `, ${state}` : ""}${quantity ? `, ${quantity.name} ${figure(quantity, value)}` : ""}`,
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
    const oneSided = quantity.kind === "size", factor = quantity.kind === "factor";
    const stops = [];
    for (let i = 0; i <= 10; i++) stops.push(shade(oneSided ? i / 10 : i / 5 - 1, STRONGEST));
    const bar = el("span", { class: "rl-bar", "aria-hidden": true, style: { "background-image": `linear-gradient(to right, ${stops.join(", ")})` } });
    const row = lens.about;
    const clip = quantity.name === "ratio" && typeof row.ratio === "number"
      ? el("span", { class: "rl-fact" }, "ratio of the row ", el("b", {}, say(row.ratio)), row.clipped > 0 ? " ▲ clipped above: no gradient" : row.clipped < 0 ? " ▼ clipped below: no gradient" : " not clipped", typeof row.epsilon === "number" ? ` (1 ${MINUS} ${say(row.epsilon)} to 1 + ${say(typeof row.epsilon_high === "number" ? row.epsilon_high : row.epsilon)})` : "")
      : "";
    return el("div", { class: "rl-line rl-legend" },
      el("span", { class: "rl-scale" }, oneSided ? "0" : figure(quantity, endOf(quantity, -1)), bar, figure(quantity, endOf(quantity, 1))),
      el("span", { class: "rl-dim" }, `${quantity.label}, ${quantity.unit}`), el("span", { class: "rl-fact" }, factor ? "product " : "sum ", el("b", {}, figure(quantity, quantity.total))), clip);
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
}
