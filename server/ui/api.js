// The server's REST, relative to where the page lies, so that it also works below a prefix.

const ROOT = new URL("../", document.baseURI);
const KEY = "warmturn-api-key";
const BROKEN = "The connection broke before the answer was complete.";

let memory = ""; // where the browser keeps nothing

// Whether a key can be sent: what a header cannot hold would fail like a server that is gone.
export const isKey = (text) => /^[\x21-\x7e]+$/.test(text);

export const apiKey = {
  get: () => {
    try {
      return sessionStorage.getItem(KEY) ?? memory;
    } catch {
      return memory;
    }
  },
  set: (value) => {
    memory = value;
    try {
      sessionStorage.setItem(KEY, value);
    } catch {
      // then until the page is left
    }
  },
  // And all that was written under it.
  forget: () => {
    memory = "";
    try {
      sessionStorage.clear();
    } catch {
      // nothing was kept
    }
  },
};

// What went wrong with a request. `status` is 0 where nothing came back; `retryAfter` is in seconds, or null.
export class Failure extends Error {
  constructor(status, { code = null, message = BROKEN, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

let keyAsked = null; // one question for all requests that meet a 401
let askForKey = async () => "";

export function onKeyNeeded(ask) {
  askForKey = ask;
}

let lost = () => {};

// `told` hears of every request that got no answer at all.
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
    throw new Failure(0, { message: "The server does not answer." });
  }
  if (response.ok) return response;
  if (response.status === 401) {
    if (apiKey.get() === used) {
      keyAsked ??= askForKey(used !== "").finally(() => (keyAsked = null));
      apiKey.set(await keyAsked);
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
    return new Failure(response.status, { message: `The server answered with status ${response.status}.`, retryAfter });
  }
}

// The events of a stream, parsed. Throws Failure where the stream says so or ends too early.
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

// Random, also where the page did not come over HTTPS.
export function randomId(bytes = 10) {
  const alphabet = "abcdefghijklmnopqrstuvwxyz234567";
  return [...crypto.getRandomValues(new Uint8Array(bytes))].map((byte) => alphabet[byte & 31]).join("");
}
