// Turns that run on the server: following them from another tab, after a reload, or after the connection broke.

import { call, getJson, randomId } from "./api.js";
import { sessionPath as path } from "./sessions.js";
import { remember, remembered, state, toast, update } from "./store.js";
import { UNSENT, askedIn, ended, giveBack, homeOf, isKept, leave, lookUp, plain, put, readOn } from "./talk.js";
import { titleFor } from "./titles.js";
import { t } from "./words.js";

// Read a turn that already runs on the server: another tab has begun it, or this one before a reload or while the
// connection was broken (`known`). Returns whether there is one.
export async function pickUp(id, known = {}) {
  const { data } = await getJson(path(id, "/running"));
  const there = state.turns.get(id);
  if (!data.length || (there && there.status !== "failed")) return data.length > 0;
  const [{ first_message: first, messages: said }] = data;
  const messages = said.map(plain);
  const begins = first === 0 && !state.sessions.has(id);
  const metadata = begins ? { title: titleFor(messages.at(-1)?.content ?? "") } : null;
  const abort = new AbortController();
  const about = { key: randomId(20), wish: {}, messages, metadata, fork: null, turns: state.sessions.get(id)?.turns ?? 0 };
  put({ ...UNSENT, ...about, ...known, id, shown: first, status: "streaming", posted: true, abort });
  const rest = state.messages.slice(0, first);
  if (state.current === id && rest.length < state.messages.length) update({ messages: rest }); // it is answered again
  readOn(id, call(path(id, "/running?stream=true"), { signal: abort.signal })).catch((error) => ended(id, error));
  return true;
}

// The server answers again: go on with turns whose connection broke. Returns whether one of the open session was.
export async function resume() {
  let isOpen = false;
  for (const turn of [...state.turns.values()]) {
    if (turn.status !== "failed" || turn.error.status !== 0 || !turn.posted) continue;
    const { id, key, wish, messages, metadata, fork, turns } = turn;
    const runs = await pickUp(id, { key, wish, messages, metadata, fork, turns });
    if (!runs && !(await isKept(turn))) continue;
    isOpen ||= state.current === id;
    if (!runs) await leave(id);
  }
  return isOpen;
}

// The turns that have not ended when the page is closed, for when it is opened again.
export function keepRunning(isGoing = true) {
  const left = [...state.turns.values()].map((turn) => {
    const { id, key, wish, messages, metadata, fork } = turn;
    const text = fork?.again && !fork.done ? "" : askedIn(turn);
    const turns = turn.turns ?? fork?.turn ?? 0;
    return { known: { key, wish, messages, metadata, turns }, id, home: homeOf(turn), text };
  });
  remember("running", isGoing ? left : [], "sessionStorage");
}

// The page was opened again: go on with the turns that run, and return the messages of those that do not to the input
// field. Returns the session to open instead of `id`.
export async function takeUp(id) {
  const left = remembered("running", [], "sessionStorage");
  let place = id;
  while (left.length) {
    const { id: name, home: from, text, known } = left[0];
    const session = await lookUp(name);
    const runs = await pickUp(name, known);
    const home = session ? name : from;
    left.shift();
    remember("running", left, "sessionStorage");
    if (runs || (session && session.turns > known.turns)) continue; // it goes on, or is committed
    giveBack(name, home, text);
    if (name !== id) continue;
    place = home;
    toast(t("The reply was not finished. Your message is below."));
  }
  return place;
}
