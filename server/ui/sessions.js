// The list of sessions, and what can be done with them.

import { Failure, apiKey, call, getJson, randomId, url } from "./api.js";
import { plural } from "./bits.js";
import { familyOf } from "./family.js";
import { state, toast, update } from "./store.js";

const PAGE = 60;
const PIN_SECONDS = 7 * 86_400; // the longest that there is
const TITLE = 60; // characters

const path = (id, rest = "") => `v1/sessions/${encodeURIComponent(id)}${rest}`;

export const sessionPath = path;
export const titleOf = (session) => session?.metadata.title || session?.id || "New conversation";

export function titleFor(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  if (line.length <= TITLE) return line;
  return `${line.slice(0, TITLE).replace(/\s+\S*$/, "")}…`;
}

// What went wrong, as people say it.
export function said(error) {
  const words = {
    session_not_found: "This conversation is no longer there.",
    session_deleted: "This conversation was deleted meanwhile.",
    session_damaged:
      "Parts of this conversation are damaged on the server's disk, so it cannot be read. It can only be deleted.",
    session_busy: "This conversation is still busy with another turn.",
    context_length_exceeded:
      "This conversation is too long for the model. Go on from an earlier turn, or begin a new one.",
    queue_full: "The server is busy: too many requests are waiting.",
    engine_unavailable: "The model is not ready.",
    engine_died: "The model's process ended in the middle of this. Nothing that was saved is lost.",
    log_unavailable: "The server cannot reach its session log right now.",
    insufficient_storage: "The server's disk is full, so nothing new can be kept.",
    invalid_capsule: "This file is not a conversation that was exported from this program, or it is damaged.",
    request_too_large: "This is too large for the server.",
    too_many_transfers: "Four exports and imports are running already.",
  };
  return words[error.code] ?? error.message;
}

export const report = (error) => error.name !== "AbortError" && toast(said(error));

// --- the list ------------------------------------------------------------------------------------------------

export async function loadModel() {
  const models = await getJson("v1/models");
  update({ model: models.data[0] });
}

// The next sessions of the list, or with `fresh` the first ones.
export async function loadSessions(fresh = false) {
  const query = new URLSearchParams({ limit: PAGE });
  if (!fresh && state.after) query.set("after", state.after);
  const page = await getJson(`v1/sessions?${query}`);
  const sessions = fresh ? new Map() : new Map(state.sessions);
  for (const session of page.data) sessions.set(session.id, session);
  await addParents(sessions);
  update({ sessions, more: page.has_more, after: page.last_id, listed: true });
}

// Forks belong to what they come from, which may stand further down the list.
async function addParents(sessions) {
  for (let round = 0; round < 20; round += 1) {
    const names = [...sessions.values()].map((session) => session.parent?.session_id);
    const missing = [...new Set(names)].filter((name) => name && !sessions.has(name) && !gone.has(name));
    if (!missing.length) return;
    await Promise.all(
      missing.map(async (name) => {
        try {
          sessions.set(name, await getJson(path(name)));
        } catch (error) {
          if (!(error instanceof Failure)) throw error;
          gone.add(name);
        }
      }),
    );
  }
}

const gone = new Set(); // parents that are no more

// The sessions as conversations: a session with its forks is one. Pinned ones first, then the one used last.
export function conversations() {
  if (listed.sessions !== state.sessions || listed.removed !== state.removed) {
    listed = { sessions: state.sessions, removed: state.removed, groups: grouped() };
  }
  return listed.groups;
}

let listed = { groups: [] };

function grouped() {
  const groups = new Map();
  for (const session of state.sessions.values()) {
    if (state.removed.has(session.id)) continue;
    let root = session.id;
    const passed = new Set();
    for (let at = session; at?.parent && !passed.has(at.id); at = state.sessions.get(at.parent.session_id)) {
      passed.add(at.id);
      root = at.parent.session_id;
    }
    groups.set(root, [...(groups.get(root) ?? []), session]);
  }
  const made = [...groups].map(([root, members]) => {
    members.sort((one, other) => other.last_used_at - one.last_used_at || other.created_at - one.created_at);
    const pinned = members.some((member) => (member.pinned_until ?? 0) * 1000 > Date.now());
    return { members, latest: members[0], pinned, title: members[0].metadata.title || root };
  });
  return made.sort((one, other) => other.pinned - one.pinned || other.latest.last_used_at - one.latest.last_used_at);
}

export const conversationOf = (id) => conversations().find(({ members }) => members.some((member) => member.id === id));

// --- one session ---------------------------------------------------------------------------------------------

