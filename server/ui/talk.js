// Turns: sending, streaming, stopping, retrying, and branching from an earlier message.

import { Failure, call, eventsOf, getJson, randomId } from "./api.js";
import {
  loadTree,
  lose,
  newId,
  open,
  report,
  said,
  sessionPath as path,
  settle,
  titleFor,
  titleOf,
} from "./sessions.js";
import { remember, remembered, speak, state, toast, update } from "./store.js";

const ENDS = { length: " The reply ended at its limit of tokens.", cancelled: " Stopped here." };
const REDRAW = 40; // milliseconds between two renderings of a growing reply

// --- sending -------------------------------------------------------------------------------------------------

// Send a turn in the open session, or in a new one.
export function send(text) {
  const isNew = state.current === null;
  const id = state.current ?? newId();
  const system = isNew && state.settings.system.trim();
  const messages = [{ role: "user", content: text }];
  if (system) messages.unshift({ role: "system", content: system });
  start({ id, messages, metadata: isNew ? { title: titleFor(text) } : null, fork: null });
  if (isNew) begin(id);
}

// Send another message in place of message `index` and everything after it, on a branch: the old messages stay.
// `again`: it is the same message.
export async function branch(index, text, again = false) {
  const from = state.current;
  const old = state.messages[index];
  const kept = old.turn === null ? (state.messages.findLast(({ turn }) => turn !== null)?.turn ?? 0) : old.turn - 1; // turns before it
  const first = state.messages.findIndex((message) => message.turn === null || message.turn > kept);
  const before = state.messages.slice(first, index).map(plain);
  const id = newId();
  const shown = state.messages.slice(0, first);
  start({
    id,
    messages: [...before, { ...plain(old), content: text }],
    metadata: null,
    fork: { from, turn: kept, done: false, index, shown, again },
  });
  history.pushState(null, "", `#/${id}`);
  update({ wanted: id, current: id, messages: shown, selected: null });
}

// Send the same message again, on a branch.
export function regenerate(index) {
  const asked = state.messages.slice(0, index).findLastIndex((message) => message.role === "user");
  if (asked >= 0) branch(asked, state.messages[asked].content, true);
}

function plain({ role, content, name, tool_calls: calls, tool_call_id: call, reasoning_content: thought }) {
  const all = { role, content, name, tool_calls: calls, tool_call_id: call, reasoning_content: thought };
  return Object.fromEntries(Object.entries(all).filter(([, value]) => value !== undefined));
}

function begin(id) {
  history.pushState(null, "", `#/${id}`);
  update({ wanted: id, current: id, messages: [], tree: null, selected: null, unread: null });
}

// --- a turn --------------------------------------------------------------------------------------------------

// `posted`: the server was asked for the reply; `stopping`: it was asked to end it.
const UNSENT = { status: "sending", posted: false, stopping: false, reply: "", thought: "", error: null, retryAt: null };

function start(turn) {
  const fresh = { ...UNSENT, key: randomId(20) };
  // `shown`: how many messages it follows; `turns`: how many the session had when it was sent, null before.
  put({ ...fresh, shown: state.messages.length, turns: null, ...turn, abort: new AbortController() });
  run(turn.id);
}

// Repeat the same request: its key makes it run once, also if the first attempt reached the server after all.
export function retry(id) {
  const turn = state.turns.get(id);
  put({ ...turn, ...UNSENT, abort: new AbortController() });
  run(id);
}

// Discard a failed turn; its message is returned to the input field.
export function dismiss(id) {
  const turn = state.turns.get(id);
  const isOpen = state.current === id;
  const { fork } = turn;
  if (fork?.done) call(path(id), { method: "DELETE" }).catch(() => {});
  const home = homeOf(turn);
  const editing = isOpen && fork && !fork.again ? { id: home, index: fork.index, text: askedIn(turn) } : null;
  giveBack(id, home, editing || fork?.again ? "" : askedIn(turn));
  drop(id);
  if (isOpen && home !== id) open(home);
  if (editing) update({ editing });
}

const askedIn = (turn) => turn.messages.at(-1).content;

// The session in whose input field a turn was written: its id, null for a new one.
const homeOf = (turn) => turn.fork?.from ?? (state.sessions.has(turn.id) ? turn.id : null);

