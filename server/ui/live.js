// What the server does now, read from /metrics while anybody looks.

import { html, useEffect, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { call } from "./api.js";
import { bytes, count, milliseconds } from "./bits.js";

const LOOK = 2000; // milliseconds between two looks
const KEPT = 150; // points of a plot: five minutes
const STEPS = [1, 2, 5]
  .flatMap((digit) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((power) => digit * power))
  .sort((one, other) => one - other);

// Prometheus' text as a function from name and labels to the sum of what matches; null where nothing does.
export function metricsOf(text) {
  const lines = [...text.matchAll(/^warmturn_(\w+)(?:\{(.*)\})? (\S+)$/gm)];
  return (name, labels = "") => {
    const found = lines.filter(([, of, with_ = ""]) => of === name && with_.includes(labels));
    return found.length ? found.reduce((sum, line) => sum + Number(line[3]), 0) : null;
  };
}

// Points of the plots: seconds, tokens a second, milliseconds to the first token, running turns, waiting turns.
const history = [[], [], [], [], []];
let before = null;

function note(metric) {
  const now = {
    at: Date.now() / 1000,
    made: metric("generated_tokens_total"),
    first: metric("time_to_first_token_seconds_sum"),
    firsts: metric("time_to_first_token_seconds_count"),
  };
  const passed = before ? now.at - before.at : 0;
  if (passed > 0 && passed < 60 && now.made >= before.made) {
    const firsts = now.firsts - before.firsts;
    const ttft = firsts > 0 ? (1000 * (now.first - before.first)) / firsts : null;
    const point = [now.at, (now.made - before.made) / passed, ttft, metric("running"), metric("waiting")];
    point.forEach((value, index) => history[index].push(value));
    if (history[0].length > KEPT) for (const line of history) line.shift();
  }
  before = now;
}

function useMetrics() {
  const [seen, setSeen] = useState({ metric: null, error: null });
  useEffect(() => {
    let timer = 0;
    const leaving = new AbortController();
    const look = async () => {
      clearTimeout(timer);
      if (document.visibilityState === "visible") {
        try {
          const metric = metricsOf(await (await call("metrics", { signal: leaving.signal })).text());
          note(metric);
          setSeen({ metric, error: null });
        } catch (error) {
          if (error.name === "AbortError") return;
          setSeen((old) => ({ ...old, error }));
        }
      }
      timer = setTimeout(look, LOOK);
    };
    look();
    document.addEventListener("visibilitychange", look);
    return () => {
      leaving.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", look);
    };
  }, []);
  return seen;
}

// Proxies in front of several servers keep each one's figures to themselves.
const reasonOf = (error) => (error.status === 404 ? "The server's figures cannot be read from here." : error.message);

export function Live() {
  const { metric, error } = useMetrics();
  if (!metric) return html`<p class="hint panel-hint">${error ? reasonOf(error) : "Looking…"}</p>`;
  const last = (line) => history[line].findLast((value) => value !== null) ?? null;
  return html`<div class="live">
    ${error && html`<p class="hint" role="status">${reasonOf(error)}</p>`}
    <section aria-label="Turns">
      <div class="gauges">
        <${Gauge} name="Running" value=${count(metric("running"))} />
        <${Gauge} name="Waiting" value=${count(metric("waiting"))} />
        <${Gauge} name="First token" value=${last(2) === null ? "–" : milliseconds(last(2))} />
        <${Gauge} name="Tokens a second" value=${last(1) === null ? "–" : count(last(1))} />
      </div>
    </section>
    <section aria-labelledby="live-room">
      <h3 id="live-room">Room for cache</h3>
      <${Room} tier="device" name="Device" used=${metric("pages", 'tier="device"')} whole=${metric("pages_capacity", 'tier="device"')} unit="pages" />
      <${Room} tier="host" name="Host memory" used=${metric("pages", 'tier="host"')} whole=${metric("pages_capacity", 'tier="host"')} unit="pages" />
      <${Room} tier="disk" name="Disk" used=${metric("disk_bytes")} whole=${metric("disk_bytes_capacity")} />
      ${metric("remote_bytes") > 0 && html`<${Room} tier="remote" name="Remote store" used=${metric("remote_bytes")} whole=${metric("remote_bytes_capacity")} />`}
    </section>
    <section aria-labelledby="live-time">
      <h3 id="live-time">Last five minutes</h3>
      <${Plot} name="Tokens a second" lines=${[1]} />
      <${Plot} name="Milliseconds to the first token" lines=${[2]} dots=${true} />
      <${Plot} name="Turns running, and waiting" lines=${[3, 4]} />
    </section>
  </div>`;
}

const Gauge = ({ name, value }) => html`<div class="gauge"><span>${name}</span><b>${value}</b></div>`;

function Room({ tier, name, used, whole, unit = null }) {
  if (!whole) return null;
  const told = unit ? `${count(used)} of ${count(whole)} ${unit}` : `${bytes(used)} of ${bytes(whole)}`;
  return html`<div class="room">
    <div><span>${name}</span><span>${told}</span></div>
    <meter class="hidden" min="0" max=${whole} value=${used} aria-label=${name}>${told}</meter>
    <span class="room-bar" aria-hidden="true"><i class=${`part ${tier}`}
      style=${{ width: `${Math.max(used ? 1 : 0, (100 * used) / whole)}%` }}></i></span>
  </div>`;
}

// A colour of the page as a canvas takes it.
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function Plot({ name, lines, dots = false }) {
  const place = useRef(null);
  const chart = useRef(null);
  const data = [history[0], ...lines.map((line) => history[line])];
  const theme = document.documentElement.dataset.theme;
  useEffect(() => {
    let over = false;
    let watcher = null;
    import("./vendor/uplot-1.6.32/uPlot.esm.js").then(({ default: UPlot }) => {
      if (over) return;
      chart.current = new UPlot(optionsOf(place.current.clientWidth, lines.length, dots), data, place.current);
      watcher = new ResizeObserver(() => chart.current.setSize({ width: place.current.clientWidth, height: 92 }));
      watcher.observe(place.current);
    });
    return () => {
      over = true;
      watcher?.disconnect();
      chart.current?.destroy();
      chart.current = null;
    };
  }, [theme]);
  useEffect(() => chart.current?.setData(data));
  return html`<figure class="plot"><figcaption>${name}</figcaption><div ref=${place}
    role="img" aria-label=${`${name}, the last five minutes`}></div></figure>`;
}

function optionsOf(width, lines, dots) {
  const [muted, grid, strokes] = [colour("--muted"), colour("--line"), [colour("--device"), colour("--recomputed")]];
  const axis = { stroke: muted, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const series = strokes
    .slice(0, lines)
    .map((stroke) => ({
      stroke,
      width: dots ? 1 : 1.5,
      spanGaps: true,
      points: { show: dots, size: 5, fill: stroke },
    }));
  return {
    width,
    height: 92,
    legend: { show: false },
    cursor: { show: false },
    padding: [8, 4, 8, 0],
    scales: {
      x: { range: (_, from, to) => [Math.min(from, to - 60), to] },
      y: { range: (_, __, to) => [0, Math.max(1, (to ?? 0) * 1.1)] },
    },
    axes: [
      { show: false },
      {
        ...axis,
        size: 38,
        space: 26,
        incrs: STEPS,
        values: (_, ticks) => ticks.map((tick) => (tick >= 1000 ? `${tick / 1000}k` : tick)),
      },
    ],
    series: [{}, ...series],
  };
}
