// The conversation: messages, the cost of each turn, and the input field.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { Icon, IconButton, copyText, memo, plural } from "./bits.js";
import { CostBar, summaryOf } from "./cost.js";
import { latestOf, variantsOf } from "./family.js";
import { Markdown } from "./markdown.js";
import { open, remove, said } from "./sessions.js";
import { state, update, useStore } from "./store.js";
import { branch, dismiss, draftOf, isGone, keepDraft, regenerate, retry, send, stop } from "./talk.js";

const CUTS = { length: "cut at the token limit", cancelled: "stopped" };
const EXAMPLES = ["My name is Walter.", "Add milk to my shopping list.", "What is my name?"];

// --- messages ------------------------------------------------------------------------------------------------

const Thought = ({ text, open: isOpen }) =>
  html`<details class="thought" open=${isOpen}>
    <summary>Reasoning</summary>
    <${Markdown} text=${text} />
  </details>`;

const Call = ({ call }) =>
  html`<details class="thought">
    <summary>Called ${call.function.name}</summary>
    <pre tabindex="0"><code>${call.function.arguments}</code></pre>
  </details>`;

function EditBox({ message, begun, frozen, close }) {
  const [text, setText] = useState(begun ?? message.content);
  const area = useRef(null);
  const ready = Boolean(text.trim()) && !frozen;
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
    <textarea ref=${area} aria-label="Edit your message" value=${text} rows="2"
      onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown}></textarea>
    <div class="edit-foot">
      <span>The old message stays, on its own branch.</span>
      <button type="button" class="button" onClick=${close}>Cancel</button>
      <button type="submit" class="button primary" disabled=${!ready}>Send</button>
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
  return html`<${IconButton} icon=${done ? "check" : "copy"} label=${done ? "Copied" : "Copy"} onClick=${copy} />`;
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
  const step = (icon, label, by) => html`<${IconButton} icon=${icon} label=${label}
    aria-disabled=${!all[at + by]} onClick=${() => go(label, by)} />`;
  return html`<span class="variants" role="group" aria-label="Branches here">
    ${step("left", "Previous branch", -1)}
    <span>${at + 1} of ${all.length}</span>
    ${step("right", "Next branch", 1)}
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
  return html`<article class="message user" aria-label="You" data-edit=${frozen ? null : message.index}>
    <div class="bubble"><${Markdown} text=${message.content} /></div>
    <div class="tools">
      <${CopyButton} text=${message.content} />
      ${!frozen && html`<${IconButton} icon="edit" label="Edit, as a branch" onClick=${edit} data-role="edit" />`}
    </div>
  </article>`;
});

const Reply = memo(({ message, node, family, frozen, waits }) => {
  const show = () => update({ panel: "turns", selected: node.id });
  return html`<article class="message assistant" aria-label="Reply" data-turn=${message.turn}>
    ${message.reasoning_content && html`<${Thought} text=${message.reasoning_content} />`}
    <${Markdown} text=${message.content} />
    ${(message.tool_calls ?? []).map((call) => html`<${Call} call=${call} />`)}
    <footer class="reply-foot">
      ${
        node &&
        html`<button type="button" class="receipt" onClick=${show} title="What this turn cost">
        <${CostBar} turn=${node.turn} /><span>${summaryOf(node.turn)}</span>
      </button>`
      }
      ${waits && html`<span class="hint">Kept. The next turn reads it.</span>`}
      ${CUTS[node?.turn.finish_reason] && html`<span class="hint">${CUTS[node.turn.finish_reason]}</span>`}
      <span class="reply-end">
        ${node && html`<${Variants} node=${node} family=${family} />`}
        <span class="tools">
          <${CopyButton} text=${message.content} />
          ${!frozen && html`<${IconButton} icon="again" label="Answer again, as a branch"
            onClick=${() => regenerate(message.index)} />`}
        </span>
      </span>
    </footer>
  </article>`;
});

const Other = memo(
  ({ message }) =>
    html`<details class="message other">
      <summary>${message.role === "tool" ? "Result of a tool" : "Instructions"}</summary>
      <div>${message.content}</div>
    </details>`,
);

// The turn that is running, or has failed.
function Running({ turn }) {
  const waiting = turn.status === "sending" || (turn.status === "streaming" && !turn.reply && !turn.thought);
  return html`
    ${turn.messages.map((message, index) =>
      message.role === "user"
        ? html`<${UserMessage} key=${index} message=${message} frozen=${true} />`
        : message.role === "assistant"
          ? html`<${Reply} key=${index} message=${message} frozen=${true} />`
          : html`<${Other} key=${index} message=${message} />`,
    )}
    <article class="message assistant" aria-label="Reply" aria-busy=${turn.status !== "failed"}>
      ${turn.thought && html`<${Thought} text=${turn.thought} open=${!turn.reply} />`}
      ${turn.reply && html`<${Markdown} text=${turn.reply} />`}
      ${waiting && html`<div class="waiting" role="img" aria-label="Waiting for the first word"><i></i><i></i><i></i></div>`}
      ${turn.status === "failed" && html`<${Trouble} turn=${turn} />`}
    </article>
  `;
}

function Trouble({ turn }) {
  const left = useSecondsUntil(turn.retryAt);
  return html`<div class="trouble">
    <p role="alert"><strong>${said(turn.error)}</strong></p>
    <p>
      ${turn.error.status === 0 ? "Your message is not lost: sending it again is safe, it runs once. " : ""}
      ${left > 0 ? `The server asks to come back in ${plural(left, "second")}.` : ""}
    </p>
    <div class="trouble-foot">
      ${!isGone(turn.error) && html`<button type="button" class="button primary" onClick=${() => retry(turn.id)}>Try again</button>`}
      <button type="button" class="button" onClick=${() => dismiss(turn.id)}>
        ${isGone(turn.error) ? "Ask in a new conversation" : "Edit the message"}
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
          ? html`<button type="button" class="button primary" onClick=${() => open(null)}>New conversation</button>`
          : html`<button type="button" class="button primary" onClick=${() => open(id)}>Try again</button>`
      }
      ${error.code === "session_damaged" && html`<button type="button" class="button"
        onClick=${() => remove([id], "Deleted.")}>Delete it</button>`}
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
    <h2>A conversation that stays</h2>
    <p>
      What the model has read is kept as this session's cache, through breaks and restarts. So a turn costs its new tokens, not
      its history, and each reply shows what it cost.
    </p>
    <div class="examples">
      ${EXAMPLES.map((text) => html`<button type="button" class="example" disabled=${!ready} onClick=${() => send(text)}>${text}</button>`)}
    </div>
  </section>`;

// --- the list of messages ------------------------------------------------------------------------------------

export function Messages() {
  const { messages, tree, current, turns, opening, unread, health, listed, editing } = useStore();
  const box = useRef(null);
  const atEnd = useRef(true);
  const [away, setAway] = useState(false);
  const turn = turns.get(current);
  const path = tree?.family.paths.get(current) ?? tree?.family.paths.get(turn?.fork?.from);
  const frozen = Boolean(turn || unread);
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
  useLayoutEffect(() => {
    if (atEnd.current) toEnd();
  });
  const isEmpty = messages.length === 0 && !turn && !opening && !unread;
  return html`<div class="scroll" ref=${box} onScroll=${onScroll} tabindex="-1">
    <div class="messages">
      ${isEmpty && html`<${Welcome} ready=${health === "ok" && listed} />`}
      ${opening && messages.length === 0 && html`<div class="waiting late" role="img" aria-label="Opening"><i></i><i></i><i></i></div>`}
      ${messages.map((message) => {
        const key = `${current} ${message.index}`;
        const begun = editing?.id === current && editing.index === message.index ? editing.text : null;
        if (message.role === "user")
          return html`<${UserMessage} key=${key} message=${message} frozen=${frozen} begun=${begun} />`;
        if (message.role !== "assistant") return html`<${Other} key=${key} message=${message} />`;
        const node = message.turn === null ? null : path?.[message.turn - 1];
        const waits = message.turn === null && message === messages.at(-1) && !message.tool_calls && !turn;
        return html`<${Reply} key=${key} message=${message} node=${node} family=${tree?.family} frozen=${frozen} waits=${waits} />`;
      })}
      ${unread && !turn && html`<${Unread} ...${unread} />`}
      ${turn && html`<${Running} key=${`turn ${turn.key}`} turn=${turn} />`}
    </div>
    ${away && html`<${IconButton} icon="down" label="To the end" class="icon-button to-end" onClick=${toEnd} />`}
  </div>`;
}

// --- the input field -----------------------------------------------------------------------------------------

// Whether there is a keyboard that can type a line break. Touch keyboards have only Enter.
const hasKeys = () => matchMedia("(hover: hover)").matches;

export function Composer() {
  const { current, turns, health, opening, unread, write, drafts } = useStore();
  const [text, setText] = useState(() => draftOf(current));
  const area = useRef(null);
  const turn = turns.get(current);
  const runs = turn && turn.status !== "failed";
  // Nothing can be sent while a turn runs, the server is down, or the conversation is not shown.
  const ready = !turn && health === "ok" && !unread && !(opening && current !== null);
  useLayoutEffect(() => setText(draftOf(current)), [current, Boolean(turn), drafts]);
  useEffect(() => {
    if (hasKeys()) area.current.focus({ preventScroll: true });
  }, [write]);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight, 240)}px`;
  }, [text]);
  const submit = (event) => {
    event?.preventDefault();
    if (!text.trim() || !ready) return;
    keepDraft(current, "");
    setText("");
    send(text.trim());
  };
  const onInput = (event) => {
    setText(event.target.value);
    keepDraft(current, event.target.value);
  };
  const onKeyDown = (event) => {
    const wanted = hasKeys() ? !event.shiftKey : event.ctrlKey || event.metaKey;
    const composes = event.isComposing || event.keyCode === 229; // how Safari reports composition
    if (event.key === "Enter" && wanted && !composes) submit(event);
    if (event.key === "ArrowUp" && text === "" && !turn) {
      event.preventDefault();
      [...document.querySelectorAll("[data-role=edit]")].at(-1)?.click();
    }
  };
  return html`<form class="composer" onSubmit=${submit}>
    <div class="composer-box">
      <textarea
        id="composer"
        ref=${area}
        rows="1"
        aria-label="Message"
        aria-describedby="composer-hint"
        placeholder=${state.messages.length ? "Reply" : "Say something"}
        value=${text}
        onInput=${onInput}
        onKeyDown=${onKeyDown}
      ></textarea>
      ${
        runs
          ? html`<button type="button" class="send" aria-label="Stop" title="Stop (Esc)"
            onClick=${() => stop()}><${Icon} name="stop" /></button>`
          : html`<button type="submit" class="send" aria-label="Send" title="Send (Enter)" disabled=${!text.trim() || !ready}>
            <${Icon} name="send" />
          </button>`
      }
    </div>
    <p id="composer-hint" class="hint composer-hint">Enter sends, Shift+Enter begins a line. Up edits your last message, Esc stops.</p>
  </form>`;
}
