// The list of conversations.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { Icon, IconButton, ago, count, plural } from "./bits.js";
import {
  conversations,
  everyOf,
  importFile,
  isBeginning,
  loadSessions,
  open,
  pin,
  remove,
  report,
  titleOf,
} from "./sessions.js";
import { remember, remembered, state, update, useStore } from "./store.js";

const NOTHING_FOUND = "Nothing is called that.";
const NOTHING_YET = "Conversations stay here, also after a restart.";
const MOST_SEARCHED = 20; // pages of older conversations that a search loads

export function Sidebar({ modal }) {
  const { current, more, listed, turns } = useStore();
  const [query, setQuery] = useState("");
  const all = conversations();
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = all.filter(({ title, members }) => {
    const text = [title, ...members.map(({ id }) => id)].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
  useEffect(() => {
    if (words.length) readOn();
  }, [words.length > 0]);
  const begun = words.length ? [] : [...turns.values()].filter(isBeginning);
  return html`<nav class="sidebar" aria-label="Conversations">
    <div class="sidebar-head">
      <span class="brand"><img src="icon.svg" alt="" width="22" height="22" />warmturn</span>
      ${modal && html`<${IconButton} icon="close" label="Close the list" onClick=${() => update({ drawer: false })} />`}
    </div>
    <button type="button" class="new-chat" onClick=${() => goTo(null)}><${Icon} name="plus" />New conversation</button>
    <label class="search">
      <${Icon} name="search" />
      <input type="search" placeholder="Search" aria-label="Search conversations" value=${query}
        onInput=${(event) => setQuery(event.target.value)} />
    </label>
    <div class="conversations" tabindex="-1">
      ${
        begun.length > 0 &&
        html`<ul>
        ${begun.map((turn) => html`<${Begun} key=${turn.id} turn=${turn} active=${turn.id === current} />`)}
      </ul>`
      }
      ${byDay(found).map(
        ([day, groups]) => html`<section key=${day}>
        <h2 class="day">${day}</h2>
        <ul>
          ${groups.map((group) => html`<${Row} key=${group.members.at(-1).id} group=${group}
            active=${group.members.some(({ id }) => id === current)} />`)}
        </ul>
      </section>`,
      )}
      ${listed && found.length === 0 && html`<p class="hint list-hint">${all.length ? NOTHING_FOUND : NOTHING_YET}</p>`}
      ${more && words.length === 0 && html`<button type="button" class="button quiet"
        onClick=${() => loadSessions().catch(report)}>Show older ones</button>`}
    </div>
    <${Foot} />
  </nav>`;
}

async function readOn() {
  try {
    for (let page = 0; state.more && page < MOST_SEARCHED; page += 1) await loadSessions();
  } catch (error) {
    report(error);
  }
}

function goTo(id) {
  open(id);
  update({ write: state.write + 1 });
}

// Groups by the day of their last use: [day, groups].
function byDay(groups) {
  const midnight = new Date().setHours(0, 0, 0, 0) / 1000;
  const days = { Today: midnight, Yesterday: midnight - 86_400, "The last 7 days": midnight - 7 * 86_400, Before: 0 };
  const dayOf = ({ pinned, latest }) =>
    pinned ? "Pinned" : Object.keys(days).find((day) => latest.last_used_at >= days[day]);
  const found = new Map();
  for (const group of groups) found.set(dayOf(group), [...(found.get(dayOf(group)) ?? []), group]);
  return [...found];
}

const doingOf = (turn) => turn && (turn.status === "failed" ? "Not sent" : "Answering…");

// A conversation or branch whose first turn is running, or has failed.
function Begun({ turn, active }) {
  return html`<li class=${`row ${active ? "active" : ""}`}>
    <button type="button" class="row-main" aria-current=${active ? "page" : undefined} onClick=${() => goTo(turn.id)}>
      <span class="row-title">${turn.metadata?.title ?? titleOf(state.sessions.get(turn.fork?.from))}</span>
      <span class="row-about">${doingOf(turn)}</span>
    </button>
  </li>`;
}

function Row({ group, active }) {
  const { members, latest, title, pinned } = group;
  const doing = doingOf(members.map(({ id }) => state.turns.get(id)).find(Boolean));
  const about = [
    ago(latest.last_used_at),
    latest.turns ? plural(latest.tokens, "token") : plural(latest.messages, "message"),
  ];
  if (members.length > 1) about.push(`${count(members.length)} branches`);
  return html`<li class=${`row ${active ? "active" : ""}`}>
    <button type="button" class="row-main" aria-current=${active ? "page" : undefined} onClick=${() => goTo(latest.id)}>
      <span class="row-title">${pinned && html`<${Icon} name="pin" />`}${title}</span>
      <span class="row-about">${doing ?? about.join(" · ")}</span>
    </button>
    <${Menu} label=${`More for ${title}`}>
      <button type="button" role="menuitem"
        onClick=${() => update({ dialog: { kind: "rename", members, title } })}><${Icon} name="edit" />Rename</button>
      <button type="button" role="menuitem" onClick=${() => pin(members, !pinned)}>
        <${Icon} name="pin" />${pinned ? "Unpin" : "Pin its cache for a week"}
      </button>
      <button type="button" role="menuitem"
        onClick=${() => update({ dialog: { kind: "export", id: latest.id } })}><${Icon} name="export" />Export</button>
      <button type="button" role="menuitem" class="danger"
        onClick=${(event) => removeGroup(group, event.target.closest(".row"))}><${Icon} name="trash" />Delete</button>
    <//>
  </li>`;
}

async function removeGroup({ members }, row) {
  const rows = [...document.querySelectorAll(".conversations .row-main")];
  const at = rows.indexOf(row.querySelector(".row-main"));
  const next = rows[at + 1] ?? rows[at - 1] ?? document.querySelector(".new-chat");
  try {
    const ids = (await everyOf(members)).map(({ id }) => id);
    remove(ids, ids.length > 1 ? `Deleted, all ${count(ids.length)} branches.` : "Deleted.");
    next.focus(); // the focused row was removed
  } catch (error) {
    report(error);
  }
}

// A button that opens a menu, which gets the focus at once. Arrow keys move in it, Escape closes it.
function Menu({ label, children }) {
  const [isOpen, setOpen] = useState(false);
  const place = useRef(null);
  useLayoutEffect(() => {
    if (!isOpen) return undefined;
    const menu = place.current.querySelector("[role=menu]");
    const box = place.current.getBoundingClientRect();
    if (box.bottom + menu.offsetHeight + 8 > innerHeight) menu.classList.add("above");
    menu.querySelector("[role=menuitem]").focus();
    const away = (event) => !place.current.contains(event.target) && setOpen(false);
    document.addEventListener("pointerdown", away);
    return () => document.removeEventListener("pointerdown", away);
  }, [isOpen]);
  const close = () => {
    setOpen(false);
    place.current.querySelector("button").focus();
  };
  const onKeyDown = (event) => {
    if (!isOpen) return;
    const items = [...place.current.querySelectorAll("[role=menuitem]")];
    const at = items.indexOf(document.activeElement);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) items[(at + step + items.length) % items.length].focus();
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    }
    if (step || event.key === "Escape") event.preventDefault();
    if (event.key === "Tab") setOpen(false);
  };
  return html`<div class="menu-place" ref=${place} onKeyDown=${onKeyDown}>
    <${IconButton} icon="more" label=${label} aria-haspopup="menu" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)} />
    ${isOpen && html`<div class="menu" role="menu" aria-label=${label}
      onClick=${close}>${children}</div>`}
  </div>`;
}

