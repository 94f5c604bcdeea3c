// The list of sessions, and the actions on them.

import { apiKey, call, getJson, randomId, url } from "./api.js";
import { familyOf } from "./family.js";
import { BESIDE, state, toast, update } from "./store.js";
import { plural, t } from "./words.js";

const PAGE = 60;
const PIN_SECONDS = 7 * 86_400; // the server's maximum

const path = (id, rest = "") => `v1/sessions/${encodeURIComponent(id)}${rest}`;

export const sessionPath = path;
export const titleOf = (session) => session?.title || session?.id || t("New conversation");

const LABEL = "label:"; // how the keys of labels begin, in the metadata
const PINNED = "pinned";

export const labelsOf = ({ metadata }) =>
  Object.keys(metadata)
    .filter((key) => key.startsWith(LABEL))
    .map((key) => key.slice(LABEL.length))
    .sort();

// An error as a sentence for the user.
export function said(error) {
  const words = {
    session_not_found: t("This conversation is no longer there."),
    session_deleted: t("This conversation was deleted meanwhile."),
    session_damaged:
      t("Parts of this conversation are damaged on the server's disk, so it cannot be read. It can only be deleted."),
    session_busy: t("This conversation is still busy with another turn."),
    context_length_exceeded:
      t("This conversation is too long for the model. Go on from an earlier turn, or begin a new one."),
    compaction_failed: t("The model wrote no summary of this conversation."),
    queue_full: t("The server is busy: too many requests are waiting."),
    engine_unavailable: t("The model is not ready."),
    engine_died: t("The model's process ended in the middle of this. Nothing that was saved is lost."),
    log_unavailable: t("The server cannot reach its session log right now."),
    insufficient_storage: t("The server's disk is full, so nothing new can be kept."),
    invalid_capsule: t("This file is not a conversation that was exported from this program, or it is damaged."),
    request_too_large: t("This is too large for the server."),
    too_many_transfers: t("Four exports and imports are running already."),
  };
  return words[error.code] ?? error.message;
}

export const report = (error) => error.name !== "AbortError" && toast(said(error));

// --- the list ------------------------------------------------------------------------------------------------

// Load the next sessions of the list, or with `fresh` the first ones: known sessions missing there were deleted.
// Changes of a session that the page made while it waited are newer than the answer.
export async function loadSessions(fresh = false) {
  const before = state.sessions;
  const query = new URLSearchParams({ limit: PAGE });
  if (!fresh && state.after) query.set("after", state.after);
  const page = await getJson(`v1/sessions?${query}`);
  const read = new Map(page.data.map((session) => [session.id, session]));
  if (fresh) await loadPinned(read);
  await addParents(read);
  const sessions = new Map(state.sessions);
  const isOld = (id) => state.sessions.get(id) === before.get(id);
  for (const [id, session] of read) if (isOld(id)) sessions.set(id, session);
  const oldest = page.has_more ? page.data.at(-1).last_used_at : -1;
  for (const [id, { last_used_at: used }] of before) {
    if (fresh && isOld(id) && !read.has(id) && used > oldest) sessions.delete(id);
  }
  update({ sessions, more: page.has_more, after: page.last_id, listed: true });
}

// Load the parents of forks, which may be further down the list.
async function addParents(read) {
  const there = (name) => read.has(name) || state.sessions.has(name) || gone.has(name);
  for (let round = 0; round < 20; round += 1) {
    const names = [...read.values()].map((session) => session.parent?.session_id);
    const missing = [...new Set(names)].filter((name) => name && !there(name));
    if (!missing.length) return;
    await Promise.all(
      missing.map(async (name) => {
        try {
          read.set(name, await getJson(path(name)));
        } catch (error) {
          if (error.status !== 404) throw error;
          gone.add(name);
        }
      }),
    );
  }
}

const gone = new Set(); // parents that were deleted

// The sessions as conversations, each a session with its forks: pinned ones first, then by last use.
export function conversations() {
  if (listed.sessions !== state.sessions || listed.removed !== state.removed) {
    listed = { sessions: state.sessions, removed: state.removed, groups: grouped() };
  }
  return listed.groups;
}

let listed = { groups: [] };

// The id of the oldest ancestor of a session that is known.
export function rootOf(session) {
  let root = session.id;
  const passed = new Set();
  for (let at = session; at?.parent && !passed.has(at.id); at = state.sessions.get(at.parent.session_id)) {
    passed.add(at.id);
    root = at.parent.session_id;
  }
  return root;
}

