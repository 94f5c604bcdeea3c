// Turns: sent, streamed, stopped, tried again, and answers to an earlier message, which begin a branch.

import { Failure, call, eventsOf, getJson, randomId } from "./api.js";
import { loadTree, newId, open, report, said, sessionPath as path, titleFor, titleOf } from "./sessions.js";
import { remember, remembered, state, update } from "./store.js";

const REDRAW = 40; // milliseconds between two looks at a growing reply
const KEEP_TRIES = 20;

// --- what is sent --------------------------------------------------------------------------------------------

// A turn on the open session, or on a new one.
export function send(text) {
  const isNew = state.current === null;
  const id = state.current ?? newId();
  const system = isNew && state.settings.system.trim();
  const messages = [{ role: "user", content: text }];
  if (system) messages.unshift({ role: "system", content: system });
  start({ id, messages, metadata: isNew ? { title: titleFor(text) } : null, fork: null });
  if (isNew) begin(id);
}

// Another message in place of message `index`, and all that comes behind it: on a branch, the old one stays.
export async function branch(index, text) {
  const from = state.current;
  const { turns } = state.tree.data.find(({ session }) => session.id === from);
  const old = state.messages[index];
  const kept = old.turn === null ? turns.length : old.turn - 1; // turns before it
  const first = state.messages.findIndex((message) => message.turn === null || message.turn > kept);
  const before = state.messages.slice(first, index).map(plain);
  const id = newId();
  const shown = state.messages.slice(0, first);
  start({
    id,
    messages: [...before, { ...plain(old), content: text }],
    metadata: null,
    fork: { from, turn: kept, done: false },
  });
  history.pushState(null, "", `#/${id}`);
  update({ wanted: id, current: id, messages: shown, selected: null });
}

