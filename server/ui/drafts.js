// What was written and not sent, by conversation. It is stored with the key.

import { apiKey } from "./api.js";
import { remember, remembered } from "./store.js";

const MOST_DRAFTS = 50;
let drafts = null; // as this tab knows them, also without storage

// Another tab may have written some since.
function readDrafts() {
  drafts = new Map(Object.entries(remembered("drafts", Object.fromEntries(drafts ?? []), apiKey.place())));
  return drafts;
}

export const draftOf = (id) => (drafts ?? readDrafts()).get(id ?? "new") ?? "";

export function keepDraft(id, text) {
  const name = id ?? "new";
  readDrafts().delete(name);
  if (text) drafts.set(name, text); // at the end: the oldest ones are dropped
  remember("drafts", Object.fromEntries([...drafts].slice(-MOST_DRAFTS)), apiKey.place());
}