function grouped() {
  const groups = new Map();
  for (const session of state.sessions.values()) {
    if (state.removed.has(session.id)) continue;
    const root = rootOf(session);
    if (!groups.has(root)) groups.set(root, []);
    groups.get(root).push(session);
  }
  const before = new Map(listed.groups.map((group) => [group.latest.id, group]));
  const made = [...groups].map(([root, members]) => {
    members.sort((one, other) => other.last_used_at - one.last_used_at || other.created_at - one.created_at);
    const pinned = members.some((member) => PINNED in member.metadata);
    const kept = members.some((member) => (member.pinned_until ?? 0) * 1000 > Date.now());
    const named = members.find((member) => member.metadata.title) ?? members.find((member) => member.title);
    const group = { members, latest: members[0], pinned, kept, title: named?.title || root };
    const old = before.get(group.latest.id);
    return old && isSame(old, group) ? old : group; // it need not be drawn again
  });
  return made.sort((one, other) => other.pinned - one.pinned || other.latest.last_used_at - one.latest.last_used_at);
}

const isSame = (one, other) =>
  one.title === other.title &&
  one.kept === other.kept &&
  one.members.length === other.members.length &&
  one.members.every((member, at) => member === other.members[at]);

export const conversationOf = (id) => conversations().find(({ members }) => members.some((member) => member.id === id));

// --- one session ---------------------------------------------------------------------------------------------

let pickUp = async () => false;

// `told` is called with the id of a session that is to be shown. It returns whether a turn of it runs.
export function onShown(told) {
  pickUp = told;
}

// Show a session; `null` is a new one. Another branch of the open conversation is shown once it is loaded.
export async function open(id) {
  const hash = id === null ? "#/" : `#/${encodeURIComponent(id)}`;
  if ((location.hash || "#/") !== hash) history.pushState(null, "", hash);
  const same = id !== null && state.tree?.family.sessions.has(id);
  const isFirst = state.wanted === null && state.current === id; // a panel may have been opened while the page loaded
  update({ wanted: id, unread: null, drawer: false, selected: null, editing: null, ...(same ? {} : emptyOf(id)) });
  if (!isFirst && !matchMedia(BESIDE).matches) update({ panel: null });
  const turn = state.turns.get(id);
  if (id === null || isBeginning(turn)) {
    update({ ...emptyOf(id), messages: turn?.fork?.shown ?? [], opening: false }); // the server has nothing of it yet
    return;
  }
  update({ opening: true });
  try {
    const known = state.sessions.has(id);
    if (!known && (await pickUp(id)) && isBeginning(state.turns.get(id))) {
      if (state.wanted === id) update({ ...emptyOf(id), opening: false });
      return;
    }
    await Promise.all([show(id), known && pickUp(id)]);
  } catch (error) {
    if (state.wanted !== id) return;
    update({ opening: false });
    if (error.status !== 404) {
      update({ ...emptyOf(id), unread: { id, error } });
    } else if (!state.turns.has(id)) {
      await open(null);
      report(error);
    }
  }
}

// Whether a turn is the first of a session that is not in the list yet.
export const isBeginning = (turn) => Boolean(turn && (turn.metadata || turn.fork) && !state.sessions.has(turn.id));

const emptyOf = (id) => ({ current: id, messages: [], tree: null, shown: null });

// Read messages and tree.
async function show(id) {
  const later = state.current !== id && state.tree?.family.sessions.has(id); // the open branch is shown until then
  const [messages] = await Promise.all([getJson(path(id, "/messages")), later ? null : loadTree(id)]);
  if (state.wanted !== id) return;
  update({ current: id, messages: messages.data, opening: false, unread: null });
  if (later) await loadTree(id);
  update({ shown: lastTurnOf(id) });
}

const lastTurnOf = (id) => state.tree?.family.paths.get(id)?.at(-1)?.id ?? null;

// The page already shows the turn that it has just streamed. If other clients added turns, read the session again.
export async function settle(id, messages) {
  if (state.sessions.get(id).messages !== messages.length) return show(id);
  return update({ messages, shown: lastTurnOf(id) });
}

// Read the open session again: other clients may have continued or deleted it. Failures are ignored.
export async function follow() {
  const id = state.current;
  const isIdle = () => state.current === id && state.wanted === id && !state.opening && !state.turns.has(id);
  if (id === null || (state.turns.has(id) && !state.tree)) return;
  try {
    await loadTree(id);
    const { messages: count, running } = state.sessions.get(id);
    if (running && isIdle() && (await pickUp(id))) return;
    if (isIdle() && (state.unread || count !== state.messages.length || lastTurnOf(id) !== state.shown)) await show(id);
  } catch (error) {
    if (error.status === 404 && isIdle()) lose(id, error);
  }
}

// A session was deleted. Its messages stay on the screen, so that they can be copied.
export function lose(id, error) {
  const sessions = new Map(state.sessions);
  sessions.delete(id);
  update({ sessions, ...(state.current === id ? { unread: { id, error } } : {}) });
}

