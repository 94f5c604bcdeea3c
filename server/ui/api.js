// Calls of the server's API, relative to the page's address, so that they also work below a prefix.

import { t } from "./words.js";

const ROOT = new URL("../", document.baseURI);
const KEY = "warmturn-api-key";
const BROKEN = t("The connection broke before the answer was complete.");

const OF_THE_BROWSER = ["warmturn-theme", "warmturn-panel", "warmturn-language"]; // kept when a key is forgotten

let memory = ""; // used where the browser has no storage

const kept = (place) => {
  try {
    return window[place].getItem(KEY);
  } catch {
    return null;
  }
};

// Whether a key can be sent in a header: otherwise the request would fail as if the server were gone.
export const isKey = (text) => /^[\x21-\x7e]+$/.test(text);

export const apiKey = {
  get: () => kept("sessionStorage") ?? kept("localStorage") ?? memory,
  // `lasting`: for all tabs of this browser, also after it was closed.
  set: (value, lasting = false) => {
    memory = value;
    try {
      window[lasting ? "localStorage" : "sessionStorage"].setItem(KEY, value);
    } catch {
      // no storage: kept until the page is closed
    }
  },
  // Where drafts and settings are stored: with the key, as another key may belong to another user.
  place: () => (apiKey.get() === "" || kept("localStorage") !== null ? "localStorage" : "sessionStorage"),
  // Forget the key, and drafts and settings that were written with it.
  forget: () => {
    memory = "";
    try {
      const lasted = kept("localStorage") !== null;
      sessionStorage.clear();
      if (!lasted) return;
      for (const name of Object.keys(localStorage)) {
        if (name.startsWith("warmturn-") && !OF_THE_BROWSER.includes(name)) localStorage.removeItem(name);
      }
    } catch {
      // no storage: there are no drafts
    }
  },
};

// A failed request. `status` is 0 if there was no answer; `retryAfter` is in seconds, or null.
export class Failure extends Error {
  constructor(status, { code = null, message = BROKEN, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

let keyAsked = null; // one dialog for all requests that get a 401
let askForKey = async () => ({ key: "" });

export function onKeyNeeded(ask) {
  askForKey = ask;
}

let lost = () => {};

// `told` is called for every request that got no answer.
export function onLost(told) {
  lost = told;
}

export const url = (path) => new URL(path, ROOT);

// A response with a 2xx status. Throws Failure, or AbortError.
export async function call(path, { method = "GET", json, body, headers = {}, signal, keepalive } = {}) {
  const all = { ...headers };
  if (json !== undefined) all["content-type"] = "application/json";
  const used = apiKey.get();
  if (used) all.authorization = `Bearer ${used}`;
  let response;
  try {
    response = await fetch(url(path), {
      method,
      headers: all,
      body: json === undefined ? body : JSON.stringify(json),
      signal,
      keepalive,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    lost();
    throw new Failure(0, { message: t("The server does not answer.") });
  }
  if (response.ok) return response;
  if (response.status === 401) {
    if (apiKey.get() === used) {
      keyAsked ??= askForKey(used !== "").finally(() => (keyAsked = null));
      const { key, lasting } = await keyAsked;
      apiKey.set(key, lasting);
    }
    return call(path, { method, json, body, headers, signal, keepalive });
  }
  throw await failureOf(response);
}

export const getJson = async (path, options) => (await call(path, options)).json();

async function failureOf(response) {
  const wait = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  const retryAfter = Number.isNaN(wait) ? null : wait;
  try {
    const { error } = await response.json();
    return new Failure(response.status, { code: error.code, message: error.message, retryAfter });
  } catch {
    return new Failure(response.status, { message: t("The server answered with status {status}.", { status: response.status }), retryAfter });
  }
}

// The parsed events of a stream. Throws Failure if the stream has an error event or ends too early.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let step;
    try {
      step = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      lost();
      throw new Failure(0);
    }
    if (step.done) {
      lost();
      throw new Failure(0);
    }
    const lines = (rest + step.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Failure(200, event.error);
      yield event;
    }
  }
}

// A random id. Works also if the page was not loaded over HTTPS.
export function randomId(bytes = 10) {
  const alphabet = "abcdefghijklmnopqrstuvwxyz234567";
  return [...crypto.getRandomValues(new Uint8Array(bytes))].map((byte) => alphabet[byte & 31]).join("");
}
