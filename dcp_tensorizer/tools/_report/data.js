"use strict";
// The report's data, the tree of its keys, and sums over parts of that tree.

const FIELDS = ["elements", "zeros", "nans", "infinities", "smallest", "largest", "mean", "deviation", "norm",
  "distance", "low", "high", "histogram"];
const REPORT = JSON.parse(document.getElementById("data").textContent);
const CHECKPOINTS = REPORT.checkpoints;
const TENSORS = REPORT.tensors.map(([key, shape, dtype, bytes, values]) => ({
  key, shape, dtype, bytes,
  values: values.map((row) => row && Object.fromEntries(FIELDS.map((name, number) => [name, row[number]]))),
}));

// The selection: a node of the tree, a search, a checkpoint.
const LOOK = { node: null, query: "", checkpoint: CHECKPOINTS.length - 1, colour: "part", sort: null, descending: true };

function makeTree(tensors) {
  const root = { name: "all", key: "", children: new Map(), tensors, bytes: 0, parent: null, tensor: null };
  for (const tensor of tensors) {
    let node = root;
    root.bytes += tensor.bytes;
    for (const part of tensor.key.split(".")) {
      if (!node.children.has(part)) {
        const key = node.parent ? `${node.key}.${part}` : part;
        node.children.set(part, { name: part, key, children: new Map(), tensors: [], bytes: 0, parent: node, tensor: null });
      }
      node = node.children.get(part);
      node.tensors.push(tensor);
      node.bytes += tensor.bytes;
    }
    node.tensor = tensor;
  }
  return root;
}

// The parts of a node to compare. A node with a single part is replaced by that part.
function comparedIn(node) {
  const parts = partsOf(node);
  if (!parts.length) return [{ name: node.name, node }];
  return parts.length === 1 && parts[0].node.children.size ? comparedIn(parts[0].node) : parts;
}

// The parts of a node, largest first. A chain of nodes with one child each is a single part.
function partsOf(node) {
  return [...node.children.values()].map((child) => {
    let name = child.name, end = child;
    while (end.children.size === 1 && !end.tensor) {
      end = end.children.values().next().value;
      name += `.${end.name}`;
    }
    return { name, node: end };
  }).sort((a, b) => b.node.bytes - a.node.bytes || a.name.localeCompare(b.name, "en", { numeric: true }));
}

function ancestorsOf(node) {
  return node.parent ? [...ancestorsOf(node.parent), node] : [node];
}

function isFloating(tensor) {
  return /^(b?float|complex)/.test(tensor.dtype);
}

// The norm of all floating-point tensors of a node in each checkpoint, and their distance to the previous checkpoint,
// relative to the norm there.
function normsOf(node) {
  const norms = CHECKPOINTS.map((_, at) => rootOfSquares(node.tensors, at, "norm"));
  const moved = CHECKPOINTS.map((_, at) => {
    const distance = at ? rootOfSquares(node.tensors, at, "distance") : null;
    return distance === null || !norms[at - 1] ? null : distance / norms[at - 1];
  });
  return { norms, moved };
}

function rootOfSquares(tensors, at, field) {
  let sum = 0, known = false;
  for (const tensor of tensors) {
    const values = tensor.values[at];
    if (values && values[field] !== null && isFloating(tensor)) {
      sum += values[field] ** 2;
      known = true;
    }
  }
  return known ? Math.sqrt(sum) : null;
}

// One number for a node at the selected checkpoint, or null.
const METRICS = {
  rms: { name: "root mean square", show: number, log: true, of: (node) => {
    const tensors = node.tensors.filter((tensor) => isFloating(tensor) && tensor.values[LOOK.checkpoint]);
    const elements = sum(tensors, (tensor) => tensor.values[LOOK.checkpoint].elements);
    const norm = rootOfSquares(node.tensors, LOOK.checkpoint, "norm");
    return elements && norm !== null ? norm / Math.sqrt(elements) : null;
  } },
  zeros: { name: "share of zeros", show: percent, log: false, of: (node) => {
    const known = node.tensors.map((tensor) => tensor.values[LOOK.checkpoint]).filter(Boolean);
    const elements = sum(known, (values) => values.elements);
    return elements ? sum(known, (values) => values.zeros) / elements : null;
  } },
  moved: { name: "relative distance", show: percent, log: true,
    of: (node) => normsOf(node).moved[LOOK.checkpoint] },
};

function sum(items, of) {
  return items.reduce((total, item) => total + of(item), 0);
}

// --- formatting of numbers ---

function number(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("-", "−").replace("e+", "e").replace("-", "−");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

function percent(value) {
  if (value === null || value === undefined) return "–";
  const share = value * 100;
  return share === 0 ? "0%" : share < 0.01 ? "<0.01%" : `${Number(share.toPrecision(share < 1 ? 2 : 3))}%`;
}

function bytes(count) {
  if (count < 1000) return `${count} B`;
  const power = Math.min(5, Math.floor(Math.log10(count) / 3));
  return `${Number((count / 1000 ** power).toPrecision(3))} ${["kB", "MB", "GB", "TB", "PB"][power - 1]}`;
}

function many(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

function shapeOf(tensor) {
  return tensor.shape.length ? tensor.shape.join(" × ") : "scalar";
}

function nameOf(checkpoint) {
  return checkpoint.step === null ? checkpoint.name : `step ${checkpoint.step.toLocaleString("en")}`;
}
