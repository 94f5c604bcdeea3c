// The page's names of the cache's tiers. A tier that is not listed keeps its own name.

import { t } from "./words.js";

export const ALWAYS = ["device", "host", "disk"]; // shown even if they hold nothing

const NAMES = { device: t("device"), host: t("host memory"), disk: t("disk"), remote: t("remote store") };
const SOURCES = { device: t("On the device already"), remote: t("Loaded from the remote store") };
const LETTERS = { disk: "S" }; // D is the device

export const nameOf = (tier) => NAMES[tier] ?? tier;
export const sourceOf = (tier) => SOURCES[tier] ?? t("Loaded from {tier}", { tier: nameOf(tier) });
const SHORT = { host: t("host") };

export const shortOf = (tier) => SHORT[tier] ?? nameOf(tier);
export const letterOf = (tier) => LETTERS[tier] ?? tier[0].toUpperCase();

// Tiers in order, nearest first; unlisted ones come last.
export const inOrder = (tiers) => [
  ...Object.keys(NAMES).filter((tier) => tiers.has(tier)),
  ...[...tiers].filter((tier) => !(tier in NAMES)),
];
