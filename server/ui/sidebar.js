// The list of conversations.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { Icon, IconButton, ago, count, memo } from "./bits.js";
import { FilterButton, Filters, Found, Labels, NO_FILTER, Similar, isFiltered, useSearch, useSimilar } from "./search.js";
import {
  conversations,
  everyOf,
  importFile,
  isBeginning,
  keepCache,
  loadSessions,
  open,
  pin,
  remove,
  report,
  titleOf,
} from "./sessions.js";
import { remember, remembered, state, update, useStore } from "./store.js";
import { LANGUAGES, chooseLanguage, chosenLanguage, plural, t } from "./words.js";

const ICON = new URL("icon.svg", import.meta.url).href;
const NEAR = 600; // pixels above the end of the list, from where older sessions are read
const NOTHING_FOUND = t("Nothing found.");
const NOTHING_YET = t("Conversations stay here, also after a restart.");

export function Sidebar({ modal }) {
  const { current, more, listed, turns } = useStore();
  const [query, setQuery] = useState("");
  const [filter, setFilter] = useState(NO_FILTER);
  const [isFiltering, setFiltering] = useState(false);
  const search = useSearch(query, filter);
  const all = conversations();
  const begun = search.isOn ? [] : [...turns.values()].filter(isBeginning);
  const onScroll = ({ currentTarget: box }) => {
    if (more && !search.isOn && box.scrollHeight - box.scrollTop - box.clientHeight < NEAR) readOn();
  };
  const filterMore = () => {
    setFiltering(!isFiltering);
    if (isFiltering) setFilter(NO_FILTER);
  };
  return html`<nav class="sidebar" aria-label=${t("Conversations")}>
    <div class="sidebar-head">
      <span class="brand"><img src=${ICON} alt="" width="22" height="22" />warmturn</span>
      ${modal && html`<${IconButton} icon="close" label=${t("Close the list")} onClick=${() => update({ drawer: false })} />`}
    </div>
    <button type="button" class="new-chat" onClick=${() => goTo(null)}><${Icon} name="plus" />${t("New conversation")}</button>
    <label class="search">
      <${Icon} name="search" />
      <input type="search" placeholder=${t("Search")} aria-label=${t("Search conversations")} value=${query}
        onInput=${(event) => setQuery(event.target.value)} />
      <${FilterButton} isOpen=${isFiltering} toggle=${filterMore} />
    </label>
    ${isFiltering && html`<${Filters} filter=${filter} setFilter=${setFilter} />`}
    <div class="conversations" tabindex="-1" onScroll=${onScroll}>
      ${
        begun.length > 0 &&
        html`<ul>
        ${begun.map((turn) => html`<${Begun} key=${turn.id} turn=${turn} active=${turn.id === current} />`)}
      </ul>`
      }
      ${search.isOn && search.data && html`<${Results} search=${search} query=${isFiltered(filter) ? "" : query} current=${current} />`}
      ${!search.isOn && html`<${List} all=${all} current=${current} doing=${JSON.stringify(doings(turns))}
        minute=${Math.floor(Date.now() / 60_000)} />`}
      ${listed && !search.isOn && all.length === 0 && html`<p class="hint list-hint">${NOTHING_YET}</p>`}
      ${more && !search.isOn && html`<button type="button" class="button quiet"
        onClick=${readOn}>${t("Show older ones")}</button>`}
    </div>
    <${Foot} />
  </nav>`;
}

// All conversations. They are drawn again when they or their times change, and not with each token of a reply.
const List = memo(({ all, current, doing }) => {
  const told = new Map(JSON.parse(doing));
  const toldOf = ({ members }) => members.map(({ id }) => told.get(id)).find(Boolean);
  return byDay(all).map(
    ([day, groups]) => html`<section key=${day}>
      <h2 class="day">${day}</h2>
      ${parts(groups).map((part, at) => html`<${Part} key=${at} groups=${part} whens=${part.map(({ latest }) => ago(latest.last_used_at))}
        doings=${part.map((group) => (told.size ? toldOf(group) : undefined))}
        active=${part.findIndex(({ members }) => members.some(({ id }) => id === current))} />`)}
    </section>`,
  );
});

