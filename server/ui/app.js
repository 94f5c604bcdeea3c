// The page: its three parts, the keyboard, and the health of the server.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { onKeyNeeded, onLost, url } from "./api.js";
import { IconButton } from "./bits.js";
import { Messages } from "./chat.js";
import { Composer } from "./composer.js";
import { Dialogs, askForKey, hasDialog } from "./dialogs.js";
import { Live } from "./live.js";
import { loadModels } from "./models.js";
import { keepRunning, pickUp, resume, takeUp } from "./running.js";
import { conversationOf, follow, loadSessions, onShown, open, report } from "./sessions.js";
import { readDefaults } from "./settings.js";
import { shortcut } from "./shortcuts.js";
import { Sidebar, applyTheme } from "./sidebar.js";
import { BESIDE, remember, remembered, state, update, useStore } from "./store.js";
import { shownTitle, stop } from "./talk.js";
import { Tree } from "./tree.js";
import { t } from "./words.js";

const PANELS = { turns: t("Turns and branches"), live: t("The server now") };
const LIST = "(min-width: 820px)"; // wide enough for the list beside the chat
const BANNERS = {
  loading: t("The model is loading. This page goes on by itself."),
  down: t("The server does not answer. What was finished is kept; this page goes on by itself."),
  offline: t("You are offline. What you write is kept; this page goes on by itself once the network is back."),
};
const LOOK = 2000; // milliseconds between two health checks while the server does not answer

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
  const { drawer, panel: chosen, tree, current, turns } = useStore();
  const beside = useMedia(BESIDE);
  const list = useMedia(LIST);
  const isEmpty = current === null || (!tree && turns.has(current)); // there is no turn that the tree could show
  const panel = beside && chosen === "turns" && isEmpty ? null : chosen;
  const over = (drawer && !list) || (panel && !beside); // a drawer covers the chat
  return html`
    <a class="skip" href="#composer" onClick=${toComposer}>${t("Skip to the message")}</a>
    <div class=${`page ${panel && beside ? "with-panel" : ""}`} inert=${Boolean(over)}>
      ${list && html`<${Sidebar} />`}
      <${Main} list=${list} panel=${panel} isEmpty=${isEmpty} />
      ${panel && beside && html`<${Panel} panel=${panel} />`}
    </div>
    ${over && html`<div class="veil" onClick=${() => update({ drawer: false, panel: null })}></div>`}
    ${drawer && !list && html`<${Drawer} side="left" label=${t("Conversations")}><${Sidebar} modal=${true} /><//>`}
    ${panel && !beside && html`<${Drawer} key=${panel} side="right" label=${PANELS[panel]}><${Panel} panel=${panel} /><//>`}
    <${Dialogs} />
    <${Toast} />
    <div class="hidden" aria-live="polite" role="status">${state.spoken}</div>
  `;
}

// A drawer over the chat. It has the focus while it is open, and then returns it.
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

function Main({ list, panel, isEmpty }) {
  const { current, health, turns, unread } = useStore();
  const title = shownTitle();
  const group = current && conversationOf(current);
  const toggle = (name) => update({ panel: panel === name ? null : name });
  useEffect(() => {
    document.title = current ? `${title} · warmturn` : "warmturn";
  }, [title, current]);
  const isTold = unread || turns.get(current)?.status === "failed"; // shown below, in a box
  return html`<main>
    <header class="head">
      ${!list && html`<${IconButton} icon="menu" label=${t("Conversations")} onClick=${() => update({ drawer: true })} />`}
      <h1>
        ${
          group
            ? html`<button type="button" class="title" title=${t("Rename")}
              onClick=${() => update({ dialog: { kind: "rename", members: group.members, title } })}>${title}</button>`
            : html`<span class="title">${title}</span>`
        }
      </h1>
      <${IconButton} icon="tree" label=${PANELS.turns} aria-pressed=${panel === "turns"}
        disabled=${isEmpty} onClick=${() => toggle("turns")} />
      <${IconButton} icon="pulse" label=${PANELS.live} aria-pressed=${panel === "live"} onClick=${() => toggle("live")} />
    </header>
    ${BANNERS[health] && html`<p class=${`banner ${isTold ? "quiet" : ""}`} role="status">${BANNERS[health]}</p>`}
    <${Messages} />
    <${Composer} />
  </main>`;
}

function Panel({ panel }) {
  return html`<aside class="panel" aria-label=${PANELS[panel]}>
    <div class="panel-head">
      <h2>${PANELS[panel]}</h2>
      <${IconButton} icon="close" label=${t("Close")} onClick=${() => update({ panel: null })} />
    </div>
    ${panel === "turns" ? html`<${Tree} />` : html`<${Live} />`}
  </aside>`;
}

function Toast() {
  const { toast } = useStore();
  if (!toast) return null;
  return html`<div class="toast" onPointerEnter=${toast.hold} onPointerLeave=${toast.release}
    onFocusIn=${toast.hold} onFocusOut=${toast.release}>
    <span>${toast.text}</span>
    ${toast.action && html`<button type="button" onClick=${toast.run}>${toast.action}</button>`}
    <${IconButton} icon="close" label=${t("Dismiss")} onClick=${toast.close} />
  </div>`;
}

// --- the server ----------------------------------------------------------------------------------------------

let looking = 0; // the timer of the next health check
let lookingNow = null; // the check in progress: one at a time
let broken = false; // whether a request got no answer since sessions were read
let answered = -LOOK; // when the server was last healthy, by performance.now()

// Check the server's health: repeated while it is not healthy, and when the page is shown or a request has failed.
// `anew`: other clients may have changed sessions since.
function look(anew = false) {
  clearTimeout(looking);
  looking = 0;
  lookingNow ??= lookOnce(anew).finally(() => (lookingNow = null));
}

async function lookOnce(anew) {
  const before = state.health;
  let health = "down";
  try {
    const response = await fetch(url("health"), { cache: "no-store" });
    if (response.ok) health = "ok";
    else if (response.status === 503) health = "loading";
  } catch {
    if (!navigator.onLine) health = "offline";
  }
  if (health === "ok") answered = performance.now();
  if (health !== state.health) update({ health });
  if (health !== "ok") later();
  else if (!state.listed || before !== "ok" || anew || broken) await catchUp();
}

const later = () => (looking ||= setTimeout(look, LOOK));

// A request got no answer. If the server was healthy a moment ago, the fault is that request's.
function onBroken() {
  broken = true;
  if (lookingNow || performance.now() - answered < LOOK) later();
  else look();
}

// Read model and sessions again: they may be newer than what is shown, or nothing is shown yet.
async function catchUp() {
  const begins = !state.listed;
  broken = false;
  try {
    await Promise.all([loadModels(), loadSessions(true)]);
    if (begins) await openFirst();
    else if (await resume()) return;
    else if (state.unread) await open(state.unread.id);
    else await follow();
  } catch (error) {
    report(error);
    later();
  }
}

// Open the session in the address, unless the user has already begun a turn.
async function openFirst() {
  const id = addressed();
  const place = await takeUp(id);
  if (addressed() === id && (place ?? id) !== null) await open(place);
}

function addressed() {
  try {
    return decodeURIComponent(location.hash.replace(/^#\/?/, "")) || null;
  } catch {
    return null; // the user is typing
  }
}

async function fromAddress() {
  if (state.listed && addressed() !== state.wanted) await open(addressed());
}

const comeBack = () => document.visibilityState === "visible" && performance.now() - answered > LOOK && look(true);

function onKey(event) {
  if (shortcut(event)) return;
  if (event.key !== "Escape" || event.defaultPrevented || event.isComposing || hasDialog()) return;
  const field = event.target.matches("input, textarea:not(#composer)");
  if (field && event.target.value) return; // Escape clears the field, or belongs to an editor
  if (state.drawer) update({ drawer: false });
  else if (state.panel && !matchMedia(BESIDE).matches) update({ panel: null });
  else if (!field && state.turns.has(state.current) && state.turns.get(state.current).status !== "failed") stop();
}

applyTheme();
onKeyNeeded(askForKey);
onLost(onBroken);
onShown(pickUp);
update({
  current: addressed(),
  opening: addressed() !== null,
  panel: matchMedia(BESIDE).matches ? remembered("panel", "turns") : null,
  settings: readDefaults(),
});
addEventListener("keydown", onKey);
addEventListener("popstate", fromAddress);
addEventListener("hashchange", fromAddress);
addEventListener("pagehide", () => {
  keepRunning();
  remember("panel", state.panel);
  state.toast?.close(); // carries out deletions that could still be undone
});
addEventListener("pageshow", (event) => event.persisted && keepRunning(false));
addEventListener("focus", comeBack);
addEventListener("online", () => look(true));
addEventListener("offline", () => look());
document.addEventListener("visibilitychange", comeBack);
render(html`<${App} />`, document.getElementById("app"));
look();
