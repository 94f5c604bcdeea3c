// The page: its three parts, the keyboard, and what happens when the server comes and goes.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { onKeyNeeded, onLost, url } from "./api.js";
import { IconButton } from "./bits.js";
import { Composer, Messages } from "./chat.js";
import { Dialogs, askForKey, hasDialog } from "./dialogs.js";
import { Live } from "./live.js";
import { conversationOf, loadModel, loadSessions, loadTree, open, report } from "./sessions.js";
import { Sidebar, applyTheme } from "./sidebar.js";
import { remember, remembered, state, update, useStore } from "./store.js";
import { keepRunning, shownTitle, stop } from "./talk.js";
import { Tree } from "./tree.js";

const BESIDE = "(min-width: 1160px)"; // where the panel stands beside the chat
const PANELS = { turns: "Turns and branches", live: "The server now" };
const LIST = "(min-width: 820px)"; // and the list
const BANNERS = {
  loading: "The model is loading. This page goes on by itself.",
  down: "The server does not answer. Everything is kept; this page goes on by itself.",
};
const LOOK = 2000; // milliseconds, while the server does not answer

function useMedia(query) {
  const [matches, setMatches] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const media = matchMedia(query);
    const changed = () => setMatches(media.matches);
    media.addEventListener("change", changed);
    return () => media.removeEventListener("change", changed);
  }, [query]);
  return matches;
}

function App() {
  const { drawer, panel } = useStore();
  const beside = useMedia(BESIDE);
  const list = useMedia(LIST);
  const over = (drawer && !list) || (panel && !beside); // something lies over the chat
  return html`
    <a class="skip" href="#composer" onClick=${toComposer}>Skip to the message</a>
    <div class=${`page ${panel && beside ? "with-panel" : ""}`}>
      ${list && html`<${Sidebar} />`}
      <${Main} covered=${Boolean(over)} list=${list} />
      ${panel && beside && html`<${Panel} panel=${panel} />`}
    </div>
    ${over && html`<div class="veil" onClick=${() => update({ drawer: false, panel: null })}></div>`}
    ${drawer && !list && html`<${Drawer} side="left" label="Conversations"><${Sidebar} modal=${true} /><//>`}
    ${panel && !beside && html`<${Drawer} key=${panel} side="right" label=${PANELS[panel]}><${Panel} panel=${panel} /><//>`}
    <${Dialogs} />
    <${Toast} />
    <div class="hidden" aria-live="polite" role="status">${state.spoken}</div>
  `;
}

// What lies over the chat has the focus while it is there, and gives it back.
function Drawer({ side, label, children }) {
  const before = useRef(document.activeElement);
  const box = useRef(null);
  useEffect(() => {
    box.current.focus();
    return () => before.current?.focus();
  }, []);
  return html`<div ref=${box} class=${`drawer ${side}`} role="dialog" aria-modal="true" aria-label=${label}
    tabindex="-1">${children}</div>`;
}

function toComposer(event) {
  event.preventDefault();
  document.getElementById("composer").focus();
}

function Main({ covered, list }) {
  const { current, panel, health } = useStore();
  const title = shownTitle();
  const group = current && conversationOf(current);
  const toggle = (name) => update({ panel: panel === name ? null : name });
  useEffect(() => {
    document.title = current ? `${title} · warmturn` : "warmturn";
  }, [title, current]);
  return html`<main inert=${covered}>
    <header class="head">
      ${!list && html`<${IconButton} icon="menu" label="Conversations" onClick=${() => update({ drawer: true })} />`}
      <h1>
        ${
          group
            ? html`<button type="button" class="title" title="Rename"
              onClick=${() => update({ dialog: { kind: "rename", members: group.members, title } })}>${title}</button>`
            : html`<span class="title">${title}</span>`
        }
      </h1>
      <${IconButton} icon="tree" label=${PANELS.turns} aria-pressed=${panel === "turns"} onClick=${() => toggle("turns")} />
      <${IconButton} icon="pulse" label=${PANELS.live} aria-pressed=${panel === "live"} onClick=${() => toggle("live")} />
    </header>
    ${BANNERS[health] && html`<p class="banner" role="status">${BANNERS[health]}</p>`}
    <${Messages} />
    <${Composer} />
  </main>`;
}

function Panel({ panel }) {
  return html`<aside class="panel" aria-label=${PANELS[panel]}>
    <div class="panel-head">
      <h2>${PANELS[panel]}</h2>
      <${IconButton} icon="close" label="Close" onClick=${() => update({ panel: null })} />
    </div>
    ${panel === "turns" ? html`<${Tree} />` : html`<${Live} />`}
  </aside>`;
}

function Toast() {
  const { toast } = useStore();
  if (!toast) return null;
  return html`<div class="toast">
    <span>${toast.text}</span>
    ${toast.action && html`<button type="button" onClick=${toast.run}>${toast.action}</button>`}
    <${IconButton} icon="close" label="Dismiss" onClick=${toast.close} />
  </div>`;
}

// --- the server ----------------------------------------------------------------------------------------------

let looking = 0;

// Whether it answers, and can: looked at while it does not, when the page is shown, and when a request has failed.
async function look() {
  clearTimeout(looking);
  const before = state.health;
  let health = "down";
  try {
    const response = await fetch(url("health"), { cache: "no-store" });
    health = response.ok ? "ok" : "loading";
  } catch {
    // down
  }
  if (health !== state.health) update({ health });
  if (health !== "ok") looking = setTimeout(look, LOOK);
  else if (!state.listed) await begin();
  else if (before !== "ok") await again();
}

// It is back: what it tells may be newer than what is shown.
async function again() {
  try {
    await Promise.all([loadModel(), loadSessions(true)]);
    if (state.tree) await loadTree();
  } catch (error) {
    report(error);
  }
}

async function begin() {
  try {
    await Promise.all([loadModel(), loadSessions(true)]);
    await fromAddress();
  } catch (error) {
    report(error);
    looking = setTimeout(look, LOOK);
  }
}

async function fromAddress() {
  const id = decodeURIComponent(location.hash.replace(/^#\/?/, ""));
  if ((id || null) !== state.wanted) await open(id || null);
}

function onKey(event) {
  if (event.key !== "Escape" || hasDialog()) return;
  if (state.drawer) update({ drawer: false });
  else if (state.panel && !matchMedia(BESIDE).matches) update({ panel: null });
  else if (state.turns.has(state.current) && state.turns.get(state.current).status !== "failed") stop();
}

applyTheme();
onKeyNeeded(askForKey);
onLost(() => look());
update({
  panel: matchMedia(BESIDE).matches ? remembered("panel", "turns") : null,
  settings: { ...state.settings, ...remembered("settings", {}) },
});
addEventListener("keydown", onKey);
addEventListener("popstate", fromAddress);
addEventListener("hashchange", fromAddress);
addEventListener("pagehide", () => {
  keepRunning();
  remember("panel", state.panel);
  state.toast?.after?.(); // what is deleted stays deleted
});
document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && look());
render(html`<${App} />`, document.getElementById("app"));
look();
