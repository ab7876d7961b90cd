// Elements, tooltips, and colours.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function byId(id) {
  return document.getElementById(id);
}

// A key with line breaks allowed after its dots.
function breakable(key) {
  return key.split(/(?<=\.)/).flatMap((part, at) => (at ? [element("wbr"), part] : [part]));
}

function fact(name, value, more = "") {
  return element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, more)));
}

// A tooltip that follows the pointer, or is next to the focused element.
function withTip(target, title, lines) {
  const show = (x, y) => {
    const tip = byId("tip");
    tip.replaceChildren(element("b", {}, title), ...lines().map((line) => element("div", {}, line)));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
  };
  const hide = () => { byId("tip").hidden = true; };
  target.addEventListener("pointermove", (event) => show(event.clientX, event.clientY));
  target.addEventListener("pointerleave", hide);
  target.addEventListener("focus", () => {
    const box = target.getBoundingClientRect();
    if (target.matches(":focus-visible")) show(box.left, box.top);
  });
  target.addEventListener("blur", hide);
  target.addEventListener("click", hide);
  return target;
}

const HUES = [190, 75, 275, 140, 25, 325, 235, 105];

function partColour(rank) {
  return rank < HUES.length ? `oklch(var(--tile-l) var(--tile-c) ${HUES[rank]})` : "oklch(var(--tile-l) 0 0)";
}

function lineColour(rank) {
  const lightness = isDark() ? "74%" : "52%";
  return rank < HUES.length ? `oklch(${lightness} .105 ${HUES[rank]})` : `oklch(${lightness} 0 0)`;
}

// A colour from paper to accent, for a share of 0 to 1.
function ramp(share) {
  return share === null ? "var(--line)" : `color-mix(in oklch, var(--accent) ${Math.round(8 + 72 * share)}%, var(--raised))`;
}

function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

// A scale from values to shares of 0 to 1. A logarithmic scale maps values of 0 or less to 0.
function scaleOf(values, log) {
  const known = values.filter((value) => value !== null && (!log || value > 0));
  if (!known.length) return { low: null, high: null, share: (value) => (value === null ? null : 0) };
  const low = log ? Math.min(...known) : Math.min(0, ...known);
  const high = Math.max(...known);
  const at = (value) => (log ? Math.log(Math.max(value, low)) : value);
  const room = at(high) - at(low);
  return { low, high, share: (value) => (value === null ? null : room ? (at(value) - at(low)) / room : 0.5) };
}

function histogram(values, width, height) {
  const picture = drawn("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const most = Math.max(...values.histogram);
  if (!most) return picture;
  const step = width / values.histogram.length;
  const path = values.histogram.map((count, at) => {
    const top = count ? Math.max(1, (count / most) * height) : 0;
    return `M${(at * step).toFixed(2)} ${height}v${(-top).toFixed(2)}h${(step * 0.86).toFixed(2)}v${top.toFixed(2)}z`;
  }).join("");
  picture.append(drawn("path", { class: "bars", d: path }));
  return picture;
}
