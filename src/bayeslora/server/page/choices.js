// A question with choices: the form, and what the model thinks.

import { byId, figure, key, make, nats, percent, quoted } from "./dom.js";
import { explained, familiar } from "./doubt.js";

const FEWEST = 2;
const MOST = 26;
const EXAMPLES = {
  urns: { question: "Beads in the jar: red blue blue green red blue. Picked at random:", choices: ["red", "blue", "green"] },
  other: { question: "Which of these can fly?", choices: ["a bat", "a trout", "a stone"] },
};

// The form -----------------------------------------------------------------------------------------------------------

const inputs = () => [...byId("rows").querySelectorAll("input")];

function addRow(after = null, value = "") {
  if (inputs().length >= MOST) return;
  const input = make("input", { type: "text", autocomplete: "off" });
  input.value = value;
  const remove = make("button", { type: "button", class: "remove" }, "×");
  const row = make("li", {}, input, remove);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.ctrlKey || event.metaKey || event.isComposing) return;
    event.preventDefault();
    addRow(row)?.focus();
  });
  remove.addEventListener("click", () => {
    const neighbour = (row.nextElementSibling ?? row.previousElementSibling).querySelector("input");
    row.remove();
    number();
    neighbour.focus();
  });
  after ? after.after(row) : byId("rows").append(row);
  number();
  return input;
}

/** Names for those who do not see the rows; the last two stay. */
function number() {
  inputs().forEach((input, k, all) => {
    input.setAttribute("aria-label", `Choice ${k + 1}`);
    input.nextElementSibling.setAttribute("aria-label", `Remove choice ${k + 1}`);
    input.nextElementSibling.disabled = all.length <= FEWEST;
  });
  byId("add").disabled = inputs().length >= MOST;
}

function fillIn(example) {
  byId("question").value = example.question;
  byId("rows").replaceChildren();
  example.choices.forEach((choice) => addRow(null, choice));
  byId("question").focus();
}

export function prepareForm() {
  for (let k = 0; k < FEWEST; k++) addRow();
  byId("add").addEventListener("click", () => addRow()?.focus());
}

/** What depends on the run. */
export function fitForm(evaluation) {
  byId("bare").checked = evaluation.task === "urns";
  const levels = Object.keys(evaluation.calibration?.conformal ?? {});
  const options = levels.map((level) => make("option", { value: level, selected: level === "0.9" }, percent(Number(level), 0)));
  byId("level").replaceChildren(...options);
  byId("level-field").hidden = !levels.length;
  byId("example").onclick = () => fillIn(EXAMPLES[evaluation.task] ?? EXAMPLES.other);
}

/** The request, or the field that is missing with what to say of it. */
export function readForm() {
  const question = byId("question").value.trim();
  if (!question) return { missing: byId("question"), why: "Write a question first." };
  const choices = inputs().map((input) => input.value.trim()).filter(Boolean);
  const empty = inputs().find((input) => !input.value.trim());
  if (choices.length < FEWEST) return { missing: empty, why: "Give at least two choices." };
  const body = { question, choices, passage: byId("passage").value, bare: byId("bare").checked, deterministic: true };
  if (byId("samples").value) body.samples = Number(byId("samples").value);
  if (byId("level").value) body.level = Number(byId("level").value);
  return { body };
}

// The result ---------------------------------------------------------------------------------------------------------

const best = (probabilities) => probabilities.indexOf(Math.max(...probabilities));

/** A draw at the temperature that calibration fitted, so that it can be compared with their average. */
function soften(draw, temperature) {
  const raised = draw.map((p) => p ** (1 / temperature));
  const sum = raised.reduce((a, b) => a + b);
  return raised.map((p) => p / sum);
}

/** The answer, or that there is none. */
export function verdict(reply, threshold) {
  const choice = reply.choices[best(reply.probabilities)];
  const sure = percent(reply.confidence);
  const [said, why] =
    reply.confidence >= threshold
      ? [choice, `${sure} sure`]
      : ["Not sure enough to answer", `${quoted(choice)} is most probable, at ${sure} of the ${percent(threshold)} it needs`];
  return [make("strong", {}, said), make("span", {}, why)];
}