function Foot() {
  const { model } = useStore();
  const file = useRef(null);
  const chosen = () => {
    if (file.current.files[0]) importFile(file.current.files[0]);
    file.current.value = "";
  };
  return html`<div class="sidebar-foot">
    <span class="model-name" title=${model?.id}>${model?.id ?? " "}</span>
    <input ref=${file} type="file" accept=".zip,application/zip" class="hidden"
      tabindex="-1" aria-label="Capsule to import" onChange=${chosen} />
    <${IconButton} icon="import" label="Import a conversation" onClick=${() => file.current.click()} />
    <${IconButton} icon="tune" label="Settings" onClick=${() => update({ dialog: { kind: "settings" } })} />
    <${ThemeButton} />
  </div>`;
}

const THEMES = ["auto", "light", "dark"];
const THEME_ICONS = { auto: "auto", light: "sun", dark: "moon" };

export function applyTheme() {
  const theme = remembered("theme", "auto");
  document.documentElement.dataset.theme = THEMES.includes(theme) ? theme : "auto";
}

function ThemeButton() {
  const [theme, setTheme] = useState(() => document.documentElement.dataset.theme);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  const change = () => {
    remember("theme", next);
    applyTheme();
    setTheme(next);
    update({});
  };
  return html`<${IconButton} icon=${THEME_ICONS[theme]} label=${`Colours: ${theme}. Change to ${next}`}
    onClick=${change} />`;
}
