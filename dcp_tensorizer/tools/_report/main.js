// The head of the page, and the event handlers.

const ROOT = makeTree(TENSORS);

function lookAt(node) {
  LOOK.node = node;
  shownRows = PAGE;
  history.replaceState(null, "", node.key ? `#${encodeURIComponent(node.key)}` : location.pathname + location.search);
  const chosenThere = document.activeElement.closest("#treemap, #crumbs");
  drawAll();
  if (chosenThere) byId("crumbs").lastElementChild.firstElementChild.focus({ preventScroll: true });
}

function drawAll() {
  drawCrumbs();
  drawTreemap();
  drawCharts();
  drawTable();
}

function drawCrumbs() {
  const nodes = ancestorsOf(LOOK.node);
  byId("crumbs").replaceChildren(...nodes.map((node, at) => {
    const button = element("button", { type: "button", "aria-current": at === nodes.length - 1 ? "location" : null,
      onclick: () => lookAt(node) }, at ? node.name : "all");
    return element("li", {}, button);
  }));
}

function drawTop() {
  const last = CHECKPOINTS[CHECKPOINTS.length - 1];
  const title = CHECKPOINTS.length > 1 ? `${nameOf(CHECKPOINTS[0])} to ${nameOf(last)}` : last ? last.name : "Checkpoint report";
  byId("title").textContent = title;
  document.title = `${title} – checkpoint report`;
  byId("subtitle").textContent = CHECKPOINTS.map((checkpoint) => checkpoint.name).join(", ");
  const dtypes = new Map();
  for (const tensor of TENSORS) dtypes.set(tensor.dtype, (dtypes.get(tensor.dtype) || 0) + tensor.bytes);
  const [main, ...others] = [...dtypes].sort((a, b) => b[1] - a[1]);
  const elements = sum(TENSORS, (tensor) => tensor.shape.reduce((a, b) => a * b, 1));
  const saved = last && last.saved ? new Date(last.saved) : null;
  const facts = [
    fact("size", bytes(ROOT.bytes), CHECKPOINTS.length > 1 ? "of all tensors, each counted once" : "of all tensors"),
    fact("tensors", TENSORS.length.toLocaleString("en"), last ? many(last.objects, "other value") : ""),
    fact("elements", count(elements), "in all tensors"),
    fact("dtype", main ? main[0] : "–", others.length ? `and ${others.map((other) => other[0]).join(", ")}` : ""),
  ];
  if (saved) facts.push(fact("saved", saved.toLocaleDateString("en", { dateStyle: "medium" }), saved.toLocaleTimeString("en", { timeStyle: "medium" })));
  byId("facts").replaceChildren(...facts);
}

function count(value) {
  const power = value < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${Number((value / 1000 ** power).toPrecision(3))}${["", " k", " M", " G", " T"][power]}`;
}

function drawNotices() {
  const bad = TENSORS.filter((tensor) => tensor.values.some((values) => values && values.nans + values.infinities));
  if (!bad.length) return;
  const names = bad.slice(0, 3).map((tensor) => tensor.key).join(", ") + (bad.length > 3 ? ", …" : "");
  const text = `${many(bad.length, "tensor")} ${bad.length === 1 ? "has" : "have"} elements that are NaN or infinite: ${names}`;
  byId("notices").append(element("button", { type: "button", class: "notice", onclick: () => {
    LOOK.sort = "nans";
    LOOK.descending = true;
    const at = CHECKPOINTS.findLastIndex((_, place) => bad.some((tensor) => tensor.values[place]?.nans + tensor.values[place]?.infinities > 0));
    LOOK.checkpoint = at;
    byId("checkpoint").value = at;
    lookAt(ROOT);
    byId("tensors-title").scrollIntoView({ behavior: "smooth", block: "center" });
  } }, text));
}

function drawChoices() {
  const colours = [["part", "by part"], ["rms", METRICS.rms.name], ["zeros", METRICS.zeros.name]];
  if (CHECKPOINTS.length > 1) colours.push(["moved", METRICS.moved.name]);
  byId("colour").replaceChildren(...colours.map(([value, name]) => element("option", { value }, name)));
  byId("colour").addEventListener("change", (event) => { LOOK.colour = event.target.value; drawTreemap(); });
  byId("which").hidden = CHECKPOINTS.length < 2;
  byId("checkpoint").replaceChildren(...CHECKPOINTS.map((checkpoint, at) => element("option", { value: at }, nameOf(checkpoint))));
  byId("checkpoint").value = LOOK.checkpoint;
  byId("checkpoint").addEventListener("change", (event) => { LOOK.checkpoint = Number(event.target.value); drawTreemap(); drawTable(); });
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

function listen() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const swap = () => { setTheme(isDark() ? "light" : "dark"); drawAll(); };
  setTheme(system.matches ? "dark" : "light");
  system.addEventListener("change", () => { setTheme(system.matches ? "dark" : "light"); drawAll(); });
  byId("theme").addEventListener("click", swap);
  byId("search").addEventListener("input", (event) => { LOOK.query = event.target.value; shownRows = PAGE; drawTable(); });
  byId("more").addEventListener("click", () => { shownRows += PAGE; drawTable(); });
  byId("detail").addEventListener("click", (event) => { if (event.target === byId("detail")) byId("detail").close(); });
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) {
      if (event.key === "Escape" && event.target === byId("search")) event.target.blur();
      return;
    }
    if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
    if (event.key === "t") swap();
    if ((event.key === "Escape" || event.key === "Backspace") && LOOK.node.parent) lookAt(LOOK.node.parent);
  });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawTreemap(); drawCharts(); } });
}

function start() {
  LOOK.node = ROOT;
  let wanted = "";
  try { wanted = decodeURIComponent(location.hash.slice(1)); } catch { /* not a key */ }
  for (const part of wanted ? wanted.split(".") : []) LOOK.node = LOOK.node.children.get(part) || LOOK.node;
  listen();
  drawTop();
  drawNotices();
  drawChoices();
  drawAll();
}

start();
