// A branch as a file that other programs read: its messages as Markdown or JSON.

import { getJson } from "./api.js";
import { report, sessionPath as path, titleOf } from "./sessions.js";
import { state } from "./store.js";
import { t } from "./words.js";

const ROLES = { user: t("You"), assistant: t("Reply"), tool: t("Result of a tool") };

const messagesOf = async (id) =>
  id === state.current ? state.messages : (await getJson(path(id, "/messages"))).data;

const fenced = (text, language) => `\`\`\`${language}\n${text}\n\`\`\``;

function asMarkdown(title, messages) {
  const parts = messages.map((message) => {
    const said = [message.content];
    if (message.media?.length) said.unshift(t("({n} pictures or sounds are not part of this file)", { n: message.media.length }));
    for (const { function: call } of message.tool_calls ?? []) {
      said.push(`${t("Called {name}", { name: call.name })}\n\n${fenced(call.arguments, "json")}`);
    }
    return `## ${ROLES[message.role] ?? t("Instructions")}\n\n${said.filter(Boolean).join("\n\n")}`;
  });
  return `# ${title}\n\n${parts.join("\n\n")}\n`;
}

// As a request to the API takes them.
function asJson(title, messages) {
  const plain = messages.map(({ role, content, reasoning_content: thought, tool_calls: calls, tool_call_id: call }) => ({
    role,
    content,
    reasoning_content: thought,
    tool_calls: calls,
    tool_call_id: call,
  }));
  return `${JSON.stringify({ title, messages: plain }, null, 2)}\n`;
}

const KINDS = {
  md: { write: asMarkdown, type: "text/markdown" },
  json: { write: asJson, type: "application/json" },
};

// Save the branch as a file of one of the `KINDS`.
export async function saveText(id, kind) {
  try {
    const session = state.sessions.get(id) ?? (await getJson(path(id)));
    const text = KINDS[kind].write(titleOf(session), await messagesOf(id));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: KINDS[kind].type }));
    link.download = `${id}.${kind}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  } catch (error) {
    report(error);
  }
}