const PART = 50; // rows that are laid out together, when they come near what is seen
const ROW = 47; // pixels

function parts(groups) {
  const found = [];
  for (let at = 0; at < groups.length; at += PART) found.push(groups.slice(at, at + PART));
  return found;
}

const Part = memo(
  ({ groups, whens, doings: told, active }) => html`<ul class="list-part" style=${{ containIntrinsicBlockSize: `auto ${ROW * groups.length}px` }}>
    ${groups.map((group, at) => html`<${Row} key=${group.members.at(-1).id} group=${group} active=${at === active}
      when=${whens[at]} doing=${told[at]} />`)}
  </ul>`,
);

// What is told of the sessions that have a turn: [id, words].
const doings = (turns) => [...turns].map(([id, turn]) => [id, doingOf(turn)]);

let reading = null; // the request for older sessions: one at a time

const readOn = () => (reading ??= loadSessions().catch(report).finally(() => (reading = null)));

// What the server has found, and what is known here by a part of its title or id.
function Results({ search, query, current }) {
  const { data, more, readOn } = search;
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const told = new Set(data.map(({ id }) => id));
  const similar = useSimilar(query).filter(({ id }) => !told.has(id));
  const near = words.length
    ? conversations().filter(({ title, members }) => {
        const text = [title, ...members.map(({ id }) => id)].join(" ").toLowerCase();
        return words.every((word) => text.includes(word)) && !members.some(({ id }) => told.has(id));
      })
    : [];
  return html`<ul aria-label=${t("Results")}>
      ${data.map((session) => html`<${Found} key=${session.id} session=${session} active=${session.id === current} />`)}
      ${near.map((group) => html`<${Row} key=${group.latest.id} group=${group} active=${group.latest.id === current}
        when=${ago(group.latest.last_used_at)} />`)}
    </ul>
    <${Similar} sessions=${similar} current=${current} />
    ${data.length + near.length + similar.length === 0 && html`<p class="hint list-hint" role="status">${NOTHING_FOUND}</p>`}
    ${more && html`<button type="button" class="button quiet" onClick=${readOn}>${t("Show more")}</button>`}`;
}

function goTo(id) {
  open(id);
  update({ write: state.write + 1 });
}

// Groups by the day of their last use: [day, groups].
function byDay(groups) {
  const midnight = new Date().setHours(0, 0, 0, 0) / 1000;
  const days = { [t("Today")]: midnight, [t("Yesterday")]: midnight - 86_400, [t("The last 7 days")]: midnight - 7 * 86_400, [t("Earlier")]: 0 };
  const dayOf = ({ pinned, latest }) =>
    pinned ? t("Pinned") : Object.keys(days).find((day) => latest.last_used_at >= days[day]);
  const found = new Map();
  for (const group of groups) {
    const day = dayOf(group);
    if (!found.has(day)) found.set(day, []);
    found.get(day).push(group);
  }
  return [...found];
}

const doingOf = (turn) => turn && (turn.status === "failed" ? t("Not sent") : t("Answering…"));

// A conversation or branch whose first turn is running, or has failed.
function Begun({ turn, active }) {
  return html`<li class=${`row ${active ? "active" : ""}`}>
    <button type="button" class="row-main" aria-current=${active ? "page" : undefined} onClick=${() => goTo(turn.id)}>
      <span class="row-title">${turn.metadata?.title ?? titleOf(state.sessions.get(turn.fork?.from))}</span>
      <span class="row-about">${doingOf(turn)}</span>
    </button>
  </li>`;
}

