// What the page knows, in one object. Whoever changes it calls `update`; every component that uses it is drawn anew.

import { useEffect, useReducer } from "./vendor/htm-3.1.1/standalone.module.js";

export const BESIDE = "(min-width: 1160px)"; // where the panel stands beside the chat
const SPOKEN = 10_000; // milliseconds after which a screen reader that comes by finds nothing old

const listeners = new Set();
let told = false;

export const state = {
  health: "ok", // ok | loading | down
  model: null, // of /v1/models
  sessions: new Map(), // id -> session
  more: false, // of the list
  after: null,
  listed: false,
  current: null, // id of the session that is open; null: a new one
  wanted: null, // id of the session that is about to be
  opening: false,
  unread: null, // { id, error } of a session that could not be opened
  messages: [],
  shown: null, // id of the last turn that `messages` are read up to
  tree: null, // of /v1/sessions/{id}/tree, with what family.js makes of it
  turns: new Map(), // session id -> the turn that runs or has failed there, see talk.js
  selected: null, // id of the turn whose cost is shown
  panel: null, // turns | live | null
  editing: null, // { id, index, text } of a message that is to be written anew
  drafts: 0, // counts the times that text was given back
  write: 0, // counts the times that the place to write is to have the focus
  drawer: false, // the list of sessions, where there is no room beside the chat
  dialog: null, // { kind, ...}
  toast: null, // { text, action, run }
  spoken: "", // what screen readers are told
  removed: new Set(), // ids that are hidden, and deleted when the chance to undo is over
  settings: { temperature: "", maxTokens: "", system: "" },
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

let spokenTimer = 0;

// Tell screen readers.
export function speak(text) {
  clearTimeout(spokenTimer);
  spokenTimer = setTimeout(() => update({ spoken: "" }), SPOKEN);
  update({ spoken: text });
}

let toastTimer = 0;

// Say something at the foot of the page for some seconds, which begin anew when the pointer or the focus leaves it;
// `after` is called when it goes unless `run` was.
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
  speak(action ? `${text} ${action} is a button at the end of the page.` : text);
}

// Kept over reloads, where the browser keeps anything. What somebody wrote is in `sessionStorage`, beside the key:
// whoever comes next with another key is somebody else.
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
    // then until the page is left
  }
}
