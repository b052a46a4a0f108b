// The page: who asks what, and where it is shown.

import { request } from "./api.js";
import * as choices from "./choices.js";
import { byId, make } from "./dom.js";
import { describe, prepareThreshold, showEvaluation } from "./evaluation.js";
import * as text from "./text.js";

const MODES = ["choices", "text"];

let threshold = 0;
let temperature = 1;
let reply = null; // to the question with choices that is shown
let underWay = null;
let countdown = 0;

// What is shown ------------------------------------------------------------------------------------------------------

function showReply() {
  if (!reply) return;
  byId("verdict").replaceChildren(...choices.verdict(reply, threshold));
  choices.showReply(byId("choices-result"), reply, threshold, temperature);
}

function clear() {
  reply = null;
  clearInterval(countdown);
  byId("problem").hidden = true;
  byId("verdict").replaceChildren();
  MODES.forEach((mode) => byId(`${mode}-result`).replaceChildren());
}

function showMode() {
  const chosen = document.querySelector("input[name=mode]:checked").value;
  underWay?.abort();
  underWay = null;
  setBusy(false);
  clear();
  for (const mode of MODES) byId(`${mode}-form`).hidden = mode !== chosen;
  byId("threshold-card").hidden = chosen === "text";
  byId("empty").hidden = false;
}

function setBusy(busy) {
  byId("result").setAttribute("aria-busy", busy);
  for (const button of document.querySelectorAll("main button.primary")) button.disabled = busy;
  byId("stop").disabled = !busy;
}

/** What went wrong and, if there is something to do again, a button for it, not before the server wants that. */
function showProblem(message, again, seconds = 0) {
  const button = make("button", { type: "button", class: "quiet" });
  button.addEventListener("click", again);
  let left = seconds;
  const tick = () => {
    button.disabled = left > 0;
    button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    if (left-- <= 0) clearInterval(countdown);
  };
  clearInterval(countdown);
  countdown = setInterval(tick, 1000);
  tick();
  byId("problem").replaceChildren(make("p", {}, message), ...(again ? [button] : []));
  byId("problem").hidden = false;
}

// What is done -------------------------------------------------------------------------------------------------------

/** Read a form, and do with it what takes a while and may fail. */
async function work(form, words, doing) {
  const read = form.readForm();
  if (read.missing) {
    showProblem(read.why);
    return read.missing.focus();
  }
  underWay?.abort();
  const mine = (underWay = new AbortController());
  clear();
  byId("empty").hidden = true;
  byId("verdict").textContent = words;
  setBusy(true);
  try {
    await doing(read, mine.signal);
  } catch (error) {
    if (underWay !== mine) return; // something else is shown by now
    byId("verdict").textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error.name !== "AbortError") showProblem(error.message, () => work(form, words, doing), error.retryAfter);
  } finally {
    if (underWay === mine) setBusy(false);
  }
}

const ask = () =>
  work(choices, "Asking …", async ({ body }, signal) => {
    reply = await (await request("/v1/choices", body, signal)).json();
    showReply();
  });

const write = () =>
  work(text, "Writing …", async (read, signal) => {
    byId("verdict").replaceChildren(...(await text.write(byId("text-result"), read, signal)));
  });

async function start() {
  byId("problem").hidden = true;
  let evaluation;
  try {
    evaluation = await (await request("/v1/evaluation")).json();
  } catch (problem) {
    byId("measured").textContent = "Nothing could be loaded.";
    return showProblem(problem.message, start);
  }
  temperature = evaluation.calibration?.temperature ?? 1;
  describe(evaluation);
  choices.fitForm(evaluation);
  text.fitForm(evaluation);
  for (const id of ["samples", "text-samples"]) {
    byId(id).value = evaluation.samples;
    byId(id).max = evaluation.max_samples;
  }
  showEvaluation(evaluation);
  prepareThreshold(evaluation, (value) => {
    threshold = value;
    showReply();
  });
}

// What is listened to ------------------------------------------------------------------------------------------------

function listen(form, act) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit(form.querySelector(".primary"));
  });
}

function prepareTheme() {
  const { dataset } = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (dataset.theme ? dataset.theme === "dark" : system.matches);
  const show = () => (byId("theme").textContent = `Switch to ${isDark() ? "light" : "dark"} colours`);
  byId("theme").addEventListener("click", () => {
    dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("bayeslora-theme", dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  show();
}

prepareTheme();
choices.prepareForm();
listen(byId("choices-form"), ask);
listen(byId("text-form"), write);
byId("stop").addEventListener("click", () => underWay.abort());
for (const radio of document.querySelectorAll("input[name=mode]")) radio.addEventListener("change", showMode);
showMode();
start();