// Read the tree again, with costs and tiers. A tree that is too large still has the open session.
export async function loadTree(id = state.current) {
  let text = await (await call(path(id, "/tree"))).text();
  let tree = JSON.parse(text);
  if (!tree.data.some(({ session }) => session.id === id)) {
    const [session, turns] = await Promise.all([getJson(path(id)), getJson(path(id, "/turns"))]);
    tree = { ...tree, data: [...tree.data, { session, turns: turns.data }] };
    text = JSON.stringify(tree);
  }
  if (state.current === id && state.tree?.text === text) return;
  const sessions = new Map(state.sessions);
  for (const { session } of tree.data) sessions.set(session.id, session);
  update({ sessions });
  if (state.current === id) update({ tree: { ...tree, text, family: familyOf(tree, state.removed) } });
}

// All sessions of a conversation, also those further down the list.
export async function everyOf(members) {
  const { data } = await getJson(path(members[0].id, "/tree")).catch((error) => unlessGone(error) ?? { data: [] });
  const all = [...members, ...data.map(({ session }) => session)];
  return [...new Map(all.map((session) => [session.id, session])).values()];
}

// Change sessions, each by a request with `body` of it.
export async function changeOnly(sessions, body) {
  try {
    const changed = await Promise.all(
      sessions.map((session) => getJson(path(session.id), { method: "POST", json: body(session) })),
    );
    const all = new Map(state.sessions);
    for (const session of changed) all.set(session.id, session);
    update({ sessions: all });
  } catch (error) {
    report(error);
  }
}

export async function change(members, body) {
  try {
    await changeOnly(await everyOf(members), body);
  } catch (error) {
    report(error);
  }
}

export const rename = (members, title) => change(members, (session) => ({ metadata: { ...session.metadata, title } }));
export const keepCache = (members, on) => change(members, () => ({ pin_seconds: on ? PIN_SECONDS : 0 }));

export const pin = (members, on) =>
  change(members, ({ metadata: { [PINNED]: _, ...rest } }) => ({ metadata: on ? { ...rest, [PINNED]: "yes" } : rest }));

export const setLabels = (members, names) =>
  change(members, ({ metadata }) => {
    const rest = Object.entries(metadata).filter(([key]) => !key.startsWith(LABEL));
    return { metadata: Object.fromEntries([...rest, ...names.map((name) => [`${LABEL}${name}`, "yes"])]) };
  });

// The pinned conversations may be further down the list.
async function loadPinned(read) {
  const { data } = await getJson(`v1/sessions?${new URLSearchParams({ limit: 100, [`metadata[${PINNED}]`]: "yes" })}`);
  for (const session of data) read.set(session.id, session);
}

function hide(removed) {
  const { tree } = state;
  update({ removed, tree: tree && { ...tree, family: familyOf(tree, removed) } });
}

// Hide sessions now, and delete them when the time to undo is over.
export function remove(ids, text) {
  const removed = new Set([...state.removed, ...ids]);
  const opened = ids.includes(state.current) ? state.current : null;
  hide(removed);
  if (opened) {
    const rest = conversationOf(state.tree?.data.map(({ session }) => session.id).find((id) => !removed.has(id)));
    open(rest ? rest.latest.id : null);
  }
  const back = () => {
    hide(new Set([...state.removed].filter((id) => !ids.includes(id))));
    if (opened) open(opened);
  };
  toast(text, { action: t("Undo"), run: back, after: () => removeNow(ids) });
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
  hide(new Set([...state.removed].filter((id) => !ids.includes(id))));
}

function unlessGone(error) {
  if (error.status !== 404) throw error;
}

export async function rewind(id, turn) {
  try {
    await call(path(id, "/rewind"), { method: "POST", json: { turn } });
    await open(id);
    toast(t("Back at the end of turn {number}.", { number: turn }));
  } catch (error) {
    report(error);
  }
}

export async function fork(id, turn) {
  try {
    const made = await getJson(path(id, "/fork"), { method: "POST", json: { id: newId(), turn } });
    update({ sessions: new Map([...state.sessions, [made.id, made]]) });
    await open(made.id);
    toast(t("A new branch begins after turn {number}. It shares what came before.", { number: turn }));
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
      link.href = URL.createObjectURL(await (await call(from)).blob()); // a plain link could not send the key
    } else {
      await call(path(id)); // the browser's own download would fail silently
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
    const told = plural(turns, "Imported {n} turn", "Imported {n} turns");
    toast(kept ? `${told}${t(", with the cache.")}` : `${told}. ${t("The cache is computed when you go on.")}`);
  } catch (error) {
    report(error);
  }
}
