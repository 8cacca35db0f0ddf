// What all parts of the panel use: elements, texts with their control characters drawn, numbers, shades.

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

// ---------------------------------------------------------------- names, places, shades

function nearest(steps, wanted) {
  let best = -1;
  steps.forEach((step, index) => { if (best < 0 || Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = index; });
  return best;
}

/** How strong a value of a quantity is, from -1 to 1 of its scale; a factor by its logarithm. */
function strength(quantity, value) {
  if (typeof value !== "number" || !(quantity.scale > 0)) return NaN;
  return (quantity.kind === "factor" ? Math.log(value) : value) / quantity.scale;
}

/** The value at one end of a quantity's scale. */
function endOf(quantity, sign) {
  if (typeof quantity.scale !== "number") return quantity.scale;
  return quantity.kind === "factor" ? Math.exp(sign * quantity.scale) : sign * quantity.scale;
}

/** A value of a quantity, with decimals that suit its scale. */
function figure(quantity, value) {
  if (quantity.kind === "factor") {
    const places = quantity.scale > 0 ? Math.min(6, Math.max(2, 2 - Math.floor(Math.log10(quantity.scale)))) : 2;
    return typeof value !== "number" ? say(value) : value >= 1e4 || (value > 0 && value < 0.01) ? `×${value.toExponential(1)}`.replaceAll("-", MINUS) : `×${value.toFixed(places)}`;
  }
  if (typeof value === "number" && typeof quantity.scale === "number" && quantity.scale > 0 && quantity.scale < 1e-4) {
    return (quantity.kind === "signed" && value > 0 ? "+" : "") + value.toExponential(1).replaceAll("-", MINUS);
  }
  const digits = typeof quantity.scale === "number" && quantity.scale > 0 ? Math.min(6, Math.max(2, 2 - Math.floor(Math.log10(quantity.scale)))) : 3;
  const decimals = typeof value === "number" ? digits : null;
  return quantity.kind === "signed" ? signed(value, decimals) : say(value, decimals);
}

const shortName = (name) => spoken(name.replace(/^rewards\//, "").replace("group_id", "group").replace("truncated", "cut off").replace(/^kl$/, "KL"), 28);

/** Blue for positive, orange for negative, in strength: told apart with every common kind of colour vision. */
function shade(share, most) {
  if (!Number.isFinite(share)) return "transparent";
  const strength = (Math.min(1, Math.abs(share)) * most).toFixed(3);
  return share >= 0 ? `rgba(38, 118, 201, ${strength})` : `rgba(230, 120, 16, ${strength})`;
}
