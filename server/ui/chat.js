// The conversation: messages, and the cost of each turn.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { IconButton, Waiting, copyText, hasKeys, memo } from "./bits.js";
import { CostBar, speedOf, summaryOf } from "./cost.js";
import { latestOf, variantsOf } from "./family.js";
import { Markdown } from "./markdown.js";
import { Stretch, useWatcher } from "./near.js";
import { Pictures } from "./pictures.js";
import { open, remove, said } from "./sessions.js";
import { state, update, useGrowth, useStore } from "./store.js";
import { branch, dismiss, isGone, regenerate, retry, send } from "./talk.js";
import { Ways } from "./ways.js";
import { language, plural, t } from "./words.js";

const CUTS = { length: t("cut at the token limit"), cancelled: t("stopped") };
const LENGTH = 6; // messages that are drawn together
const EXAMPLES = [t("My name is Walter."), t("Add milk to my shopping list."), t("What is my name?")];

// --- messages ------------------------------------------------------------------------------------------------

const Thought = ({ text, open: isOpen }) =>
  html`<details class="thought" open=${isOpen}>
    <summary>${t("Reasoning")}</summary>
    <${Markdown} text=${text} />
  </details>`;

const Call = ({ call }) =>
  html`<details class="thought">
    <summary>${t("Called {name}", { name: call.function.name })}</summary>
    <pre tabindex="0"><code>${call.function.arguments}</code></pre>
  </details>`;

function EditBox({ message, begun, frozen, close }) {
  const [text, setText] = useState(begun ?? message.content);
  const area = useRef(null);
  const ready = Boolean(text.trim() || message.media?.length) && !frozen;
  useLayoutEffect(() => { // before the user can type
    area.current.focus();
    area.current.setSelectionRange(text.length, text.length);
  }, []);
  const submit = (event) => {
    event?.preventDefault();
    close();
    branch(message.index, text.trim());
  };
  const onKeyDown = (event) => {
    if (event.key === "Escape" && !event.isComposing) {
      event.stopPropagation();
      close();
    }
    const wanted = hasKeys() ? !event.shiftKey : event.ctrlKey || event.metaKey;
    const composes = event.isComposing || event.keyCode === 229; // how Safari reports composition
    if (event.key === "Enter" && wanted && !composes && ready) submit(event);
  };
  return html`<form class="edit-box" onSubmit=${submit}>
    <${Pictures} media=${message.media} />
    <textarea ref=${area} dir="auto" aria-label=${t("Edit your message")} value=${text} rows="2"
      onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown}></textarea>
    <div class="edit-foot">
      <span>${t("The old message stays, on its own branch.")}</span>
      <button type="button" class="button" onClick=${close}>${t("Cancel")}</button>
      <button type="submit" class="button primary" disabled=${!ready}>${t("Send")}</button>
    </div>
  </form>`;
}