// Return text to the input field, before what was typed since.
function giveBack(id, home, text) {
  const all = [text, draftOf(id), home === id ? "" : draftOf(home)].filter(Boolean);
  keepDraft(id, "");
  keepDraft(home, all.join("\n\n"));
  update({ drafts: state.drafts + 1 });
}

const put = (turn) => update({ turns: new Map([...state.turns, [turn.id, turn]]) });

function drop(id) {
  const turns = new Map(state.turns);
  turns.delete(id);
  update({ turns });
}

// Change the turn, if it is still the session's current one.
function alter(id, change) {
  const turn = state.turns.get(id);
  if (turn) put({ ...turn, ...change });
}

async function run(id) {
  const turn = state.turns.get(id);
  const { signal } = turn.abort;
  speak("The reply is being written.");
  try {
    await forked(turn);
    if (!(await isAsShown(turn))) return await moved(turn);
    alter(id, { posted: true });
    const response = await call(path(id, "/chat/completions"), {
      method: "POST",
      headers: { "idempotency-key": turn.key },
      json: {
        messages: turn.messages,
        ...(turn.metadata ? { metadata: turn.metadata } : {}),
        ...wished(),
        stream: true,
      },
      signal,
    });
    alter(id, { status: "streaming" });
    const finish = await read(id, response);
    await finished(id, finish);
  } catch (error) {
    if (error.name === "AbortError" || error.code === "turn_cancelled") stopped(id);
    else failed(id, error);
  }
}

// A fork cannot be cancelled: it may exist already, so it is deleted if it does.
async function forked(turn) {
  const { fork, abort } = turn;
  if (!fork || fork.done) return;
  const stop = new Promise((_, reject) => abort.signal.addEventListener("abort", () => reject(abort.signal.reason)));
  const json = { id: turn.id, turn: fork.turn };
  const made = call(path(fork.from, "/fork"), { method: "POST", json }).catch((error) => {
    if (error.code !== "session_exists") throw error; // an earlier attempt succeeded
  });
  try {
    await Promise.race([made, stop]);
  } catch (error) {
    if (error.name === "AbortError") made.then(() => call(path(turn.id), { method: "DELETE" })).catch(() => {});
    throw error;
  }
  fork.done = true;
}

// The server would create a missing session, and append to one that other clients have continued. The user answers
// what is shown, so both are errors here. A turn that was sent once may itself be in the session.
async function isAsShown(turn) {
  if (turn.metadata) return true;
  const session = await getJson(path(turn.id), { signal: turn.abort.signal });
  if (turn.turns !== null) return true;
  alter(turn.id, { turns: session.turns });
  return turn.fork !== null || session.messages === turn.shown;
}

async function moved({ id, messages }) {
  giveBack(id, id, messages.at(-1).content);
  drop(id);
  if (state.current === id) await open(id);
  toast("This conversation went on elsewhere. Your message was not sent yet.");
}

function wished() {
  const { temperature, maxTokens } = state.settings;
  const wish = {};
  if (temperature !== "") wish.temperature = Number(temperature);
  if (maxTokens !== "") wish.max_tokens = Number(maxTokens);
  return wish;
}

// Read the stream into the turn. Returns the finish reason.
async function read(id, response) {
  let [reply, thought, finish, paused, timer] = ["", "", null, 0, 0];
  const draw = () => {
    timer = 0;
    alter(id, { reply, thought });
  };
  try {
    for await (const event of eventsOf(response)) {
      const choice = event.choices[0];
      if (!choice) continue;
      reply += choice.delta.content ?? "";
      thought += choice.delta.reasoning_content ?? "";
      finish = choice.finish_reason ?? finish;
      timer ||= setTimeout(draw, REDRAW);
      // Let the browser render and handle input. A hidden tab has timers only once a second, and needs no rendering.
      if (performance.now() - paused > REDRAW && !document.hidden) {
        paused = performance.now();
        await new Promise((resume) => setTimeout(resume));
      }
    }
  } finally {
    clearTimeout(timer);
    draw(); // also if the stream broke: show what was received
  }
  return finish;
}

