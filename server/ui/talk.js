// Turns: sending, streaming, stopping, retrying, and branching from an earlier message.

import { Failure, call, eventsOf, getJson, randomId } from "./api.js";
import { draftOf, keepDraft } from "./drafts.js";
import { keepPictures, picturesOf, wire } from "./pictures.js";
import {
  changeOnly,
  loadTree,
  lose,
  newId,
  open,
  report,
  said,
  sessionPath as path,
  settle,
  titleOf,
} from "./sessions.js";
import { instructionsDraft, settingsNow, wishOf, withSettings } from "./settings.js";
import { grown, speak, state, toast, update } from "./store.js";
import { titleFor } from "./titles.js";
import { t } from "./words.js";

const ENDS = { length: t("The reply ended at its limit of tokens."), cancelled: t("Stopped here.") };
const REDRAW = 40; // milliseconds between two renderings of a growing reply

// --- sending -------------------------------------------------------------------------------------------------

// Send a turn in the open session, or in a new one. `media` stand before the text.
export function send(text, media = []) {
  const isNew = state.current === null;
  const id = state.current ?? newId();
  const changed = instructions();
  const messages = [...changed, { role: "user", content: text, ...(media.length ? { media } : {}) }];
  const title = titleFor(text || (media[0]?.kind === "audio" ? t("A sound") : t("A picture")));
  start({ id, messages, changed: changed[0]?.content, metadata: isNew ? (withSettings({ title }, state.settings) ?? { title }) : null, fork: null });
  if (isNew) begin(id);
}

// The instructions that go along with the next message: of a new conversation, or changed in an open one.
function instructions() {
  const id = state.current;
  const system = id === null ? state.settings.system.trim() : draftOf(instructionsDraft(id));
  if (id !== null) keepDraft(instructionsDraft(id), "");
  return system ? [{ role: "system", content: system }] : [];
}

// Send another message in place of message `index` and everything after it, on a branch: the old messages stay.
// `again`: it is the same message.
export async function branch(index, text, again = false) {
  const { id, messages, fork } = forkBefore(index);
  const changed = instructions();
  const isKept = ({ role }) => !changed.length || (role !== "system" && role !== "developer");
  const before = [...changed, ...messages.slice(0, -1).filter(isKept)];
  start({
    id,
    messages: [...before, { ...messages.at(-1), content: text }],
    changed: changed[0]?.content,
    metadata: null,
    fork: { ...fork, again },
  });
  show(id, fork.shown);
}

// Answer a message again beside the open session: on a branch with other settings, which is not opened. Returns its id.
export function answerBeside(index, settings) {
  const { id, messages, fork } = forkBefore(askedBefore(index));
  start({ id, messages, metadata: null, fork: { ...fork, again: true }, wish: wishOf(settings), settings });
  return id;
}

// Go on from another beginning of the reply `index`, on a branch.
export function branchBehind(index, beginning) {
  const { id, messages, fork } = forkBefore(askedBefore(index));
  const wish = { ...wishOf(settingsNow()), continue_final_message: true, add_generation_prompt: false };
  start({ id, messages: [...messages, { role: "assistant", content: beginning }], metadata: null, fork: { ...fork, again: true }, wish });
  show(id, fork.shown);
}

const askedBefore = (index) => state.messages.slice(0, index).findLastIndex((message) => message.role === "user");

// A branch of the open session that has everything before message `index`; its first messages are those of that turn.
function forkBefore(index) {
  const from = state.current;
  const old = state.messages[index];
  const kept = old.turn === null ? (state.messages.findLast(({ turn }) => turn !== null)?.turn ?? 0) : old.turn - 1; // turns before it
  const first = state.messages.findIndex((message) => message.turn === null || message.turn > kept);
  const messages = state.messages.slice(first, index + 1).map(plain);
  return { id: newId(), messages, fork: { from, turn: kept, done: false, index, shown: state.messages.slice(0, first) } };
}

function show(id, messages) {
  history.pushState(null, "", `#/${id}`);
  update({ wanted: id, current: id, messages, selected: null });
}

// Send the same message again, on a branch.
export function regenerate(index) {
  const asked = state.messages.slice(0, index).findLastIndex((message) => message.role === "user");
  if (asked >= 0) branch(asked, state.messages[asked].content, true);
}

export function plain({ role, content, name, media, tool_calls: calls, tool_call_id: call, reasoning_content: thought }) {
  const all = { role, content, name, media, tool_calls: calls, tool_call_id: call, reasoning_content: thought };
  return Object.fromEntries(Object.entries(all).filter(([, value]) => value !== undefined));
}

function begin(id) {
  history.pushState(null, "", `#/${id}`);
  update({ wanted: id, current: id, messages: [], tree: null, selected: null, unread: null });
}

// --- a turn --------------------------------------------------------------------------------------------------

// `posted`: the server was asked for the reply; `stopping`: it was asked to end it.
export const UNSENT = { status: "sending", posted: false, stopping: false, reply: "", thought: "", error: null, retryAt: null };

