// The ways on where the context of a conversation is full.

import { html, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { getJson } from "./api.js";
import { count } from "./bits.js";
import { draftOf, keepDraft } from "./drafts.js";
import { roomNow } from "./gauge.js";
import { modelNow } from "./models.js";
import { changeOnly, fork, newId, open, report } from "./sessions.js";
import { settingsOf, withSettings } from "./settings.js";
import { state, toast, update, useStore } from "./store.js";
import { t } from "./words.js";

const HALF = 0.5; // of the context: up to there a fork keeps turns
const LONGEST = 4096; // tokens of a summary

// The last turn that leaves half of the context free; null if there is none.
function turnBefore({ whole }) {
  const path = state.tree?.family.paths.get(state.current) ?? [];
  const node = path.findLast(({ turn }) => turn.prompt_tokens + turn.completion_tokens < HALF * whole);
  return node && node !== path.at(-1) ? node.turn : null;
}

// Another model with a longer context.
const longer = ({ whole }) =>
  state.models.find(({ warmturn }) => (warmturn?.max_context ?? 0) > whole);

// Go on elsewhere, with what was written and not sent.
function carry(from, to) {
  keepDraft(to, draftOf(from));
  keepDraft(from, "");
  update({ drafts: state.drafts + 1 });
}

// Begin a conversation with a summary of the open one and its last exchange.
async function compact() {
  const id = state.current;
  const said = state.messages.filter(({ role, content }) => (role === "user" || role === "assistant") && content);
  const last = said.findLastIndex(({ role }) => role === "user");
  const old = last > 0 ? said.slice(0, last) : said;
  const instructions = state.messages.filter(({ role }) => role === "system" || role === "developer");
  const plain = ({ role, content }) => ({ role, content });
  const { content } = await getJson("v1/messages", {
    method: "POST",
    json: {
      model: modelNow().id,
      max_tokens: LONGEST,
      messages: old.map(plain),
      ...(instructions.length ? { system: instructions.map((one) => one.content).join("\n\n") } : {}),
      context_management: {
        edits: [{ type: "compact_20260112", trigger: { type: "input_tokens", value: 0 }, pause_after_compaction: true }],
      },
    },
  });
  const summary = [
    { role: "user", content: t("What has been said so far?") },
    { role: "assistant", content: content[0].content },
  ];
  const { metadata, title } = state.sessions.get(id);
  const made = await getJson("v1/sessions", {
    method: "POST",
    json: {
      id: newId(),
      metadata: { ...metadata, title },
      messages: [...instructions.map(plain), ...summary, ...said.slice(old.length).map(plain)],
    },
  });
  update({ sessions: new Map([...state.sessions, [made.id, made]]) });
  carry(id, made.id);
  await open(made.id);
  toast(t("It goes on from a summary. The whole conversation stays in the list."));
}

export function Ways({ before = () => {} }) {
  useStore();
  const [works, setWorks] = useState(false);
  const room = roomNow();
  if (!room) return null;
  const turn = turnBefore(room);
  const other = longer(room);
  const own = modelNow().warmturn.own_context;
  const go = (work) => async () => {
    before();
    setWorks(true);
    try {
      await work();
    } catch (error) {
      report(error);
    }
    setWorks(false);
  };
  const forkIt = async () => {
    const from = state.current;
    const made = await fork(from, turn.number);
    if (made) carry(from, made);
  };
  const switchModel = async () => {
    const session = state.sessions.get(state.current);
    const settings = { ...settingsOf(session), model: other.id };
    await changeOnly([session], ({ metadata }) => ({ metadata: withSettings(metadata, settings) ?? metadata }));
  };
  const anew = async () => {
    const from = state.current;
    carry(from, null);
    await open(null);
  };
  const about = { used: count(room.used), whole: count(room.whole) };
  return html`<section class="ways" aria-label=${t("Ways on")}>
    <p>${t("This conversation has {used} of the {whole} tokens that the model can read.", about)}
      ${own > room.whole && ` ${t("The model itself can read {own}; whoever runs the server can allow it (--max-context).", { own: count(own) })}`}</p>
    <div class="ways-foot">
      ${turn && html`<button type="button" class="button" disabled=${works} onClick=${go(forkIt)}>${t("Go on from turn {number}", { number: turn.number })}</button>`}
      <button type="button" class="button" disabled=${works} onClick=${go(compact)}>${works ? t("Summarising…") : t("Go on from a summary")}</button>
      ${other && html`<button type="button" class="button" disabled=${works} onClick=${go(switchModel)}>${t("Go on with {name}", { name: other.id })}</button>`}
      <button type="button" class="button" disabled=${works} onClick=${go(anew)}>${t("New conversation")}</button>
    </div>
  </section>`;
}
