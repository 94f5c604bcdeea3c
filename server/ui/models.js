// The models that the server offers, and the one of the open conversation.

import { getJson } from "./api.js";
import { settingsNow } from "./settings.js";
import { state, update } from "./store.js";

export async function loadModels() {
  const { data } = await getJson("v1/models");
  const chats = data.filter(({ task }) => (task ?? "generate") === "generate"); // others embed or score
  const meaning = data.some(({ task, status }) => task === "embed" && status?.value === "loaded");
  update({ models: chats.length ? chats : data, meaning });
}

// The model that answers in the open conversation: the chosen one, or else the server's first; null before it is known.
export const modelNow = () => modelNamed(settingsNow().model) ?? state.models[0] ?? null;

export const modelNamed = (name) => state.models.find(({ id }) => id === name);

// How a model is doing, for a list: "" for one that can answer at once.
export const doingOf = ({ status }) => (status.value === "loaded" ? "" : status.failed ? "failed" : status.value);
