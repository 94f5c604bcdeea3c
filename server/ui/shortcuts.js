// The keys of the page: what they do, and the sheet that lists them.

import { html } from "./vendor/htm-3.1.1/standalone.module.js";
import { Dialog } from "./bits.js";
import { open } from "./sessions.js";
import { state, update } from "./store.js";
import { t } from "./words.js";

const close = () => update({ dialog: null });

const isMac = /Mac|iPhone|iPad/.test(navigator.platform);
const CONTROL = isMac ? "⌘" : t("Ctrl");

function find() {
  update({ drawer: !document.querySelector(".page .sidebar") });
  setTimeout(() => document.querySelector("[type=search]")?.focus());
}

function begin() {
  open(null);
  update({ write: state.write + 1 });
}

const show = (kind) => () => update({ dialog: { kind } });

// With Ctrl, or ⌘ on a Mac: by the key, and whether Shift is held too.
const DOES = [
  { key: "k", does: find, words: t("Find a conversation") },
  { key: "o", shift: true, does: begin, words: t("New conversation") },
  { key: ".", does: () => update({ panel: state.panel === "turns" ? null : "turns" }), words: t("Turns and branches") },
  { key: ",", does: show("settings"), words: t("Settings") },
  { key: "/", does: show("shortcuts"), words: t("This list") },
];

// Returns whether the key did something.
export function shortcut(event) {
  const held = isMac ? event.metaKey : event.ctrlKey;
  if (!held || event.altKey || state.dialog) return false;
  const found = DOES.find(({ key, shift = false }) => event.key.toLowerCase() === key && (event.shiftKey === shift || key === "/"));
  if (!found) return false;
  event.preventDefault();
  found.does();
  return true;
}

const FIXED = [
  [["Enter"], t("Send, also an edited message")],
  [[t("Shift"), "Enter"], t("New line")],
  [["Esc"], t("Stop the reply, or close what is open")],
  [["↑"], t("Edit your last message, from an empty field")],
];

const Keys = ({ keys }) => keys.map((key, at) => html`${at > 0 && " + "}<kbd>${key}</kbd>`);

export function Shortcuts() {
  const rows = [
    ...FIXED,
    ...DOES.map(({ key, shift, words }) => [[CONTROL, ...(shift ? [t("Shift")] : []), key.toUpperCase()], words]),
  ];
  return html`<${Dialog} title=${t("Keys")} onClose=${close}>
    <dl class="facts keys">${rows.map(([keys, words]) => html`<div><dt>${words}</dt><dd dir="ltr"><${Keys} keys=${keys} /></dd></div>`)}</dl>
    <p class="hint">${t("In the tree of turns the arrows move, Enter opens a turn's figures, and Esc returns.")}</p>
    <div class="dialog-foot"><button type="button" class="button primary" onClick=${close}>${t("Close")}</button></div>
  <//>`;
}
