// The settings of conversations. A session has its own in its metadata, so they are the same in every browser, and
// its forks have them too. Those of new conversations, and presets, are kept by this browser.

import { apiKey } from "./api.js";
import { remember, remembered, state, update } from "./store.js";

// Texts as they are typed; "" leaves it to the model or the server. `system` are the instructions: a session has them
// among its messages.
export const UNSET = {
  model: "",
  system: "",
  temperature: "",
  topP: "",
  topK: "",
  minP: "",
  seed: "",
  maxTokens: "",
  effort: "",
  tools: "", // off
  format: "", // json | schema
  schema: "",
};
const NUMBERS = { temperature: "temperature", topP: "top_p", topK: "top_k", minP: "min_p", seed: "seed", maxTokens: "max_tokens" };
const KEYS = ["settings", "settings:2", "settings:3"]; // of metadata, whose values are short
const PART = 512; // characters

// Of anything that was stored, what is a setting.
const only = (stored) => {
  const known = Object.entries(stored ?? {}).filter(([name, value]) => name in UNSET && typeof value === "string");
  return { ...UNSET, ...Object.fromEntries(known) };
};

const given = (settings) => Object.fromEntries(Object.entries(settings).filter(([, value]) => value !== ""));

// --- of a session --------------------------------------------------------------------------------------------

export function settingsOf(session) {
  const text = KEYS.map((key) => session?.metadata[key] ?? "").join("");
  try {
    return only(text ? JSON.parse(text) : {});
  } catch {
    return UNSET; // another client has written it
  }
}

// As pairs of metadata, in place of those that `metadata` has; null if they are too long.
export function withSettings(metadata, { system: _, ...settings }) {
  const text = Object.keys(given(settings)).length ? JSON.stringify(given(settings)) : "";
  if (text.length > PART * KEYS.length) return null;
  const rest = Object.entries(metadata).filter(([key]) => !KEYS.includes(key));
  const parts = KEYS.map((key, at) => [key, text.slice(at * PART, (at + 1) * PART)]).filter(([, part]) => part);
  return Object.fromEntries([...rest, ...parts]);
}

// The settings that hold for the next turn.
export const settingsNow = () => {
  const session = state.sessions.get(state.current) ?? state.tree?.family.sessions.get(state.current);
  return session ? settingsOf(session) : state.settings;
};

// The instructions that the open conversation has; "" for none.
export const instructionsNow = () =>
  state.messages.findLast(({ role }) => role === "system" || role === "developer")?.content ?? "";

// The draft of instructions that were changed for an open conversation: they are sent with its next message.
export const instructionsDraft = (id) => `${id} instructions`;

// What they are in a request.
export function wishOf(settings) {
  const wish = {};
  for (const [name, field] of Object.entries(NUMBERS)) if (settings[name] !== "") wish[field] = Number(settings[name]);
  if (settings.model && state.models.some(({ id }) => id === settings.model)) wish.model = settings.model;
  if (settings.effort) wish.reasoning_effort = settings.effort;
  if (settings.tools === "off") wish.tool_choice = "none";
  if (settings.format === "json") wish.response_format = { type: "json_object" };
  if (settings.format === "schema") {
    wish.response_format = { type: "json_schema", json_schema: { name: "reply", schema: JSON.parse(settings.schema) } };
  }
  return wish;
}

// Whether a text is a JSON object, as a schema must be.
export function isSchema(text) {
  try {
    const read = JSON.parse(text);
    return typeof read === "object" && read !== null && !Array.isArray(read);
  } catch {
    return false;
  }
}

// --- of this browser -----------------------------------------------------------------------------------------

export const readDefaults = () => only(remembered("settings", {}, apiKey.place()));

export function keepDefaults(settings) {
  remember("settings", settings, apiKey.place());
  update({ settings });
}

// Presets by name.
export const presets = () => new Map(Object.entries(remembered("presets", {}, apiKey.place())).map(([name, one]) => [name, only(one)]));

export function keepPreset(name, settings) {
  const all = presets();
  if (settings) all.set(name, given(settings));
  else all.delete(name);
  remember("presets", Object.fromEntries(all), apiKey.place());
}
