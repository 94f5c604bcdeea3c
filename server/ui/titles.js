// The title of a conversation that is begun here.

const TITLE = 60; // characters
const HEADING = /^(?:#{1,6}|>|[-*+](?: \[[ xX]\])?) +/; // or a quotation, an item or a task
const MARKED = /(?<![\p{L}\p{N}_*`])(\*\*|`+)(?=[^\s*`])(.+?)(?<=[^\s*`])\1(?![\p{L}\p{N}_*`])/gu; // bold, and code

export function titleFor(text) {
  const first = text.trim().split("\n")[0].replace(/\s+/g, " ");
  const line = (first.replace(HEADING, "") || first).replace(MARKED, "$2");
  if (line.length <= TITLE) return line;
  return `${line.slice(0, TITLE).replace(/\s+\S*$/, "")}…`;
}
