// The table of the selected tensors, sorted and searched.

const PAGE = 200;
let shownRows = PAGE;

const COLUMNS = [
  { id: "key", name: "tensor", of: (t) => t.key, text: true },
  { id: "shape", name: "shape", of: (t) => t.shape.reduce((a, b) => a * b, 1), show: (_, t) => shapeOf(t) },
  { id: "dtype", name: "dtype", of: (t) => t.dtype, text: true },
  { id: "bytes", name: "size", of: (t) => t.bytes, show: bytes },
  { id: "norm", name: "norm", of: (_, v) => v.norm },
  { id: "mean", name: "mean", of: (_, v) => v.mean },
  { id: "deviation", name: "deviation", of: (_, v) => v.deviation },
  { id: "smallest", name: "smallest", of: (_, v) => v.smallest },
  { id: "largest", name: "largest", of: (_, v) => v.largest },
  { id: "zeros", name: "zeros", of: (_, v) => (v.elements ? v.zeros / v.elements : null), show: percent },
  { id: "nans", name: "NaN, ∞", of: (_, v) => v.nans + v.infinities, show: (count) => (count ? count.toLocaleString("en") : "0") },
  { id: "moved", name: "relative distance", of: (t) => movedOf(t), show: percent, several: true },
];

function movedOf(tensor) {
  const now = tensor.values[LOOK.checkpoint], before = LOOK.checkpoint && tensor.values[LOOK.checkpoint - 1];
  return now && before && now.distance !== null && before.norm ? now.distance / before.norm : null;
}

function columns() {
  return COLUMNS.filter((column) => !column.several || CHECKPOINTS.length > 1);
}

function valueOf(column, tensor) {
  const values = tensor.values[LOOK.checkpoint];
  const value = column.of.length > 1 && !values ? null : column.of(tensor, values);
  return value === undefined ? null : value;
}

// Case-insensitive: a query with * is a pattern of the whole key, any other a substring.
function matcher(query) {
  const text = query.trim().toLowerCase();
  if (!text.includes("*")) return (key) => key.toLowerCase().includes(text);
  const pattern = new RegExp(`^${text.split("*").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join(".*")}$`, "s");
  return (key) => pattern.test(key.toLowerCase());
}

function drawTable() {
  const matches = matcher(LOOK.query);
  const rows = LOOK.node.tensors.filter((tensor) => matches(tensor.key));
  const column = COLUMNS.find((one) => one.id === LOOK.sort);
  if (column) {
    const sign = LOOK.descending ? -1 : 1;
    const order = (a, b) => (a === null ? 1 : b === null ? -1 : sign * (a < b ? -1 : a > b ? 1 : 0));
    const values = new Map(rows.map((tensor) => [tensor, valueOf(column, tensor)]));
    rows.sort((a, b) => order(values.get(a), values.get(b)));
  }
  drawHead();
  byId("table").tBodies[0].replaceChildren(...rows.slice(0, shownRows).map(rowOf));
  byId("table").hidden = !rows.length;
  byId("matches").textContent = `${many(rows.length, "tensor")}, ${bytes(sum(rows, (tensor) => tensor.bytes))}`;
  const more = byId("more");
  more.hidden = rows.length <= shownRows;
  more.textContent = `Show ${Math.min(PAGE, rows.length - shownRows)} more of ${(rows.length - shownRows).toLocaleString("en")}`;
  const empty = byId("empty");
  empty.hidden = rows.length > 0;
  empty.textContent = LOOK.query ? `No key here matches “${LOOK.query}”.` : "There are no tensors here.";
}

function drawHead() {
  const cells = columns().map((column) => {
    const sorted = column.id === LOOK.sort ? (LOOK.descending ? "descending" : "ascending") : null;
    const button = element("button", { type: "button", onclick: () => sortBy(column) }, column.name);
    return element("th", { scope: "col", class: column.text ? "text" : null, "aria-sort": sorted }, button);
  });
  const focused = document.activeElement && document.activeElement.closest("thead") && document.activeElement.textContent;
  byId("table").tHead.replaceChildren(element("tr", {}, ...cells, element("th", { scope: "col" }, element("button", { type: "button", disabled: true }, "distribution"))));
  if (focused) [...byId("table").tHead.querySelectorAll("button")].find((button) => button.textContent === focused)?.focus();
}

function sortBy(column) {
  LOOK.descending = LOOK.sort === column.id ? !LOOK.descending : !column.text;
  LOOK.sort = column.id;
  drawTable();
}

function rowOf(tensor) {
  const values = tensor.values[LOOK.checkpoint];
  const cells = columns().map((column) => {
    const value = valueOf(column, tensor);
    if (column.id === "key") return element("td", {}, element("button", { type: "button", onclick: () => showDetail(tensor) }, ...breakable(value)));
    const text = value === null ? "–" : column.show ? column.show(value, tensor) : column.text ? value : number(value);
    const warn = column.id === "nans" && value > 0;
    return element("td", { class: warn ? "warn" : column.text ? "text" : value === null ? "none" : null }, text);
  });
  const picture = values && values.histogram.length ? histogram(values, 88, 22) : element("span", { class: "none" }, "–");
  return element("tr", {}, ...cells, element("td", {}, picture));
}
