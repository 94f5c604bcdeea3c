// Searching all conversations, and the labels that they have.

import { html, useEffect, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { getJson } from "./api.js";
import { Icon, IconButton, ago } from "./bits.js";
import { labelsOf, open, report, rootOf } from "./sessions.js";
import { state, update, useStore } from "./store.js";
import { t } from "./words.js";

const PAGE = 30;
const PAUSE = 200; // milliseconds without a key until the server is asked
const SIMILAR = 8; // sessions that are found by meaning
const SIMILAR_PAUSE = 500; // milliseconds without a key: a query is computed by a model
const LONGEST = 200; // characters of a query
const MAKING = 20; // requests for one query, while vectors of sessions are missing
const DAY = 86_400;
const LABEL = "label:"; // how the keys of labels begin

export const NO_FILTER = { label: "", days: "", model: "" };

export const isFiltered = ({ label, days, model }) => Boolean(label || days || model);

const asked = (query, { label, days, model }) => {
  const wish = new URLSearchParams({ limit: PAGE });
  if (query.trim()) wish.set("query", query.trim());
  if (label) wish.set(`metadata[${LABEL}${label}]`, "yes");
  if (days) wish.set("used_after", Math.floor(Date.now() / 1000 - days * DAY));
  if (model) wish.set("model", model);
  return wish;
};

// The results of a search, from the server: { data, more, readOn }; `data` is null until the first ones have come.
export function useSearch(query, filter) {
  const { sessions } = useStore();
  const [found, setFound] = useState({ data: null, more: false });
  const isOn = /[\p{L}\p{N}]/u.test(query) || isFiltered(filter);
  const read = async (after, before = []) => {
    const wish = asked(/[\p{L}\p{N}]/u.test(query) ? query : "", filter);
    if (after) wish.set("after", after);
    const page = await getJson(`v1/sessions?${wish}`);
    return { data: [...before, ...page.data], more: page.has_more, after: page.last_id };
  };
  useEffect(() => {
    if (!isOn) {
      setFound({ data: null, more: false });
      return undefined;
    }
    let isLatest = true;
    const look = () => read().then((page) => isLatest && setFound(page), (error) => isLatest && report(error));
    const timer = setTimeout(look, query ? PAUSE : 0);
    return () => {
      isLatest = false;
      clearTimeout(timer);
    };
  }, [query, filter, isOn, sessions.size]);
  const readOn = () => read(found.after, found.data).then(setFound, report);
  return { ...found, data: found.data && alone(found.data), isOn, readOn };
}

// The sessions that are like a query, from the server; it is asked again while it makes vectors of more sessions.
export function useSimilar(query) {
  const { meaning } = useStore();
  const [found, setFound] = useState([]);
  const asks = meaning && /[\p{L}\p{N}]/u.test(query);
  useEffect(() => {
    setFound([]);
    if (!asks) return undefined;
    let isLatest = true;
    const look = async (times) => {
      const wish = new URLSearchParams({ query: query.trim().slice(0, LONGEST), limit: SIMILAR });
      const { data, pending } = await getJson(`v1/similar_sessions?${wish}`);
      if (!isLatest) return;
      setFound(data.map(({ session }) => session));
      if (pending && times > 1) await look(times - 1);
    };
    const timer = setTimeout(() => look(MAKING).catch((error) => isLatest && report(error)), SIMILAR_PAUSE);
    return () => {
      isLatest = false;
      clearTimeout(timer);
    };
  }, [query, asks]);
  return found.filter(({ id }) => !state.removed.has(id));
}

// What is found by meaning, beside what has the words.
export function Similar({ sessions, current }) {
  if (!sessions.length) return null;
  return html`<h2 class="day">${t("By meaning")}</h2>
    <ul aria-label=${t("By meaning")}>
      ${sessions.map((session) => html`<${Found} key=${session.id} session=${session} active=${session.id === current} />`)}
    </ul>`;
}

// A session and its forks share their messages: of those with the same hits, or without any, only the one used last is
// shown.
function alone(data) {
  const seen = new Set();
  return data.filter((session) => {
    const { title, hits, id } = session;
    if (state.removed.has(id)) return false;
    const words = hits?.map(({ before, match, after }) => before + match + after);
    const same = JSON.stringify([title, words ?? rootOf(session)]);
    return !seen.has(same) && seen.add(same);
  });
}

export function Filters({ filter, setFilter }) {
  const [labels, setLabels] = useState([]);
  const { models } = useStore();
  useEffect(() => {
    const keys = getJson(`v1/metadata_keys?${new URLSearchParams({ prefix: LABEL })}`);
    keys.then(({ data }) => setLabels(data.map(({ key }) => key.slice(LABEL.length))), report);
  }, []);
  const set = (name) => (event) => setFilter({ ...filter, [name]: event.target.value });
  const label = filter.label && !labels.includes(filter.label) ? [filter.label, ...labels] : labels;
  return html`<div class="filters">
    <select aria-label=${t("Label")} value=${filter.label} onChange=${set("label")}>
      <option value="">${t("Any label")}</option>
      ${label.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
    </select>
    <select aria-label=${t("Last used")} value=${filter.days} onChange=${set("days")}>
      <option value="">${t("Any time")}</option>
      <option value="1">${t("Last 24 hours")}</option>
      <option value="7">${t("Last 7 days")}</option>
      <option value="30">${t("Last 30 days")}</option>
    </select>
    <select aria-label=${t("Model")} value=${filter.model} onChange=${set("model")}>
      <option value="">${t("Any model")}</option>
      ${models.map(({ id }) => html`<option key=${id} value=${id}>${id}</option>`)}
    </select>
  </div>`;
}

const Hit = ({ hit }) =>
  html`<span class="hit"><span class="hidden">${hit.role === "user" ? t("You:") : t("Reply:")} </span
    >${hit.before}<mark>${hit.match}</mark>${hit.after}</span>`;

// A session that was found. The message with the first hit is shown.
export function Found({ session, active }) {
  const hits = (session.hits ?? []).filter(({ message }) => message !== null);
  const go = async () => {
    update({ drawer: false, target: hits.length ? { id: session.id, message: hits[0].message } : null });
    await open(session.id);
  };
  return html`<li class=${`row ${active ? "active" : ""}`}>
    <button type="button" class="row-main" aria-current=${active ? "page" : undefined} onClick=${go}>
      <span class="row-title">${session.title || session.id}</span>
      ${hits.slice(0, 2).map((hit) => html`<${Hit} hit=${hit} />`)}
      <span class="row-about">${ago(session.last_used_at)}<${Labels} session=${session} /></span>
    </button>
  </li>`;
}

export const Labels = ({ session }) =>
  labelsOf(session).map((name) => html`<span key=${name} class="label">${name}</span>`);

export const FilterButton = ({ isOpen, toggle }) =>
  html`<${IconButton} icon="tune" label=${t("Filters")} aria-expanded=${isOpen} onClick=${toggle} />`;