function start(turn) {
  const fresh = { ...UNSENT, key: randomId(20), wish: wishOf(settingsNow()) };
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
  const kept = editing || fork; // pictures of a message that is edited stay with it
  giveBack(id, home, editing || fork?.again ? "" : askedIn(turn), kept ? [] : turn.messages.at(-1).media);
  if (turn.changed && home !== null) keepDraft(instructionsDraft(home), turn.changed);
  drop(id);
  if (isOpen && home !== id) open(home);
  if (editing) update({ editing });
}

export const askedIn = (turn) => turn.messages.at(-1).content;

// The session in whose input field a turn was written: its id, null for a new one.
export const homeOf = (turn) => turn.fork?.from ?? (state.sessions.has(turn.id) ? turn.id : null);

// Return text and pictures to the input field, before what was typed since.
export function giveBack(id, home, text, media = []) {
  const pictures = [...media, ...picturesOf(id), ...(home === id ? [] : picturesOf(home))];
  keepPictures(id, []);
  keepPictures(home, pictures);
  const all = [text, draftOf(id), home === id ? "" : draftOf(home)].filter(Boolean);
  keepDraft(id, "");
  keepDraft(home, all.join("\n\n"));
  update({ drafts: state.drafts + 1 });
}

export const put = (turn) => update({ turns: new Map([...state.turns, [turn.id, turn]]) });

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
  speak(t("The reply is being written."));
  try {
    await forked(turn);
    if (!(await isAsShown(turn))) return await moved(turn);
    alter(id, { posted: true });
    const asked = call(path(id, "/chat/completions"), {
      method: "POST",
      headers: { "idempotency-key": turn.key },
      json: {
        messages: turn.messages.map(wire),
        ...(turn.metadata ? { metadata: turn.metadata } : {}),
        ...turn.wish,
        stream: true,
        background: true,
      },
      signal,
    });
    await readOn(id, asked);
  } catch (error) {
    await ended(id, error);
  }
}

// Read the reply of a turn that the server was asked for.
export async function readOn(id, asked) {
  const response = await asked;
  alter(id, { status: "streaming" });
  const finish = await read(id, response);
  await finished(id, finish);
}

export async function ended(id, error) {
  if (error.name === "AbortError" || error.code === "turn_cancelled") await stopped(id, error);
  else failed(id, error);
}

// The session, or undefined: a request for a session that does not exist would be shown as an error in the console.
export async function lookUp(id) {
  const { data } = await getJson(`v1/sessions?${new URLSearchParams({ prefix: id, limit: 1 })}`);
  return data.find((session) => session.id === id);
}

// Whether a turn was committed.
export async function isKept({ id, turns, fork }) {
  const session = await lookUp(id);
  return session !== undefined && session.turns > (turns ?? fork?.turn ?? 0);
}

// A turn was committed while this page did not listen: read it.
export async function leave(id) {
  drop(id);
  if (state.current === id) await open(id);
  else await loadOne(id);
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
  giveBack(id, id, messages.at(-1).content, messages.at(-1).media);
  drop(id);
  if (state.current === id) await open(id);
  toast(t("This conversation went on elsewhere. Your message was not sent yet."));
}

// Read the stream into the turn. Returns the finish reason.
async function read(id, response) {
  let [reply, thought, finish, paused, timer] = ["", "", null, 0, 0];
  const draw = () => {
    timer = 0;
    Object.assign(state.turns.get(id) ?? {}, { reply, thought });
    grown();
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
  speak([`${t("Reply:")} ${turn.reply}`, ENDS[finish]].filter(Boolean).join(" "));
  const isOpen = state.current === id;
  try {
    if (isOpen) {
      const before = state.messages;
      await loadTree(id);
      if (state.current === id) await settle(id, [...before, ...saidIn(turn)].map(counted(id)));
    } else {
      await loadOne(id);
      if (turn.settings) await keepSettings(id, turn.settings);
      if (state.tree?.family.sessions.has(turn.fork?.from)) await loadTree();
    }
    drop(id);
  } catch (error) {
    report(error);
    drop(id);
    if (isOpen) open(id);
  }
}

const keepSettings = (id, settings) =>
  changeOnly([state.sessions.get(id)], ({ metadata }) => ({ metadata: withSettings(metadata, settings) ?? metadata }));

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
  const known = error instanceof Failure ? error : new Failure(0, { message: t("The page failed on this answer.") });
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

// No token was generated, so there is no turn; or the connection was closed before the end, so there may be one.
async function stopped(id, { code }) {
  const turn = state.turns.get(id);
  if (turn.posted && code !== "turn_cancelled") {
    await call(path(id, "/cancel"), { method: "POST" }).catch(() => {}); // the request may have arrived since
    if (await isKept(turn).catch(() => false)) return leave(id);
  }
  dismiss(id);
  return speak(t("Stopped. Nothing was said yet."));
}

export const shownTitle = () => {
  const session = state.sessions.get(state.current) ?? state.tree?.family.sessions.get(state.current);
  const turn = state.turns.get(state.current);
  if (session) return titleOf(session);
  if (turn?.fork) return titleOf(state.sessions.get(turn.fork.from));
  return turn?.metadata?.title ?? t("New conversation");
};
