// Charts of the selected parts over the checkpoints.

const MOST_LINES = 24, LABELLED = 8;

function drawCharts() {
  if (CHECKPOINTS.length < 2) return;
  byId("steps").hidden = false;
  const parts = comparedIn(LOOK.node);
  const lines = parts.slice(0, MOST_LINES).map((part, rank) => ({ ...part, rank, ...normsOf(part.node) }))
    .filter((line) => line.norms.some((value) => value !== null));
  byId("steps-note").textContent = parts.length > MOST_LINES ? `the ${MOST_LINES} largest of ${parts.length} parts` : "";
  drawLines(byId("norms"), lines, "norms", number, false);
  drawLines(byId("distances"), lines, "moved", percent, true);
}

function drawLines(box, lines, field, show, log) {
  const width = Math.max(260, box.clientWidth), height = 230;
  const room = { left: 52, right: Math.min(130, width * 0.3), top: 8, bottom: 24 };
  const scale = scaleOf(lines.flatMap((line) => line[field]), log);
  box.replaceChildren();
  if (scale.low === null) {
    box.append(element("p", { class: "empty" }, field === "norms" ? "No floating-point tensor here has a finite norm." : "No part here has a relative distance above 0."));
    return;
  }
  const x = xScale(room.left, width - room.right);
  const y = (value) => height - room.bottom - scale.share(value) * (height - room.top - room.bottom);
  const picture = drawn("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${field === "norms" ? "norm" : METRICS.moved.name} of ${many(lines.length, "part")}` });
  for (const value of ticks(scale, log)) {
    picture.append(drawn("line", { class: "grid", x1: room.left, x2: width - room.right, y1: y(value), y2: y(value) }),
      drawn("text", { x: room.left - 6, y: y(value) + 4, "text-anchor": "end" }, show(value)));
  }
  drawSteps(picture, x, height);
  const ends = [];
  for (const line of [...lines].reverse()) picture.append(drawLine(line, field, x, y, show, picture, ends));
  drawEnds(picture, ends, width - room.right + 8, height - room.bottom, Math.floor((room.right - 12) / 6.7));
  box.append(picture);
}

function drawLine(line, field, x, y, show, picture, ends) {
  const points = line[field].map((value, at) => (value === null ? null : [x(at), y(value)]));
  const path = points.map((point, at) => (point ? `${at && points[at - 1] ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}` : "")).join("");
  const colour = lineColour(line.rank);
  const group = drawn("g", { "data-part": line.node.key });
  const stroke = drawn("path", { class: "line", d: path });
  stroke.style.stroke = colour;
  group.append(stroke);
  points.forEach((point, at) => {
    if (!point) return;
    const dot = drawn("circle", { cx: point[0], cy: point[1], r: 2.6 });
    dot.style.fill = colour;
    const target = drawn("circle", { cx: point[0], cy: point[1], r: 9, opacity: 0 });
    withTip(target, line.node.key, () => [`${nameOf(CHECKPOINTS[at])}: ${show(line[field][at])}`]);
    target.addEventListener("pointerenter", () => highlight(picture, line.node.key));
    target.addEventListener("pointerleave", () => highlight(picture, null));
    target.addEventListener("click", () => lookAt(line.node));
    group.append(dot, target);
  });
  const last = points.filter(Boolean).pop();
  if (last && line.rank < LABELLED) ends.push({ line, y: last[1], colour });
  return group;
}

// Names at the ends of the lines, moved apart if they would overlap.
function drawEnds(picture, ends, x, bottom, letters) {
  ends.sort((a, b) => a.y - b.y);
  ends.forEach((end, at) => { end.y = Math.max(end.y, at ? ends[at - 1].y + 13 : 8); });
  for (let at = ends.length - 1, limit = bottom; at >= 0; at -= 1, limit = ends[at + 1].y - 13) ends[at].y = Math.min(ends[at].y, limit);
  for (const end of ends) {
    const name = end.line.name.length > letters ? `…${end.line.name.slice(1 - letters)}` : end.line.name;
    const text = drawn("text", { class: "label", x, y: end.y + 4 }, name);
    text.style.fill = end.colour;
    text.addEventListener("pointerenter", () => highlight(picture, end.line.node.key));
    text.addEventListener("pointerleave", () => highlight(picture, null));
    picture.append(text);
  }
}

function highlight(picture, key) {
  for (const group of picture.querySelectorAll("g")) group.classList.toggle("faint", key !== null && group.dataset.part !== key);
}

// Positions by step if all steps are known and rise, otherwise equidistant.
function xScale(left, right) {
  const steps = CHECKPOINTS.map((checkpoint) => checkpoint.step);
  const rise = steps.every((step, at) => step !== null && (!at || step > steps[at - 1]));
  const at = rise ? steps : steps.map((_, number) => number);
  return (number) => left + ((at[number] - at[0]) / (at[at.length - 1] - at[0])) * (right - left);
}

function drawSteps(picture, x, height) {
  let free = -Infinity;
  CHECKPOINTS.forEach((checkpoint, at) => {
    const text = checkpoint.step === null ? checkpoint.name.slice(-12) : String(checkpoint.step);
    const room = text.length * 6.5 + 10;
    if (x(at) - room / 2 < free) return;
    free = x(at) + room / 2;
    picture.append(drawn("text", { x: x(at), y: height - 6, "text-anchor": "middle" }, text));
  });
}

// Round values. On a logarithmic scale: powers of ten; if there are fewer than three, also 2 and 5 times each power.
function ticks(scale, log) {
  const { low, high } = scale;
  if (low === high) return [low];
  if (log) {
    const decades = Array.from({ length: 40 }, (_, n) => 10 ** (Math.floor(Math.log10(low)) + n));
    const inside = (value) => value >= low && value <= high;
    const powers = decades.filter(inside), every = Math.ceil(powers.length / 6);
    if (powers.length > 2) return powers.filter((_, n) => n % every === 0);
    const round = decades.flatMap((power) => [power, 2 * power, 5 * power]).filter(inside);
    if (round.length > 1) return round;
  }
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  return Array.from({ length: 8 }, (_, n) => Math.ceil(low / step) * step + n * step).filter((value) => value <= high);
}
