// The treemap of sizes: the selected parts, and their parts.

const GAP = 2, HEAD = 18, SMALLEST = 4, DEEPEST = 4;

function drawTreemap() {
  const box = byId("treemap");
  const width = box.clientWidth, height = box.clientHeight;
  const metric = METRICS[LOOK.colour];
  const parts = comparedIn(LOOK.node);
  box.replaceChildren();
  if (!LOOK.node.bytes) {
    box.append(element("p", { class: "empty" }, TENSORS.length ? "These tensors have no elements." : "There are no tensors here."));
    byId("legend").replaceChildren();
    return;
  }
  const cells = squarify(parts, 0, 0, width, height).flatMap((cell) => withParts(cell, cell.node, 1));
  const scale = metric && scaleOf(cells.filter((cell) => !cell.isGroup).map((cell) => metric.of(cell.node)), metric.log);
  const ranks = new Map(parts.map((part, rank) => [part.node, rank]));
  for (const cell of cells) {
    if (cell.width < SMALLEST || cell.height < SMALLEST) continue;
    box.append(cell.isGroup ? groupOf(cell) : tileOf(cell, metric ? ramp(scale.share(metric.of(cell.node))) : partColour(ranks.get(cell.top)), metric));
  }
  drawLegend(metric, scale);
}

// A cell or, if large enough, its parts below its name.
function withParts(cell, top, depth) {
  const inner = partsOf(cell.node);
  if (inner.length < 2 || depth === DEEPEST || cell.width < 84 || cell.height < 64) return [{ ...cell, top }];
  const below = squarify(inner, cell.x, cell.y + HEAD, cell.width - GAP, cell.height - HEAD - GAP);
  return [{ ...cell, top, isGroup: true }, ...below.flatMap((part) => withParts(part, top, depth + 1))];
}

function groupOf(cell) {
  const name = element("button", { type: "button", class: cell.node === cell.top ? "name first" : "name", onclick: () => lookAt(cell.node) }, cell.name);
  const group = place(element("div", { class: "group" }, name), { ...cell, height: HEAD + GAP });
  withTip(name, cell.node.key, () => describe(cell.node));
  return group;
}

function tileOf(cell, colour, metric) {
  const tile = element("button", { type: "button", class: "tile", "aria-label": `${cell.node.key}, ${bytes(cell.node.bytes)}`,
    onclick: () => (cell.node.tensor && !cell.node.children.size ? showDetail(cell.node.tensor) : lookAt(cell.node)) });
  tile.style.background = colour;
  if (cell.width > 44 && cell.height > 20) tile.append(element("span", {}, cell.name));
  if (cell.width > 44 && cell.height > 38) {
    tile.append(element("small", {}, metric ? metric.show(metric.of(cell.node)) : bytes(cell.node.bytes)));
  }
  return withTip(place(tile, cell), cell.node.key, () => describe(cell.node));
}

function describe(node) {
  const lines = [`${bytes(node.bytes)}, ${percent(node.bytes / (ROOT.bytes || 1))} of all`];
  if (node.tensor && !node.children.size) lines.push(`${node.tensor.dtype}, ${shapeOf(node.tensor)}`);
  else lines.push(many(node.tensors.length, "tensor"));
  for (const metric of Object.values(METRICS)) {
    const value = metric.of(node);
    if (value !== null) lines.push(`${metric.name}: ${metric.show(value)}`);
  }
  return lines;
}

function place(made, cell) {
  made.style.left = `${cell.x}px`;
  made.style.top = `${cell.y}px`;
  made.style.width = `${Math.max(0, cell.width - GAP)}px`;
  made.style.height = `${Math.max(0, cell.height - GAP)}px`;
  return made;
}

// Rows of cells that are as square as possible (Bruls, Huizing, van Wijk: Squarified Treemaps, 2000).
function squarify(parts, x, y, width, height) {
  const left = parts.filter((part) => part.node.bytes);
  const scale = (width * height) / (sum(left, (part) => part.node.bytes) || 1);
  const cells = [];
  for (let begin = 0; begin < left.length;) {
    const side = Math.min(width, height);
    let end = begin + 1, area = left[begin].node.bytes * scale;
    const largest = area;
    let worst = worstRatio(largest, area, area, side);
    for (; end < left.length; end += 1) {
      const next = left[end].node.bytes * scale;
      const ratio = worstRatio(largest, next, area + next, side);
      if (ratio > worst) break;
      worst = ratio;
      area += next;
    }
    const depth = side ? area / side : 0;
    let at = 0;
    for (const part of left.slice(begin, end)) {
      const length = depth ? (part.node.bytes * scale) / depth : 0;
      cells.push(width >= height ? { ...part, x, y: y + at, width: depth, height: length }
        : { ...part, x: x + at, y, width: length, height: depth });
      at += length;
    }
    if (width >= height) { x += depth; width -= depth; } else { y += depth; height -= depth; }
    begin = end;
  }
  return cells;
}

function worstRatio(largest, smallest, area, side) {
  return Math.max((side * side * largest) / (area * area), (area * area) / (side * side * smallest));
}

function drawLegend(metric, scale) {
  const legend = byId("legend");
  legend.replaceChildren();
  legend.hidden = !metric;
  if (!metric) return;
  const bar = element("span", { class: "ramp", role: "img", "aria-label": "from low to high" });
  bar.style.background = `linear-gradient(to right, ${ramp(0)}, ${ramp(0.5)}, ${ramp(1)})`;
  legend.append(metric.show(scale.low), bar, metric.show(scale.high), scale.low === null ? " – nothing to compare here" : "");
}
