// Helpers of every part of the page: icons, numbers, times, dialogs.

import { Component, h, html, useEffect, useRef } from "./vendor/htm-3.1.1/standalone.module.js";
import { count, decimal, language, plural, t } from "./words.js";

const PATHS = {
  plus: "M12 5v14M5 12h14",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14ZM16.2 16.2 20.5 20.5",
  menu: "M4 7h16M4 12h16M4 17h10",
  close: "M6 6l12 12M18 6L6 18",
  picture: "M4.5 5h15v14h-15zM4.5 16l4.5-4.5 4 4 2.5-2.5 4 4M15.5 8.8h.01",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7.5 7.5h9v9h-9z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M4 20h4L19.5 8.5l-4-4L4 16zM13.5 6.5l4 4",
  again: "M19 12a7 7 0 1 1-2.2-5.1M19 3.5V8h-4.5",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  down: "M6 9.5l6 6 6-6",
  pin: "M9 4h6l-1 6 3.5 3.5h-11L10 10zM12 13.5V20",
  trash: "M5 7h14M10 7V4.5h4V7M7 7l1 13h8l1-13",
  export: "M12 15V4M7.5 8.5L12 4l4.5 4.5M5 14v5.5h14V14",
  import: "M12 4v11M7.5 10.5L12 15l4.5-4.5M5 14v5.5h14V14",
  tree: "M7 8.5v7M7 5.5a1.5 1.5 0 1 0 0 3 1.5 1.5 0 0 0 0-3ZM7 15.5a1.5 1.5 0 1 0 0 3 1.5 1.5 0 0 0 0-3ZM17 8.5a1.5 1.5 0 1 0 0 3 1.5 1.5 0 0 0 0-3ZM17 11.5c0 3-4 2.5-8.5 4.8",
  pulse: "M3 12h4l3-7 4 14 3-7h4",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8ZM12 2.5V5M12 19v2.5M2.5 12H5M19 12h2.5M5.3 5.3l1.8 1.8M16.9 16.9l1.8 1.8M18.7 5.3l-1.8 1.8M7.1 16.9l-1.8 1.8",
  moon: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10Z",
  auto: "M12 4a8 8 0 1 0 0 16ZM12 4a8 8 0 0 1 0 16",
  back: "M9 7L4.5 11.5 9 16M4.5 11.5H15a4.5 4.5 0 0 1 0 9h-3",
  fork: "M7 4.5v15M7 12c6 0 10-1 10-7.5",
  tune: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  label: "M4 4.5h7.5L20 13l-7 7-9-8.5zM8 8.5h.01",
  link: "M10 14l4-4M8.5 11l-2.8 2.8a3.5 3.5 0 0 0 5 5L13.4 16M15.5 13l2.8-2.8a3.5 3.5 0 0 0-5-5L10.6 8",
  compare: "M4 5h6.5v14H4zM13.5 5H20v14h-6.5M6.5 9h2M6.5 12h2M16 9h1.5M16 12h1.5M16 15h1.5",
  tokens: "M4 7h5v4H4zM11 7h9v4h-9zM4 14h9v4H4zM15 14h5v4h-5z",
  keys: "M3 7h18v10H3zM6.5 10.5h.01M10 10.5h.01M13.5 10.5h.01M17 10.5h.01M8 13.8h8",
  clock: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16ZM12 8v4.5l3 2",
  more: "M5.3 12a.7.7 0 1 0 1.4 0 .7.7 0 0 0-1.4 0ZM11.3 12a.7.7 0 1 0 1.4 0 .7.7 0 0 0-1.4 0ZM17.3 12a.7.7 0 1 0 1.4 0 .7.7 0 0 0-1.4 0Z",
};

export const Icon = ({ name }) =>
  html`<svg class="icon" data-icon=${name} viewBox="0 0 24 24" aria-hidden="true" focusable="false"><path d=${PATHS[name]} /></svg>`;

// A button that shows only an icon; `label` is its accessible name.
export const IconButton = ({ icon, label, ...more }) =>
  html`<button type="button" class="icon-button" aria-label=${label} title=${label} ...${more}><${Icon} name=${icon} /></button>`;

const DOTS = [0, 1, 2];

// Something is awaited; `label` says what. The dots are made each time: what is constant in a template would keep the
// part of the page in memory in which it was first shown.
export const Waiting = ({ label, late = false }) =>
  html`<div class=${late ? "waiting late" : "waiting"} role="img" aria-label=${label}>${DOTS.map((dot) => html`<i key=${dot}></i>`)}</div>`;

// Whether there is a keyboard that can type a line break. Touch keyboards have only Enter.
export const hasKeys = () => matchMedia("(hover: hover)").matches;

// A component that is rendered again only when one of its properties, or of its lists' elements, has changed.
export function memo(View) {
  return class Memo extends Component {
    shouldComponentUpdate(next) {
      const keys = new Set([...Object.keys(next), ...Object.keys(this.props)]);
      return [...keys].some((key) => !isSame(next[key], this.props[key]));
    }
    render(props) {
      return h(View, props);
    }
  };
}

// Lists are the same if their elements are.
export const isSame = (one, other) =>
  one === other ||
  (Array.isArray(one) && Array.isArray(other) && one.length === other.length && one.every((item, at) => item === other[at]));

export { count, decimal, plural };

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return t("under 1 ms");
  return value < 1000 ? t("{n} ms", { n: Math.round(value) }) : t("{n} s", { n: decimal(value / 1000, value < 10_000 ? 1 : 0) });
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let left = value;
  while (left >= 1000 && unit < units.length - 1) {
    left /= 1000;
    unit += 1;
  }
  return `${unit && left < 10 ? left.toFixed(1) : Math.round(left)} ${units[unit]}`;
}

// How long ago a time in Unix seconds was.
export function ago(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  if (passed < 60) return t("just now");
  if (passed < 3600) return t("{n} min ago", { n: Math.floor(passed / 60) });
  if (passed < 86_400) return t("{n} h ago", { n: Math.floor(passed / 3600) });
  if (passed < 7 * 86_400) return plural(Math.floor(passed / 86_400), "{n} day ago", "{n} days ago");
  return dates.format(seconds * 1000);
}

const dates = new Intl.DateTimeFormat(language, { day: "numeric", month: "short", year: "numeric" });

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea"); // over plain HTTP there is no clipboard object
    area.value = text;
    area.className = "hidden";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

// The browser's modal dialog: it keeps the focus, Escape calls `onClose`. Without `onClose` it stays open: browsers
// close a dialog at the second Escape whatever the page does, so it is opened again.
export function Dialog({ title, onClose = null, children, ...more }) {
  const box = useRef(null);
  const pressed = useRef(null);
  useEffect(() => {
    const dialog = box.current;
    if (!dialog.open) dialog.showModal();
    return () => dialog.close();
  }, []);
  const cancel = (event) => {
    event.preventDefault();
    onClose?.();
  };
  const closed = () => box.current && (onClose ? onClose() : box.current.showModal());
  // A drag that only ends outside the dialog, as when text is selected, does not close it.
  const outside = (event) => event.target === box.current && pressed.current === box.current && onClose?.();
  return html`<dialog ref=${box} onCancel=${cancel} onClose=${closed} onClick=${outside}
    onPointerDown=${(event) => (pressed.current = event.target)} aria-labelledby="dialog-title" ...${more}>
    <div class="dialog-body">
      <h2 id="dialog-title">${title}</h2>
      ${children}
    </div>
  </dialog>`;
}
