// The page's state, in one object. `update` changes it and renders every component that uses it.

import { useEffect, useReducer } from "./vendor/htm-3.1.1/standalone.module.js";
import { t } from "./words.js";

export const BESIDE = "(min-width: 1160px)"; // wide enough for the panel beside the chat
const SPOKEN = 10_000; // milliseconds after which an announcement is removed, so that screen readers find nothing old

const listeners = new Set();
let told = false;

export const state = {
  health: "ok", // ok | loading | down
  models: [], // of /v1/models
  meaning: false, // whether a model is loaded that finds sessions by meaning
  sessions: new Map(), // id -> session
  more: false, // of the list
  after: null,
  listed: false,
  current: null, // id of the session that is open; null: a new one
  wanted: null, // id of the session that is being opened
  opening: false,
  unread: null, // { id, error } of a session that could not be opened
  messages: [],
  shown: null, // id of the last turn that `messages` are read up to
  tree: null, // of /v1/sessions/{id}/tree, with the nodes of family.js
  turns: new Map(), // session id -> its running or failed turn, see talk.js
  selected: null, // id of the turn whose cost is shown
  panel: null, // turns | live | null
  target: null, // { id, message } that is scrolled to, found by a search
  editing: null, // { id, index, text } of a message that is being edited
  drafts: 0, // counts how often text was returned to the input field
  write: 0, // counts how often the input field shall get the focus
  drawer: false, // whether the list of sessions covers the chat
  dialog: null, // { kind, ...}
  toast: null, // { text, action, run }
  spoken: "", // the text for screen readers
  removed: new Set(), // ids that are hidden, and deleted when the time to undo is over
  settings: {}, // of new conversations, see settings.js
};

export function update(change) {
  Object.assign(state, change);
  if (told) return;
  told = true;
  queueMicrotask(() => {
    told = false;
    for (const listener of [...listeners]) listener();
  });
}

export function useStore() {
  const [, redraw] = useReducer((times) => times + 1, 0);
  useEffect(() => {
    listeners.add(redraw);
    return () => listeners.delete(redraw);
  }, []);
  return state;
}

const followers = new Set();

// A running turn has more text, many times a second: only what uses it is rendered, by `useGrowth`.
export function grown() {
  for (const redraw of [...followers]) redraw();
}

export function useGrowth() {
  const [, redraw] = useReducer((times) => times + 1, 0);
  useEffect(() => {
    followers.add(redraw);
    return () => followers.delete(redraw);
  }, []);
}

let spokenTimer = 0;

// Announce a text to screen readers.
export function speak(text) {
  clearTimeout(spokenTimer);
  spokenTimer = setTimeout(() => update({ spoken: "" }), SPOKEN);
  update({ spoken: text });
}

let toastTimer = 0;

// Show a message at the foot of the page for some seconds, which start again when the pointer or the focus leaves it;
// `after` is called when it disappears, unless `run` was.
export function toast(text, { action = null, run = null, after = null, seconds = 6 } = {}) {
  state.toast?.after?.();
  clearTimeout(toastTimer);
  const shown = { text, action, after };
  const end = () => {
    clearTimeout(toastTimer);
    if (state.toast === shown) update({ toast: null });
  };
  shown.run = () => {
    shown.after = null;
    end();
    run?.();
  };
  shown.close = () => {
    end();
    shown.after?.();
    shown.after = null;
  };
  shown.hold = () => clearTimeout(toastTimer);
  shown.release = () => {
    clearTimeout(toastTimer);
    if (state.toast === shown) toastTimer = setTimeout(shown.close, seconds * 1000);
  };
  update({ toast: shown });
  shown.release();
  speak(action ? t("{text} {action} is a button at the end of the page.", { text, action }) : text);
}

// Kept over reloads if the browser has storage.
export function remembered(name, fallback, place = "localStorage") {
  try {
    return JSON.parse(window[place].getItem(`warmturn-${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function remember(name, value, place = "localStorage") {
  try {
    window[place].setItem(`warmturn-${name}`, JSON.stringify(value));
  } catch {
    // no storage: kept until the page is closed
  }
}
