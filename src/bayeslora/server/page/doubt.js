// What entropies say of an answer, in words, and no more than follows from them.

import { percent } from "./dom.js";

const LITTLE = 0.15; // of the largest entropy there can be
const APART = 0.2; // share of the entropy from which on draws are said to disagree

/** Of a text that was compared with what every draw writes: whether to rely on it as an answer. */
export function trusted({ value, calibrated, abstains, agreement }) {
  if (!calibrated) return agreement === 1 ? "All draws write the same" : `${percent(agreement, 0)} of the draws write the same`;
  return `${abstains ? "Not sure" : "Confident"}: right with probability ${percent(value, 0)}`;
}

/** Whether a question is like those of training; null if that was not measured. */
export function familiar({ distance, unfamiliar }) {
  if (unfamiliar === null) return null;
  const nearer = `${percent(distance, 0)} of the validation questions are nearer to them`;
  return unfamiliar
    ? `Unlike the training questions: ${nearer}. What is said above was learnt from other questions; trust it less.`
    : `Like the training questions: ${nearer}.`;
}

/** Of a reply to a question with choices; `most` is the largest entropy that it can have. */
export function explained(reply, most) {
  if (reply.draws.length < 2) return "A single set of weights cannot tell its own doubt: choose two draws or more.";
  const caution = "That does not make the answer right: what all draws have wrong they do not show.";
  if (reply.entropy < LITTLE * most) return `The draws are sure, and agree with each other. ${caution}`;
  const share = reply.epistemic / reply.entropy;
  return share > APART
    ? `The draws disagree with each other: ${percent(share, 0)} of the uncertainty lies between them. Training on more questions like this one may reduce it.`
    : `The draws agree with each other: ${percent(1 - share, 0)} of the uncertainty is shared by all of them. ${caution}`;
}