// The turn is committed: add it to the conversation.
async function finished(id, finish) {
  const turn = state.turns.get(id);
  speak(`Reply: ${turn.reply}${ENDS[finish] ?? ""}`);
  const isOpen = state.current === id;
  try {
    if (isOpen) {
      const before = state.messages;
      await loadTree(id);
      if (state.current === id) await settle(id, [...before, ...saidIn(turn)].map(counted(id)));
    } else {
      await loadOne(id);
    }
    drop(id);
  } catch (error) {
    report(error);
    drop(id);
    if (isOpen) open(id);
  }
}

async function loadOne(id) {
  const session = await getJson(path(id));
  update({ sessions: new Map([...state.sessions, [id, session]]) });
}

const saidIn = (turn) => [
  ...turn.messages,
  { role: "assistant", content: turn.reply, reasoning_content: turn.thought || undefined },
];

// Messages without a turn belong to the turn that is now the last.
function counted(id) {
  const last = state.tree.family.paths.get(id).length;
  return (message, index) => ({ ...message, index, turn: message.turn ?? last });
}

function failed(id, error) {
  const known = error instanceof Failure ? error : new Failure(0, { message: "The page failed on this answer." });
  if (known !== error) console.error(error);
  const waits = known.retryAfter !== null;
  alter(id, { status: "failed", error: known, retryAt: waits ? Date.now() + known.retryAfter * 1000 : null });
  if (isGone(known)) lose(id, known);
  if (state.current !== id) speak(said(known)); // otherwise an alert is shown
}

export const isGone = (error) => error.status === 404 || error.code === "session_deleted";

// --- stopping ------------------------------------------------------------------------------------------------

// Ask the server to end the reply: its stream ends, and the text so far becomes a turn. If the server was not asked
// for the reply yet, cannot end it, or the user stops a second time, the connection is closed.
export async function stop(id = state.current) {
  const turn = state.turns.get(id);
  if (!turn) return;
  if (!turn.posted || turn.stopping) return turn.abort.abort();
  alter(id, { stopping: true });
  try {
    const { cancelled } = await getJson(path(id, "/cancel"), { method: "POST" });
    if (!cancelled && state.turns.get(id)?.status === "sending") turn.abort.abort(); // the server does not know it yet
  } catch {
    turn.abort.abort();
  }
}

// No token was generated, or the connection was closed before the end: there is no turn.
function stopped(id) {
  const { reply } = state.turns.get(id);
  dismiss(id);
  speak(reply.trim() === "" ? "Stopped. Nothing was said yet." : "Stopped. The reply is not kept.");
}

// --- drafts --------------------------------------------------------------------------------------------------

const drafts = new Map(Object.entries(remembered("drafts", {}, "sessionStorage")));

export const draftOf = (id) => drafts.get(id ?? "new") ?? "";

export function keepDraft(id, text) {
  const name = id ?? "new";
  if (text) drafts.set(name, text);
  else drafts.delete(name);
  remember("drafts", Object.fromEntries([...drafts].slice(-20)), "sessionStorage");
}

// A turn that runs when the page is closed is not committed. Its message is kept until the page is opened again.
export function keepRunning(isGoing = true) {
  const left = [...state.turns.values()].map((turn) => {
    const text = turn.fork?.again && !turn.fork.done ? "" : askedIn(turn);
    return { id: turn.id, home: homeOf(turn), text, turns: turn.turns ?? turn.fork?.turn ?? 0 };
  });
  remember("running", isGoing ? left : [], "sessionStorage");
}

// The page was opened again: put the kept message into the input field. Returns the session to open instead of `id`.
export async function takeUp(id) {
  const left = remembered("running", [], "sessionStorage");
  let place = id;
  while (left.length) {
    const { id: name, home: from, text, turns } = left[0];
    const session = await getJson(path(name)).catch((error) => {
      if (error.status !== 404) throw error;
      return null;
    });
    const home = session ? name : from;
    left.shift();
    remember("running", left, "sessionStorage");
    if (session && session.turns > turns) continue; // the turn was committed after all
    giveBack(name, home, text);
    if (name !== id) continue;
    place = home;
    toast("The reply was not finished. Your message is below.");
  }
  return place;
}

export const shownTitle = () => {
  const session = state.sessions.get(state.current) ?? state.tree?.family.sessions.get(state.current);
  const turn = state.turns.get(state.current);
  if (session) return titleOf(session);
  if (turn?.fork) return titleOf(state.sessions.get(turn.fork.from));
  return turn?.metadata?.title ?? "New conversation";
};