export function showReply(place, reply, threshold, temperature) {
  const draws = reply.draws.map((draw) => soften(draw, temperature));
  const softened = temperature === 1 ? "" : `, at temperature ${temperature.toFixed(2)}`;
  const keys = [
    key("average", draws.length > 1 ? `average of ${draws.length} draws` : "one set of weights"),
    key("draw", `one draw${softened}`),
    key("mean", "deterministic model (posterior mean)"),
  ];
  place.replaceChildren(
    make("p", { class: "legend small soft" }, ...keys),
    make("ul", { class: "bars" }, ...reply.choices.map((choice, k) => bar(reply, choice, k, draws))),
    make("p", { id: "comparison" }, compared(reply, threshold)),
    doubt(reply),
    ...familiarity(reply),
    ...(reply.prediction_set ? [predictionSet(reply)] : []),
  );
}

function bar(reply, choice, k, draws) {
  const each = draws.map((draw) => draw[k]);
  const spread = `draws from ${percent(Math.min(...each))} to ${percent(Math.max(...each))}`;
  return make(
    "li",
    { class: k === best(reply.probabilities) ? "best" : null },
    make("span", { class: "name" }, choice),
    make("span", { class: "share" }, percent(reply.probabilities[k])),
    make("div", { class: "track" }, sized("fill", "width", reply.probabilities[k]), ...each.map((p) => sized("tick", "left", p))),
    make("div", { class: "thin" }, sized("fill", "width", reply.deterministic[k])),
    make("span", { class: "spread small soft" }, spread),
    make("span", { class: "mean small soft" }, `mean ${percent(reply.deterministic[k])}`),
  );
}

function sized(kind, property, share) {
  const made = make("i", { class: kind });
  made.style[property] = `${100 * share}%`;
  return made;
}

function compared(reply, threshold) {
  const mean = best(reply.deterministic);
  const [confidence, choice] = [reply.deterministic[mean], quoted(reply.choices[mean])];
  if (confidence >= threshold) return `The deterministic model would answer ${choice}, at ${percent(confidence)}.`;
  const too = reply.confidence < threshold ? ", too" : "";
  return `The deterministic model would keep quiet${too}, with ${choice} first at ${percent(confidence)}.`;
}

function doubt(reply) {
  const most = Math.log(reply.choices.length);
  const parts = ["aleatoric", "epistemic"].map((name) => sized(name, "width", reply[name] / most));
  const keys = [
    key("aleatoric", `${nats(reply.aleatoric)} aleatoric: in every draw`),
    key("epistemic", `${nats(reply.epistemic)} epistemic: between draws`),
    make("span", { class: "soft" }, `of at most ${figure(most)}`),
  ];
  return make(
    "div",
    { class: "doubt" },
    make("h3", {}, "What the uncertainty is made of"),
    make("div", { class: "stack", "aria-hidden": "true" }, ...parts),
    make("p", { class: "legend small" }, ...keys),
    make("p", {}, explained(reply, most)),
  );
}

function familiarity(reply) {
  const said = familiar(reply);
  if (said === null) return [];
  const shown = make("p", { id: "familiar", class: reply.unfamiliar ? "notice" : null }, said);
  return [make("div", {}, make("h3", {}, "Is the question like those of training?"), shown)];
}

function predictionSet(reply) {
  const chips = reply.prediction_set.map((choice) => make("span", { class: "chip" }, choice));
  const words = chips.length
    ? `For ${percent(reply.level, 0)} of questions like those of the calibration the right one is in such a set: `
    : `At ${percent(reply.level, 0)} no choice is probable enough for the set, which is rare among questions like those of the calibration.`;
  return make("div", {}, make("h3", {}, "Prediction set"), make("p", { id: "set" }, words, ...chips));
}
