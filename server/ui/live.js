// The server's figures: running turns, speed, latency, tiers.

import { html } from "./vendor/htm-3.1.1/standalone.module.js";
import { bytes, count, milliseconds } from "./bits.js";
import { DRAFT_SOURCES, drafterOf } from "./cost.js";
import { SPAN, history, lastOf, roomsOf, useMetrics } from "./metrics.js";
import { Plot } from "./plot.js";
import { ALWAYS, nameOf } from "./tiers.js";
import { t } from "./words.js";

const FRESH = 5; // seconds for which a figure counts as current
const NO_TURN = [t("Nothing has been answered since you opened this view."), t("Nothing was answered in the last five minutes.")];

// A proxy in front of several servers does not pass on /metrics.
const reasonOf = (error) => (error.status === 404 ? t("The server's figures cannot be read from here.") : error.message);
const short = (value) => (value < 1000 ? String(Math.round(value)) : `${Math.round(value / 100) / 10}k`);

export function Live() {
  const { metric, error } = useMetrics();
  if (!metric && !error) return html`<p class="hint panel-hint">${t("Loading…")}</p>`;
  const told = metric ?? (() => null);
  return html`<div class="live" tabindex="-1">
    ${error && html`<p class="hint" role="status">${reasonOf(error)}${metric && ` ${t("These are the last figures.")}`}</p>`}
    <section aria-label=${t("Turns")}>
      <div class="gauges">
        <${Gauge} name=${t("Running")} value=${told("running")} />
        <${Gauge} name=${t("Waiting")} value=${told("waiting")} />
        <${Gauge} name=${t("First token")} ...${lastOf("first")} words=${milliseconds} />
        <${Gauge} name=${t("Tokens a second")} ...${lastOf("rate")} />
      </div>
    </section>
    <${Drafts} told=${told} />
    <${Rooms} rooms=${roomsOf(metric)} />
    <${Minutes} rooms=${roomsOf(metric)} />
  </div>`;
}

function Gauge({ name, value = null, age = 0, words = count }) {
  return html`<div class="gauge"><span>${name}</span><b>${value === null ? "–" : words(value)}</b>
    ${age > FRESH && html`<small>${agoOf(age)}</small>`}</div>`;
}

const agoOf = (seconds) => (seconds < 60 ? t("{n} s ago", { n: Math.round(seconds) }) : t("{n} min ago", { n: Math.floor(seconds / 60) }));

// How many drafted tokens were right since the server was started, by where they came from.
function Drafts({ told }) {
  const rows = DRAFT_SOURCES.map((source) => ({
    source,
    drafted: told("draft_tokens_total", `source="${source}"`),
    accepted: told("accepted_draft_tokens_total", `source="${source}"`),
  })).filter(({ drafted }) => drafted > 0);
  if (!rows.length) return null;
  return html`<section aria-labelledby="live-drafts">
    <h3 id="live-drafts">${t("Drafted tokens that were right")}</h3>
    ${rows.map(
      ({ source, drafted, accepted }) => html`<div class="room" key=${source}>
        <div><span>${drafterOf(source)}</span>
          <span>${t("{right} of {all} right", { right: count(accepted), all: count(drafted) })}</span></div>
      </div>`,
    )}
  </section>`;
}

function Rooms({ rooms }) {
  const shown = rooms.filter(({ tier, used, whole }) => ALWAYS.includes(tier) || used > 0 || whole > 0);
  return html`<section aria-labelledby="live-room">
    <h3 id="live-room">${t("Room for cache")}</h3>
    ${shown.map((room) => html`<${Room} key=${room.tier} ...${room} />`)}
  </section>`;
}

// A tier without room that holds nothing does not exist; one that holds something has no limit.
function Room({ tier, used, whole, isPaged }) {
  const name = capital(nameOf(tier));
  const isOff = whole === 0 && !used;
  const sizes = isPaged ? t("{used} of {whole} pages", { used: count(used), whole: count(whole) }) : t("{used} of {whole}", { used: bytes(used), whole: bytes(whole) });
  const told = whole === null ? "–" : isOff ? t("off") : whole ? sizes : bytes(used);
  return html`<div class="room">
    <div><span>${name}</span><span>${told}</span></div>
    ${
      whole > 0 &&
      html`<meter class="hidden" min="0" max=${whole} value=${used} aria-label=${name}>${told}</meter>
    <span class="room-bar" aria-hidden="true"><i class=${`part ${tier}`}
      style=${{ width: `${Math.max(used ? 1 : 0, (100 * used) / whole)}%` }}></i></span>`
    }
  </div>`;
}

const capital = (words) => words[0].toUpperCase() + words.slice(1);

function Minutes({ rooms }) {
  const lines = (...all) => all.map(([of, name]) => ({ of, name })).filter(({ of }) => history[of]?.some(Boolean));
  const linesOf = (tiers) => lines(...tiers.map(({ tier }) => [tier, nameOf(tier)]));
  const pages = linesOf(rooms.filter(({ isPaged }) => isPaged));
  const kept = linesOf(rooms.filter(({ isPaged }) => !isPaged));
  const turns = lines(["waiting", t("waiting")], ["running", t("running")]); // the last one is drawn on top
  const isIdle = ["rate", "first", "running", "waiting"].every((of) => lastOf(of) === null);
  const isFull = Date.now() / 1000 - history.at[0] > 0.95 * SPAN; // there are no figures from before the first sample
  return html`<section aria-labelledby="live-time">
    <h3 id="live-time">${t("Last five minutes")}</h3>
    ${
      isIdle
        ? html`<p class="hint">${NO_TURN[Number(isFull)]}</p>`
        : html`<${Plot} title=${t("Tokens a second")} lines=${lines(["rate", t("tokens")])} told=${short} empty=${t("None was written.")} />
      <${Plot} title=${t("Milliseconds to the first token")} lines=${lines(["first", t("milliseconds")])} told=${short}
        empty=${t("None was started.")} dots=${true} />
      <${Plot} title=${t("Turns")} lines=${turns} told=${short} empty=${t("None was running or waiting.")} />`
    }
    <${Plot} title=${t("Pages of cache in use")} lines=${pages} told=${short} empty=${t("None was in use.")} />
    ${kept.length > 0 && html`<${Plot} title=${t("Bytes of cache kept")} lines=${kept} told=${bytes} />`}
  </section>`;
}
