// What was measured of the run, and the threshold below which it keeps quiet.

import { reliabilityDiagram, riskCurve } from "./charts.js";
import { byId, figure, make, percent, table } from "./dom.js";

const METRICS = {
  acc: ["Accuracy", "higher is better"],
  nll: ["NLL", "in nats; lower is better"],
  ece: ["ECE", "lower is better"],
  brier: ["Brier score", "lower is better"],
};
const SHOWN = 6; // of a run that has none of these

export function describe(evaluation) {
  byId("model").textContent = evaluation.model;
  document.title = `${evaluation.model} · bayeslora`;
  const draws = evaluation.samples ? `${evaluation.samples} draws` : "the posterior mean";
  byId("about").textContent = `${evaluation.base_model}, fine-tuned on ${evaluation.task} with ${evaluation.method}; answers with ${draws}.`;
}

// The threshold ------------------------------------------------------------------------------------------------------

/** The threshold, which starts where calibration chose it. `changed` is called with every new value. */
export function prepareThreshold(evaluation, changed) {
  const calibrated = evaluation.calibration?.threshold ?? null;
  const set = (value) => {
    byId("threshold").value = value;
    byId("threshold-value").textContent = percent(value);
    byId("threshold-reset").hidden = calibrated === null || value === calibrated;
    showPoint(evaluation, value);
    changed(value);
  };
  byId("threshold").addEventListener("input", () => set(Number(byId("threshold").value)));
  byId("threshold-reset").addEventListener("click", () => {
    set(calibrated);
    byId("threshold").focus();
  });
  byId("threshold-source").textContent =
    calibrated === null
      ? "No threshold was calibrated, so it starts with answering always."
      : `Calibration chose ${percent(calibrated)}, for ${evaluation.calibration.target}.`;
  if (evaluation.risk_coverage && !evaluation.as_served) {
    byId("threshold-source").append(" The curve is from before that and not in the same units; see below.");
  }
  set(calibrated ?? 0);
}

function showPoint(evaluation, threshold) {
  const curve = evaluation.risk_coverage;
  const point = curve?.findLast((one) => one.threshold >= threshold); // the last that is at least that sure
  byId("threshold-words").textContent = inWords(evaluation, curve, point);
  if (!curve) return;
  const caption = "The more it leaves unanswered, the fewer errors it should make.";
  byId("curve").replaceChildren(riskCurve(curve, point), make("figcaption", {}, caption));
}

function inWords({ questions }, curve, point) {
  if (!curve) return "This run has left no predictions, so it is not known what a threshold would give.";
  if (!point) return `None of the ${questions} questions measured was answered with that much confidence.`;
  const rest = point.coverage < 1 ? ` Answering all, ${percent(curve.at(-1).error_rate)} would be.` : "";
  return `Of the ${questions} questions measured it answers ${percent(point.coverage)}, and ${percent(point.error_rate)} of those answers are wrong.${rest}`;
}

// The figures --------------------------------------------------------------------------------------------------------

export function showEvaluation(evaluation) {
  const { metrics, questions, split, task, model } = evaluation;
  const what = questions === null ? "" : `${questions} questions of `;
  byId("measured").textContent = metrics
    ? `Measured on ${what}the ${split} split of ${task}; ranges are 95 % intervals.`
    : "This run has left no figures behind.";
  byId("units").hidden = evaluation.as_served || !metrics;
  byId("units").replaceChildren(
    "Figures and curves are from before calibration, which has changed the draws since: they are not in the same units as the answers above. For those of the model as it is now: ",
    make("code", {}, `bayeslora evaluate ${model} --out DIR`),
    ", then ",
    make("code", {}, `bayeslora serve ${model} --evaluation DIR`),
  );
  byId("metrics").replaceChildren(...tiles(metrics ?? {}, evaluation.intervals ?? {}));
  if (evaluation.reliability) showReliability(evaluation.reliability);
}

function tiles(metrics, intervals) {
  const there = Object.keys(metrics).filter((name) => metrics[name] !== null);
  const known = there.filter((name) => name in METRICS);
  return (known.length ? known : there.slice(0, SHOWN)).map((name) => {
    const [title, meaning] = METRICS[name] ?? [name, ""];
    const show = name === "acc" ? percent : figure;
    const span = intervals[name];
    return make(
      "div",
      {},
      make("dt", {}, title),
      make("dd", { id: `metric-${name}` }, show(metrics[name])),
      make("dd", { class: "small soft" }, span ? `${show(span.low)} to ${show(span.high)}` : ""),
      make("dd", { class: "small soft" }, meaning),
    );
  });
}

function showReliability(bins) {
  const rows = bins.count.map((number, k) => [
    `${percent(bins.edges[k], 0)} to ${percent(bins.edges[k + 1], 0)}`,
    String(number),
    ...(number ? [percent(bins.confidence[k]), percent(bins.accuracy[k])] : ["–", "–"]),
  ]);
  const words = "Reliability: bars that end at the dotted line are right as often as they are sure. Stronger ones hold more questions.";
  byId("reliability").replaceChildren(
    reliabilityDiagram(bins),
    make("figcaption", {}, words),
    table("Reliability as a table", ["Confidence", "Questions", "Mean confidence", "Right"], rows),
  );
}
