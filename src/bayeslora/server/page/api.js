// What the server is asked, and what can go wrong.

import { byId } from "./dom.js";

const KEPT = "bayeslora-token";

/** A request that got no answer, in words for people; `retryAfter` in seconds if the server said so. */
export class Problem extends Error {
  constructor(message, status = 0, retryAfter = 0) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** GET, or POST if there is a body. A server that wants a token gets one, from whoever sits here. */
export async function request(path, body, signal) {
  for (;;) {
    const used = sessionStorage.getItem(KEPT);
    const reply = await send(path, body, signal, used);
    if (reply.ok) return reply;
    if (reply.status !== 401) throw await problemOf(reply);
    // another request may have been given the token meanwhile
    if (sessionStorage.getItem(KEPT) === used && !(await askForToken(used !== null))) throw await problemOf(reply);
  }
}

async function send(path, body, signal, token) {
  // as bytes of UTF-8, which is what the server compares; a header takes characters up to 255 only
  const bytes = token === null ? null : String.fromCharCode(...new TextEncoder().encode(token));
  const headers = bytes === null ? {} : { Authorization: `Bearer ${bytes}` };
  if (body) headers["Content-Type"] = "application/json";
  try {
    return await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
}

const unreachable = () => new Problem("The server cannot be reached. Is it still running?");

async function problemOf(reply) {
  const told = await reply.json().then((body) => body.error.message, () => reply.statusText);
  const after = Number(reply.headers.get("Retry-After")) || 0;
  return new Problem(inWords(reply.status, told), reply.status, after);
}

function inWords(status, told) {
  if (status === 401) return "The server wants a token, and has none from you.";
  if (status === 429) return "Many questions wait already, so the server took no more.";
  if (status === 504) return `That took too long: ${told}.`;
  if (status >= 500) return `The server failed: ${told}.`;
  return `The server refused: ${told}.`;
}

/** Ask for the token; whether there is one now. Requests that come meanwhile share the one dialog. */
let asking = null;
function askForToken(wrong) {
  asking ??= new Promise((answered) => {
    const dialog = byId("token-dialog");
    byId("token-wrong").hidden = !wrong;
    byId("token").value = "";
    byId("token-form").onsubmit = () => sessionStorage.setItem(KEPT, byId("token").value.trim());
    dialog.returnValue = "";
    dialog.onclose = () => answered(dialog.returnValue === "given");
    dialog.showModal();
  }).finally(() => (asking = null));
  return asking;
}

/** The events of a stream, until it says that it is done. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : unreachable();
    });
    if (done) throw new Problem("The server ended the text before it was done.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Problem(`The text ended early: ${event.error.message}.`);
      yield event;
    }
  }
}
