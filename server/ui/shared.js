// The page behind a link: a branch to read, without a key. The link's secret is in the address behind the #, which
// browsers send to nobody; it goes to the server in a header.

import { html, render } from "./vendor/htm-3.1.1/standalone.module.js";
import { Markdown } from "./markdown.js";
import { language, t } from "./words.js";

const ROLES = { user: t("You"), assistant: t("Reply") };

const dayOf = (seconds) => new Date(seconds * 1000).toLocaleDateString(language, { dateStyle: "long" });

const Said = ({ message }) => {
  if (!(message.role in ROLES)) {
    return html`<details class="message other"><summary>${message.role === "tool" ? t("Result of a tool") : t("Instructions")}</summary>
      <div>${message.content}</div></details>`;
  }
  const isUser = message.role === "user";
  return html`<article class=${`message ${message.role}`} aria-label=${ROLES[message.role]}>
    ${message.reasoning_content && html`<details class="thought"><summary>${t("Reasoning")}</summary><${Markdown} text=${message.reasoning_content} /></details>`}
    <div class=${isUser ? "bubble" : ""}>
      ${message.media?.length > 0 && html`<p class="hint">${t("A picture or sound is not shown here.")}</p>`}
      <${Markdown} text=${message.content} />
    </div>
    ${(message.tool_calls ?? []).map(({ function: call }) => html`<details class="thought">
      <summary>${t("Called {name}", { name: call.name })}</summary><pre tabindex="0" dir="ltr"><code>${call.arguments}</code></pre></details>`)}
  </article>`;
};

const Branch = ({ title, created_at: at, expires_at: until, messages }) =>
  html`<header class="head shared-head"><h1><span class="title">${title}</span></h1></header>
    <div class="messages shared">
      <p class="hint">${t("Shared on {day}, to be read until {until}.", { day: dayOf(at), until: dayOf(until) })}</p>
      ${messages.map((message) => html`<${Said} key=${message.index} message=${message} />`)}
    </div>`;

const Nothing = ({ words }) => html`<div class="messages shared"><p role="alert">${words}</p></div>`;

async function read() {
  const response = await fetch(new URL("../v1/shared", document.baseURI), {
    headers: { "x-share-secret": location.hash.slice(1) },
    cache: "no-store",
  });
  if (response.ok) return html`<${Branch} ...${await response.json()} />`;
  if (response.status === 404) return html`<${Nothing} words=${t("This link leads nowhere: it has expired, or was revoked.")} />`;
  return html`<${Nothing} words=${t("The server cannot show this now. Try again later.")} />`;
}

async function show() {
  const place = document.getElementById("app");
  try {
    render(await read(), place);
  } catch {
    render(html`<${Nothing} words=${t("The server does not answer.")} />`, place);
  }
  document.title = `${document.querySelector("h1")?.textContent ?? t("A link")} · warmturn`;
}

addEventListener("hashchange", show);
show();