// Show a session; `null` is a new one. Another branch of what is open takes its place when it is here.
export async function open(id) {
  const hash = id === null ? "#/" : `#/${encodeURIComponent(id)}`;
  if (location.hash !== hash) history.pushState(null, "", hash);
  const nothing = { current: id, messages: [], tree: null };
  const same = id !== null && state.tree?.family.sessions.has(id);
  update({ wanted: id, opening: id !== null, unread: null, drawer: false, selected: null, ...(same ? {} : nothing) });
  if (id === null) return;
  try {
    const [messages] = await Promise.all([getJson(path(id, "/messages")), same ? null : loadTree(id)]);
    if (state.wanted !== id) return;
    update({ current: id, messages: messages.data, opening: false });
    if (same) await loadTree(id);
  } catch (error) {
    if (state.wanted !== id) return;
    if (error.status !== 404) {
      update({ ...nothing, opening: false, unread: { id, error } });
    } else if (!state.turns.has(id)) {
      await open(null);
      report(error);
    }
  }
}

// Read the tree again: what turns cost, and where their KV is now.
export async function loadTree(id = state.current) {
  const text = await (await call(path(id, "/tree"))).text();
  if (state.current === id && state.tree?.text === text) return;
  const tree = JSON.parse(text);
  const sessions = new Map(state.sessions);
  for (const { session } of tree.data) sessions.set(session.id, session);
  update({ sessions });
  if (state.current === id) update({ tree: { ...tree, text, family: familyOf(tree) } });
}

export async function change(members, body) {
  try {
    const changed = await Promise.all(
      members.map((session) => getJson(path(session.id), { method: "POST", json: body(session) })),
    );
    const sessions = new Map(state.sessions);
    for (const session of changed) sessions.set(session.id, session);
    update({ sessions });
  } catch (error) {
    report(error);
  }
}

export const rename = (members, title) => change(members, (session) => ({ metadata: { ...session.metadata, title } }));
export const pin = (members, on) => change(members, () => ({ pin_seconds: on ? PIN_SECONDS : 0 }));

// Hide sessions now, and delete them when the chance to undo is over.
export function remove(ids, text) {
  const removed = new Set([...state.removed, ...ids]);
  update({ removed });
  if (ids.includes(state.current)) {
    const rest = conversationOf(state.tree?.data.map(({ session }) => session.id).find((id) => !removed.has(id)));
    open(rest ? rest.latest.id : null);
  }
  const back = () => {
    update({ removed: new Set([...state.removed].filter((id) => !ids.includes(id))) });
    open(ids[0]);
  };
  toast(text, { action: "Undo", run: back, after: () => removeNow(ids) });
}

async function removeNow(ids) {
  try {
    await Promise.all(ids.map((id) => call(path(id), { method: "DELETE", keepalive: true }).catch(unlessGone)));
    const sessions = new Map(state.sessions);
    for (const id of ids) sessions.delete(id);
    update({ sessions });
    if (state.current !== null && state.tree?.data.some(({ session }) => ids.includes(session.id))) await loadTree();
  } catch (error) {
    report(error);
  }
  update({ removed: new Set([...state.removed].filter((id) => !ids.includes(id))) });
}

function unlessGone(error) {
  if (error.status !== 404) throw error;
}

export async function rewind(id, turn) {
  try {
    await call(path(id, "/rewind"), { method: "POST", json: { turn } });
    await open(id);
    toast(turn ? `Back at the end of turn ${turn}.` : "Back at the beginning.");
  } catch (error) {
    report(error);
  }
}

export async function fork(id, turn) {
  try {
    const made = await getJson(path(id, "/fork"), { method: "POST", json: { id: newId(), turn } });
    update({ sessions: new Map([...state.sessions, [made.id, made]]) });
    await open(made.id);
    toast(`A new branch begins behind turn ${turn}. It shares what came before.`);
    return made.id;
  } catch (error) {
    report(error);
    return null;
  }
}

export const newId = () => `chat-${randomId(12)}`;

// --- capsules ------------------------------------------------------------------------------------------------

export async function exportSession(id, kv) {
  const from = `${path(id, "/export")}${kv ? "" : "?kv=false"}`;
  const link = document.createElement("a");
  link.download = `${id}.zip`;
  try {
    if (apiKey.get()) {
      link.href = URL.createObjectURL(await (await call(from)).blob()); // a link of its own could carry no key
    } else {
      link.href = url(from);
    }
    link.click();
    if (link.href.startsWith("blob:")) setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  } catch (error) {
    report(error);
  }
}

export async function importFile(file) {
  const send = (query) =>
    getJson(`v1/sessions/import${query}`, {
      method: "POST",
      body: file,
      headers: { "content-type": "application/zip" },
    });
  try {
    let made;
    try {
      made = await send("");
    } catch (error) {
      if (error.code !== "session_exists") throw error;
      made = await send(`?id=${newId()}`);
    }
    update({ sessions: new Map([...state.sessions, [made.id, made]]) });
    await open(made.id);
    const { turns, kv_tokens: kept } = made.imported;
    const told = `Imported ${plural(turns, "turn")}`;
    toast(kept ? `${told}, with the cache.` : `${told}. The cache is computed when you go on.`);
  } catch (error) {
    report(error);
  }
}
