// A line or two over the last five minutes.

import { html, useEffect, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { SPAN, history } from "./metrics.js";
import { t } from "./words.js";

const HEIGHT = 108;
const STEPS = [1, 2, 5]
  .flatMap((digit) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11].map((power) => digit * power))
  .sort((one, other) => one - other);

// `lines`: those that have anything but 0, as [{ name, of }], where `of` is in the history and `name` is the key. `told`
// formats a value. Without lines, the text `empty` is shown instead.
export function Plot({ title, lines, told, empty, dots = false }) {
  const now = lines.map(({ name, of }) => `${name} ${told(history[of].findLast((value) => value !== null) ?? 0)}`);
  const names = lines.map(({ of }) => of).join(); // other lines need another chart
  const keyed = lines.some(({ name }) => !title.toLowerCase().includes(name)); // the title does not name the line
  return html`<figure class="plot">
    <figcaption>${title}${keyed && lines.map(({ name, of }) => html`<span class="key"><i class=${`line-of ${of}`}></i>${name}</span>`)}</figcaption>
    ${lines.length ? html`<${Chart} key=${names} label=${t("{title}, the last five minutes; now {values}", { title, values: now.join(", ") })} lines=${lines} told=${told} dots=${dots} />` : html`<p class="hint">${empty}</p>`}
  </figure>`;
}

// The settings that the canvas's colours depend on.
function useColours() {
  const media = matchMedia("(prefers-color-scheme: dark)");
  const [dark, setDark] = useState(media.matches);
  useEffect(() => {
    const changed = (event) => setDark(event.matches);
    media.addEventListener("change", changed);
    return () => media.removeEventListener("change", changed);
  }, []);
  return `${document.documentElement.dataset.theme} ${dark}`;
}

function Chart({ label, lines, told, dots }) {
  const place = useRef(null);
  const chart = useRef(null);
  const [broken, setBroken] = useState(false);
  const data = [history.at, ...lines.map(({ of }) => history[of])];
  const colours = useColours();
  useEffect(() => {
    let over = false;
    let watcher = null;
    import("./vendor/uplot-1.6.32/uPlot.esm.js")
      .then(({ default: UPlot }) => {
        if (over) return;
        chart.current = new UPlot(optionsOf(place.current, lines, told, dots), data, place.current);
        watcher = new ResizeObserver(() => chart.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
        watcher.observe(place.current);
      })
      .catch(() => !over && setBroken(true));
    return () => {
      over = true;
      watcher?.disconnect();
      chart.current?.destroy();
      chart.current = null;
    };
  }, [colours]);
  useEffect(() => chart.current?.setData(data));
  if (broken) return html`<p class="hint">${t("The plot could not be loaded.")}</p>`;
  return html`<div class="chart" ref=${place} role="img" aria-label=${label}></div>`;
}

function optionsOf(place, lines, told, dots) {
  const colour = (name) => {
    const probe = document.createElement("i"); // in the form that a canvas takes
    probe.style.color = `var(${name})`;
    place.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };
  const axis = { stroke: colour("--muted"), ticks: { show: false }, font: "11px system-ui" };
  const minutes = Array.from({ length: SPAN / 60 }, (_, index) => SPAN / 60 - 1 - index); // from 4 minutes ago to 0
  return {
    width: place.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    padding: [8, 14, 0, 0],
    scales: {
      x: { time: false, range: (_, __, to) => [to - SPAN, to] },
      y: { range: (_, __, to) => [0, Math.max(1, (to ?? 0) * 1.1)] },
    },
    axes: [
      {
        ...axis,
        size: 20,
        gap: 2,
        grid: { show: false },
        splits: (_, __, ___, to) => minutes.map((ago) => to - 60 * ago),
        values: () => minutes.map((ago) => (ago ? `−${ago} min` : "now")),
      },
      {
        ...axis,
        grid: { stroke: colour("--line"), width: 1 },
        size: 46,
        space: 26,
        incrs: STEPS,
        values: (_, ticks) => ticks.map(told),
      },
    ],
    series: [
      {},
      ...lines.map(({ of }) => {
        const stroke = colour(`--line-${of}, var(--line-waiting)`);
        return { stroke, width: dots ? 1 : 1.5, spanGaps: true, points: { show: dots, size: 5, fill: stroke } };
      }),
    ],
  };
}
