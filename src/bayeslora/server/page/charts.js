// Pictures of the evaluation, in SVG.

import { draw, percent } from "./dom.js";

const [WIDTH, HEIGHT] = [420, 260];
const [LEFT, RIGHT, TOP, BOTTOM] = [64, 30, 12, 46]; // around the axes

const line = (points) => points.map(([x, y], k) => `${k ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/** Axes from 0 to 1 and from 0 to `highest`, and where their values are. */
function plot(label, across, up, highest) {
  const x = (share) => LEFT + share * (WIDTH - LEFT - RIGHT);
  const y = (share) => HEIGHT - BOTTOM - (share / highest) * (HEIGHT - TOP - BOTTOM);
  const picture = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    picture.append(draw("text", { x: x(share), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, percent(share, 0)));
  }
  for (let k = 0; k <= 4; k++) {
    const value = (k * highest) / 4;
    picture.append(
      draw("path", { class: "grid", d: line([[x(0), y(value)], [x(1), y(value)]]) }),
      draw("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, percent(value, 0)),
    );
  }
  const middle = (TOP + HEIGHT - BOTTOM) / 2;
  picture.append(
    draw("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, across),
    draw("text", { x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, up),
  );
  return { picture, x, y };
}

/** Error rate by coverage, with the point of a threshold if any question is that sure. */
export function riskCurve(curve, point) {
  const highest = Math.max(0.2, Math.ceil(5 * Math.max(...curve.map((p) => p.error_rate))) / 5);
  const where = point ? `; marked: ${percent(point.error_rate)} wrong at ${percent(point.coverage)} answered` : "";
  const { picture, x, y } = plot(`Error rate by share answered${where}`, "questions answered", "answers wrong", highest);
  picture.append(draw("path", { class: "curve", d: line(curve.map((p) => [x(p.coverage), y(p.error_rate)])) }));
  if (!point) return picture;
  const [px, py] = [x(point.coverage), y(point.error_rate)];
  picture.append(
    draw("path", { class: "guide", d: line([[px, y(0)], [px, py], [x(0), py]]) }),
    draw("circle", { class: "point", cx: px, cy: py, r: 6 }),
  );
  return picture;
}

/** How often answers were right by how sure they were; stronger bars stand for more questions. */
export function reliabilityDiagram(bins) {
  const { picture, x, y } = plot("Share of right answers by confidence, bin by bin", "confidence", "answers right", 1);
  picture.append(draw("path", { class: "guide", d: line([[x(0), y(0)], [x(1), y(1)]]) }));
  const most = Math.max(...bins.count);
  bins.count.forEach((number, k) => {
    if (!number) return;
    const [from, to] = [x(bins.edges[k]) + 1, x(bins.edges[k + 1]) - 1];
    const top = y(bins.accuracy[k]);
    const words = `${number} questions, ${percent(bins.confidence[k])} sure, ${percent(bins.accuracy[k])} right`;
    const bar = draw("rect", { class: "bin", x: from, y: top, width: to - from, height: y(0) - top });
    bar.setAttribute("fill-opacity", (0.25 + (0.75 * number) / most).toFixed(2));
    bar.append(draw("title", {}, words));
    picture.append(bar, draw("path", { class: "edge", d: line([[from, top], [to, top]]) }));
  });
  return picture;
}