// The same question once more, on a branch.
export function regenerate(index) {
  const asked = state.messages.slice(0, index).findLastIndex((message) => message.role === "user");
  if (asked >= 0) branch(asked, state.messages[asked].content);
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

function start(turn) {
  const fresh = { key: randomId(20), reply: "", thought: "", status: "sending", error: null, retryAt: null, ...turn };
  put({ ...fresh, abort: new AbortController() });
  run(fresh.id);
}

// The same request again: under its key it runs once, also where the first try came through after all.
export function retry(id) {
  const turn = state.turns.get(id);
  put({ ...turn, status: "sending", reply: "", thought: "", error: null, retryAt: null, abort: new AbortController() });
  run(id);
}

// Leave a turn that failed; what it asked goes back to where it was written.
export function dismiss(id) {
  const turn = state.turns.get(id);
  drop(id);
  if (turn.fork) {
    if (turn.fork.done) call(path(id), { method: "DELETE" }).catch(() => {});
    open(turn.fork.from);
  } else {
    keepDraft(state.tree ? id : null, turn.messages.at(-1).content);
    if (!state.tree) open(null);
    update({});
  }
}

const put = (turn) => update({ turns: new Map([...state.turns, [turn.id, turn]]) });

function drop(id) {
  const turns = new Map(state.turns);
  turns.delete(id);
  update({ turns });
}

// A change of a turn that is still this one.
function alter(id, change) {
  const turn = state.turns.get(id);
  if (turn) put({ ...turn, ...change });
}

async function run(id) {
  const turn = state.turns.get(id);
  const { signal } = turn.abort;
  update({ spoken: "The reply is being written." });
  try {
    await forked(turn);
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
    if (error.name === "AbortError") await stopped(id);
    else failed(id, error);
  }
}

async function forked(turn) {
  if (!turn.fork || turn.fork.done) return;
  try {
    await call(path(turn.fork.from, "/fork"), {
      method: "POST",
      json: { id: turn.id, turn: turn.fork.turn },
      signal: turn.abort.signal,
    });
  } catch (error) {
    if (error.code !== "session_exists") throw error; // an earlier try came through
  }
  turn.fork.done = true;
}

function wished() {
  const { temperature, maxTokens } = state.settings;
  const wish = {};
  if (temperature !== "") wish.temperature = Number(temperature);
  if (maxTokens !== "") wish.max_tokens = Number(maxTokens);
  return wish;
}

// Read the stream into the turn; the finish reason.
async function read(id, response) {
  let [reply, thought, finish, drawn] = ["", "", null, 0];
  for await (const event of eventsOf(response)) {
    const choice = event.choices[0];
    if (!choice) continue;
    reply += choice.delta.content ?? "";
    thought += choice.delta.reasoning_content ?? "";
    finish = choice.finish_reason ?? finish;
    if (performance.now() - drawn > REDRAW) {
      drawn = performance.now();
      alter(id, { reply, thought });
      await new Promise((resume) => setTimeout(resume)); // others may draw and type
    }
  }
  alter(id, { reply, thought });
  return finish;
}

// The turn is in the log: it becomes a part of the conversation.
async function finished(id, finish) {
  const turn = state.turns.get(id);
  update({ spoken: `Reply: ${turn.reply}` });
  const isOpen = state.current === id;
  try {
    if (isOpen) {
      const before = state.messages;
      await loadTree(id);
      if (state.current === id) update({ messages: [...before, ...saidIn(turn)].map(counted(id)) });
    } else {
      const session = await getJson(path(id));
      update({ sessions: new Map([...state.sessions, [id, session]]) });
    }
    drop(id);
  } catch (error) {
    report(error);
    drop(id);
    if (isOpen) open(id);
  }
  if (finish === "length") update({ spoken: "The reply ended at its limit of tokens." });
}

const saidIn = (turn) => [
  ...turn.messages,
  { role: "assistant", content: turn.reply, reasoning_content: turn.thought || undefined },
];

// Messages that had no turn so far belong to the one that is now the last.
function counted(id) {
  const last = state.tree.data.find(({ session }) => session.id === id).turns.length;
  return (message, index) => ({ ...message, index, turn: message.turn ?? last });
}

function failed(id, error) {
  const known = error instanceof Failure ? error : new Failure(0, { message: "The page failed on this answer." });
  if (known !== error) console.error(error);
  const waits = known.retryAfter !== null;
  alter(id, { status: "failed", error: known, retryAt: waits ? Date.now() + known.retryAfter * 1000 : null });
  update({ spoken: said(known) });
}

// --- stopping ------------------------------------------------------------------------------------------------

export function stop(id = state.current) {
  state.turns.get(id)?.abort.abort();
}

// Nothing of an abandoned turn is in the log. What was read of it is put there, as messages without a turn: the next
// turn reads them as they are.
async function stopped(id) {
  const turn = state.turns.get(id);
  if (turn.reply.trim() === "" && !turn.thought) {
    dismiss(id);
    update({ spoken: "Stopped. Nothing was said yet." });
    return;
  }
  alter(id, { status: "keeping" });
  try {
    await keep(turn, [...turn.messages, { role: "assistant", content: turn.reply }]);
    if (state.current === id) await open(id);
    drop(id);
    update({ spoken: "Stopped. What was said is kept." });
  } catch (error) {
    failed(id, error instanceof Failure ? error : new Failure(0));
  }
}

// Nothing is added where the turn was over when it was stopped.
async function keep(turn, messages) {
  const isNew = turn.metadata !== null && !state.sessions.has(turn.id);
  const turns = turn.fork ? turn.fork.turn : state.sessions.get(turn.id)?.turns;
  for (let tries = 1; ; tries += 1) {
    try {
      if (isNew) {
        await call("v1/sessions", { method: "POST", json: { id: turn.id, messages, metadata: turn.metadata } });
      } else if ((await getJson(path(turn.id))).turns === turns) {
        const items = messages.map(({ role, content }) => ({ type: "message", role, content }));
        await call(`v1/conversations/conv_${turn.id}/items`, { method: "POST", json: { items } });
      }
      return;
    } catch (error) {
      if (isNew && error.code === "session_exists") return;
      if (error.code !== "session_busy" || tries === KEEP_TRIES) throw error; // the turn is just about to end
      await new Promise((resume) => setTimeout(resume, 100 * tries));
    }
  }
}

// --- drafts --------------------------------------------------------------------------------------------------

const drafts = new Map(Object.entries(remembered("drafts", {})));

export const draftOf = (id) => drafts.get(id ?? "new") ?? "";

export function keepDraft(id, text) {
  const name = id ?? "new";
  if (text) drafts.set(name, text);
  else drafts.delete(name);
  remember("drafts", Object.fromEntries([...drafts].slice(-20)));
}

// A turn that runs when the page goes is not committed: its question is kept as a draft.
export function keepRunning() {
  for (const turn of state.turns.values()) {
    if (!turn.fork) keepDraft(state.sessions.has(turn.id) ? turn.id : null, turn.messages.at(-1).content);
  }
}

export const shownTitle = () => {
  const session = state.sessions.get(state.current);
  const turn = state.turns.get(state.current);
  if (session) return titleOf(session);
  if (turn?.fork) return titleOf(state.sessions.get(turn.fork.from));
  return turn?.metadata?.title ?? "New conversation";
};