const Row = memo(({ group, active, doing, when }) => {
  const { members, latest, title, pinned, kept } = group;
  const branch = () => (members.some(({ id }) => id === state.current) ? state.current : latest.id); // the one that is seen
  const about = [
    when,
    latest.turns ? plural(latest.tokens, "{n} token", "{n} tokens") : plural(latest.messages, "{n} message", "{n} messages"),
  ];
  if (members.length > 1) about.push(plural(members.length, "{n} branch", "{n} branches"));
  return html`<li class=${`row ${active ? "active" : ""}`}>
    <button type="button" class="row-main" aria-current=${active ? "page" : undefined} onClick=${() => goTo(latest.id)}>
      <span class="row-title">${pinned && html`<${Icon} name="pin" />`}${title}</span>
      <span class="row-about">${doing ?? about.join(" · ")}<${Labels} session=${latest} /></span>
    </button>
    <${Menu} label=${t("More for {title}", { title })}>
      <button type="button" role="menuitem"
        onClick=${() => update({ dialog: { kind: "rename", members, title } })}><${Icon} name="edit" />${t("Rename")}</button>
      <button type="button" role="menuitem" onClick=${() => pin(members, !pinned)}>
        <${Icon} name="pin" />${pinned ? t("Unpin") : t("Pin to the top")}
      </button>
      <button type="button" role="menuitem"
        onClick=${() => update({ dialog: { kind: "labels", members } })}><${Icon} name="label" />${t("Labels")}</button>
      <button type="button" role="menuitem" onClick=${() => keepCache(members, !kept)}>
        <${Icon} name="clock" />${kept ? t("Release its cache") : t("Keep its cache for a week")}
      </button>
      <button type="button" role="menuitem"
        onClick=${() => update({ dialog: { kind: "share", id: branch() } })}><${Icon} name="link" />${t("Share")}</button>
      <button type="button" role="menuitem"
        onClick=${() => update({ dialog: { kind: "export", id: branch() } })}><${Icon} name="export" />${t("Export")}</button>
      <button type="button" role="menuitem" class="danger"
        onClick=${(event) => removeGroup(group, event.target.closest(".row"))}><${Icon} name="trash" />${t("Delete")}</button>
    <//>
  </li>`;
});

async function removeGroup({ members }, row) {
  const rows = [...document.querySelectorAll(".conversations .row-main")];
  const at = rows.indexOf(row.querySelector(".row-main"));
  const next = rows[at + 1] ?? rows[at - 1] ?? document.querySelector(".new-chat");
  try {
    const ids = (await everyOf(members)).map(({ id }) => id);
    remove(ids, ids.length > 1 ? t("Deleted, all {n} branches.", { n: count(ids.length) }) : t("Deleted."));
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
  const file = useRef(null);
  const chosen = () => {
    if (file.current.files[0]) importFile(file.current.files[0]);
    file.current.value = "";
  };
  return html`<div class="sidebar-foot">
    <input ref=${file} type="file" accept=".zip,application/zip" class="hidden"
      tabindex="-1" aria-label=${t("Capsule to import")} onChange=${chosen} />
    <${IconButton} icon="import" label=${t("Import a conversation")} onClick=${() => file.current.click()} />
    <${IconButton} icon="keys" label=${t("Keys")} onClick=${() => update({ dialog: { kind: "shortcuts" } })} />
    <${LanguageChoice} />
    <${ThemeButton} />
  </div>`;
}

const LanguageChoice = () =>
  html`<select class="language" aria-label=${t("Language")} value=${chosenLanguage()}
    onChange=${(event) => chooseLanguage(event.target.value)}>
    <option value="">${t("Language")}</option>
    ${Object.entries(LANGUAGES).map(([name, words]) => html`<option value=${name} lang=${name}>${words}</option>`)}
  </select>`;

const THEMES = ["auto", "light", "dark"];
const THEME_ICONS = { auto: "auto", light: "sun", dark: "moon" };

export function applyTheme() {
  const theme = remembered("theme", "auto");
  document.documentElement.dataset.theme = THEMES.includes(theme) ? theme : "auto";
}

function ThemeButton() {
  const [theme, setTheme] = useState(() => document.documentElement.dataset.theme);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  const themes = { auto: t("auto"), light: t("light"), dark: t("dark") };
  const change = () => {
    remember("theme", next);
    applyTheme();
    setTheme(next);
    update({});
  };
  return html`<${IconButton} icon=${THEME_ICONS[theme]} label=${t("Colours: {theme}. Change to {next}", { theme: themes[theme], next: themes[next] })}
    onClick=${change} />`;
}
