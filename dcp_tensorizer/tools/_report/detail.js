// The details of one tensor.

function showDetail(tensor) {
  const dialog = byId("detail");
  const values = tensor.values[LOOK.checkpoint];
  const close = element("button", { type: "button", class: "plain", "aria-label": "Close", onclick: () => dialog.close() }, "✕");
  const facts = [fact("shape", shapeOf(tensor)), fact("dtype", tensor.dtype), fact("size", bytes(tensor.bytes))];
  if (values) {
    facts.push(fact("norm", number(values.norm)), fact("mean", number(values.mean)), fact("deviation", number(values.deviation)),
      fact("smallest", number(values.smallest)), fact("largest", number(values.largest)),
      fact("zeros", percent(values.elements ? values.zeros / values.elements : null)),
      fact("NaN", values.nans.toLocaleString("en")), fact("infinite", values.infinities.toLocaleString("en")));
  }
  dialog.replaceChildren(
    element("div", { class: "heading" }, element("h2", { id: "detail-title" }, ...breakable(tensor.key)), close),
    element("dl", { class: "facts" }, ...facts),
    ...(values && values.histogram.length ? largeHistogram(values) : [element("p", { class: "empty" }, noValues(tensor, values))]),
    ...(CHECKPOINTS.length > 1 ? [element("h3", {}, "At each checkpoint"), element("div", { class: "scroll" }, stepsTable(tensor))] : []),
  );
  dialog.showModal();
  dialog.scrollTop = 0;
}

function noValues(tensor, values) {
  if (!values) return tensor.values.some(Boolean) ? "This checkpoint does not have the tensor." : `No statistics: torch has no arithmetic for ${tensor.dtype}.`;
  return values.elements ? "The tensor has no finite elements." : "The tensor has no elements.";
}

function largeHistogram(values) {
  const picture = histogram(values, 640, 130);
  picture.setAttribute("height", "130");
  const low = element("span", {}, number(values.low)), high = element("span", {}, number(values.high));
  return [element("h3", {}, "Distribution"), picture, element("div", { class: "heading quiet" }, low, high)];
}

function stepsTable(tensor) {
  const head = ["checkpoint", "norm", "mean", "deviation", "smallest", "largest", "NaN, ∞", "relative distance", "distribution"];
  const rows = tensor.values.map((values, at) => {
    const before = at ? tensor.values[at - 1] : null;
    const moved = values && before && values.distance !== null && before.norm ? values.distance / before.norm : null;
    const cells = values
      ? [number(values.norm), number(values.mean), number(values.deviation), number(values.smallest), number(values.largest),
        String(values.nans + values.infinities), percent(moved)]
      : Array(7).fill("–");
    const picture = values && values.histogram.length ? histogram(values, 88, 22) : "–";
    return element("tr", {}, ...[nameOf(CHECKPOINTS[at]), ...cells, picture].map((cell) => element("td", {}, cell)));
  });
  const headings = head.map((name) => element("th", { scope: "col" }, element("button", { type: "button", disabled: true }, name)));
  return element("table", {}, element("thead", {}, element("tr", {}, ...headings)), element("tbody", {}, ...rows));
}
