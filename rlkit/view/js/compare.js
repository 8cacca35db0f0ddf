// Two steps or two runs side by side, and pinned prompts over the steps.

class Compare extends Detail {
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
      a.run === b.run && a.step === b.step ? el("p", { class: "rl-note" }, "A and B are the same step. Choose another step, or run, for one of them.") : "",
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
}