function CopyButton({ text }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await copyText(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<${IconButton} icon=${done ? "check" : "copy"} label=${done ? t("Copied") : t("Copy")} onClick=${copy} />`;
}

// The siblings of a turn: other messages at the same place, and other replies to the same message.
function Variants({ node, family }) {
  const all = variantsOf(node);
  if (all.length < 2) return null;
  const at = all.indexOf(node);
  const go = async (label, step) => {
    if (!all[at + step]) return;
    await open(latestOf(family, all[at + step]));
    const same = `[data-turn="${node.turn.number}"] .variants [aria-label="${label}"]`;
    setTimeout(() => document.querySelector(same)?.focus()); // the button was rendered anew
  };
  const compare = () =>
    update({ dialog: { kind: "compare", left: state.current, right: latestOf(family, all[at ? at - 1 : 1]) } });
  const step = (icon, label, by) => html`<${IconButton} icon=${icon} label=${label}
    aria-disabled=${!all[at + by]} onClick=${() => go(label, by)} />`;
  return html`<span class="variants" role="group" aria-label=${t("Branches here")}>
    ${step("left", t("Previous branch"), -1)}
    <span>${t("{n} of {all}", { n: at + 1, all: all.length })}</span>
    ${step("right", t("Next branch"), 1)}
    <button type="button" class="button quiet" onClick=${compare}>${t("Compare")}</button>
  </span>`;
}

// `begun` is text of an edit that could not be sent.
const UserMessage = memo(({ message, frozen, begun }) => {
  const [editing, setEditing] = useState(false);
  const close = () => {
    setEditing(false);
    if (begun) update({ editing: null });
  };
  if (editing || begun)
    return html`<${EditBox} message=${message} begun=${begun} frozen=${frozen} close=${close} />`;
  const edit = () => setEditing(true);
  return html`<article class="message user" aria-label=${t("You")} data-message=${message.index} data-edit=${frozen ? null : message.index}>
    <div class="bubble"><${Pictures} media=${message.media} /><${Markdown} text=${message.content} /></div>
    <div class="tools">
      <${CopyButton} text=${message.content} />
      ${!frozen && html`<${IconButton} icon="edit" label=${t("Edit, as a branch")} onClick=${edit} data-role="edit" />`}
    </div>
  </article>`;
});

// The time of a reply: of today's the clock, of others the day too.
function When({ seconds }) {
  const at = new Date(seconds * 1000);
  const isToday = at.toDateString() === new Date().toDateString();
  const how = { hour: "numeric", minute: "2-digit", ...(isToday ? {} : { day: "numeric", month: "short" }) };
  return html`<time class="hint" datetime=${at.toISOString()} title=${at.toLocaleString(language)}>${at.toLocaleString(language, how)}</time>`;
}

const Reply = memo(({ message, node, family, frozen, waits }) => {
  const show = () => update({ panel: "turns", selected: node.id });
  return html`<article class="message assistant" aria-label=${t("Reply")} data-message=${message.index} data-turn=${message.turn}>
    ${message.reasoning_content && html`<${Thought} text=${message.reasoning_content} />`}
    <${Markdown} text=${message.content} />
    ${(message.tool_calls ?? []).map((call) => html`<${Call} call=${call} />`)}
    <footer class="reply-foot">
      ${
        node &&
        html`<button type="button" class="receipt" onClick=${show} title=${t("What this turn cost")}>
        <${CostBar} turn=${node.turn} /><span>${[summaryOf(node.turn), speedOf(node.turn)].filter(Boolean).join(" · ")}</span>
      </button>`
      }
      ${waits && html`<span class="hint">${t("Kept. The model reads it with your next message.")}</span>`}
      ${node && html`<${When} seconds=${node.turn.created_at} />`}
      ${CUTS[node?.turn.finish_reason] && html`<span class="hint">${CUTS[node.turn.finish_reason]}</span>`}
      <span class="reply-end">
        ${node && html`<${Variants} node=${node} family=${family} />`}
        <span class="tools">
          <${CopyButton} text=${message.content} />
          ${!frozen && node && html`<${IconButton} icon="tokens" label=${t("What it could have said")}
            onClick=${() => update({ dialog: { kind: "tokens", id: state.current, turn: node.turn.number, index: message.index } })} />
          <${IconButton} icon="compare" label=${t("Compare with another reply")}
            onClick=${() => update({ dialog: { kind: "compare", left: state.current, index: message.index } })} />`}
          ${!frozen && html`<${IconButton} icon="again" label=${t("Answer again, as a branch")}
            onClick=${() => regenerate(message.index)} />`}
        </span>
      </span>
    </footer>
  </article>`;
});

const Other = memo(
  ({ message }) =>
    html`<details class="message other">
      <summary>${message.role === "tool" ? t("Result of a tool") : t("Instructions")}</summary>
      <div>${message.content}<${Pictures} media=${message.media} /></div>
    </details>`,
);

// The text of a running turn. `follow` is called when there is more.
function Growing({ turn, follow }) {
  useGrowth();
  useLayoutEffect(follow);
  const waiting = turn.status === "sending" || (turn.status === "streaming" && !turn.reply && !turn.thought);
  return html`
    ${turn.thought && html`<${Thought} text=${turn.thought} open=${!turn.reply} />`}
    ${turn.reply && html`<${Markdown} text=${turn.reply} />`}
    ${waiting && html`<${Waiting} label=${t("Waiting for the first word")} />`}
  `;
}

// The turn that is running, or has failed.
function Running({ turn, follow }) {
  return html`
    ${turn.messages.map((message, index) =>
      message.role === "user"
        ? html`<${UserMessage} key=${index} message=${message} frozen=${true} />`
        : message.role === "assistant"
          ? html`<${Reply} key=${index} message=${message} frozen=${true} />`
          : html`<${Other} key=${index} message=${message} />`,
    )}
    <article class="message assistant" aria-label=${t("Reply")} aria-busy=${turn.status !== "failed"}>
      <${Growing} turn=${turn} follow=${follow} />
      ${turn.status === "failed" && html`<${Trouble} turn=${turn} />`}
    </article>
  `;
}

// Whether the same turn can only fail again.
const isFinal = (error) => isGone(error) || error.code === "context_length_exceeded";

function Trouble({ turn }) {
  const left = useSecondsUntil(turn.retryAt);
  return html`<div class="trouble">
    <p role="alert"><strong>${said(turn.error)}</strong></p>
    <p>
      ${turn.error.status === 0 ? t("Your message is not lost: sending it again is safe, it runs once.") : ""}
      ${left > 0 ? plural(left, "The server asks to come back in {n} second.", "The server asks to come back in {n} seconds.") : ""}
    </p>
    ${turn.error.code === "context_length_exceeded" && html`<${Ways} before=${() => dismiss(turn.id)} />`}
    <div class="trouble-foot">
      ${!isFinal(turn.error) && html`<button type="button" class="button primary" onClick=${() => retry(turn.id)}>${t("Try again")}</button>`}
      <button type="button" class="button" onClick=${() => dismiss(turn.id)}>
        ${isGone(turn.error) ? t("Ask in a new conversation") : t("Edit the message")}
      </button>
    </div>
  </div>`;
}

// A session that cannot be shown, or was deleted.
function Unread({ id, error }) {
  return html`<div class="trouble">
    <p role="alert"><strong>${said(error)}</strong></p>
    <div class="trouble-foot">
      ${
        isGone(error)
          ? html`<button type="button" class="button primary" onClick=${() => open(null)}>${t("New conversation")}</button>`
          : html`<button type="button" class="button primary" onClick=${() => open(id)}>${t("Try again")}</button>`
      }
      ${error.code === "session_damaged" && html`<button type="button" class="button"
        onClick=${() => remove([id], t("Deleted."))}>${t("Delete it")}</button>`}
    </div>
  </div>`;
}

function useSecondsUntil(moment) {
  const left = () => (moment === null ? 0 : Math.max(0, Math.ceil((moment - Date.now()) / 1000)));
  const [seconds, setSeconds] = useState(left);
  useEffect(() => {
    setSeconds(left());
    const timer = setInterval(() => setSeconds(left()), 250);
    return () => clearInterval(timer);
  }, [moment]);
  return seconds;
}

const Welcome = ({ ready }) =>
  html`<section class="welcome">
    <h2>${t("A conversation that stays")}</h2>
    <p>${t("What the model has read is kept as this conversation's cache, through breaks and restarts. So a turn costs its new tokens, not its history, and each reply shows what it cost.")}</p>
    <div class="examples">
      ${EXAMPLES.map((text) => html`<button type="button" class="example" disabled=${!ready} onClick=${() => send(text)}>${text}</button>`)}
    </div>
  </section>`;

// Scroll to a message, and again in the next frames: what is drawn around it gets its size.
function showFor(frames, place) {
  place.scrollIntoView({ block: "center" });
  if (frames > 1) requestAnimationFrame(() => showFor(frames - 1, place));
}

// --- the list of messages ------------------------------------------------------------------------------------

export function Messages() {
  const { messages, tree, current, turns, opening, unread, health, listed, editing, target } = useStore();
  const box = useRef(null);
  const atEnd = useRef(true);
  const [away, setAway] = useState(false);
  const turn = turns.get(current);
  const path = tree?.family.paths.get(current) ?? tree?.family.paths.get(turn?.fork?.from);
  const frozen = Boolean(turn || unread);
  const watcher = useWatcher(box);
  const wanted = target?.id === current ? target.message : null;
  const draw = (message) => {
    const key = message.index;
    const begun = editing?.id === current && editing.index === message.index ? editing.text : null;
    if (message.role === "user")
      return html`<${UserMessage} key=${key} message=${message} frozen=${frozen} begun=${begun} />`;
    if (message.role !== "assistant") return html`<${Other} key=${key} message=${message} />`;
    const node = message.turn === null ? null : path?.[message.turn - 1];
    const waits = message.turn === null && message === messages.at(-1) && !message.tool_calls && !turn;
    return html`<${Reply} key=${key} message=${message} node=${node} family=${tree?.family} frozen=${frozen} waits=${waits} />`;
  };
  const stretches = Array.from({ length: Math.ceil(messages.length / LENGTH) }, (_, at) => {
    const some = messages.slice(at * LENGTH, (at + 1) * LENGTH);
    const begins = messages.length - some.at(-1).index <= 2 * LENGTH || some.some(({ index }) => index === wanted || index === editing?.index);
    return html`<${Stretch} key=${`${current} ${at}`} watcher=${watcher} messages=${some} draw=${draw} begins=${begins} />`;
  });
  const onScroll = () => {
    const { scrollHeight, scrollTop, clientHeight } = box.current;
    atEnd.current = scrollHeight - scrollTop - clientHeight < 60;
    setAway(!atEnd.current);
  };
  const toEnd = () => {
    box.current.scrollTop = box.current.scrollHeight;
  };
  useLayoutEffect(() => {
    atEnd.current = true;
    toEnd();
  }, [current, messages.length, turn?.status === "sending"]);
  const follow = () => {
    if (atEnd.current) toEnd();
  };
  useLayoutEffect(follow);
  useEffect(() => { // what was near the end is drawn, and has another size
    const sizes = new ResizeObserver(follow);
    sizes.observe(box.current.firstElementChild);
    return () => sizes.disconnect();
  }, []);
  useLayoutEffect(() => { // the message that a search has found
    if (target?.id !== current || target.message >= messages.length) return;
    const place = box.current.querySelector(`[data-message="${target.message}"]`);
    atEnd.current = false;
    if (place) showFor(3, place);
    place?.classList.add("found");
    update({ target: null });
  }, [target, current, messages]);
  const isEmpty = messages.length === 0 && !turn && !opening && !unread;
  return html`<div class="scroll" ref=${box} onScroll=${onScroll} tabindex="-1">
    <div class="messages">
      ${isEmpty && html`<${Welcome} ready=${health === "ok" && listed} />`}
      ${opening && messages.length === 0 && html`<${Waiting} label=${t("Opening")} late=${true} />`}
      ${stretches}
      ${unread && !turn && html`<${Unread} ...${unread} />`}
      ${turn && html`<${Running} key=${`turn ${turn.key}`} turn=${turn} follow=${follow} />`}
    </div>
    ${away && html`<${IconButton} icon="down" label=${t("To the end")} class="icon-button to-end" onClick=${toEnd} />`}
  </div>`;
}
