// The tiers of the cache in this page's words. One that is not named here goes by its own name.

export const ALWAYS = ["device", "host", "disk"]; // are shown where they hold nothing, too

const NAMES = { device: "device", host: "host memory", disk: "disk", remote: "remote store" };
const SOURCES = { device: "On the device already", remote: "Loaded from the remote store" };
const LETTERS = { disk: "S" }; // D is the device

export const nameOf = (tier) => NAMES[tier] ?? tier;
export const sourceOf = (tier) => SOURCES[tier] ?? `Loaded from ${nameOf(tier)}`;
export const letterOf = (tier) => LETTERS[tier] ?? tier[0].toUpperCase();

// These tiers, nearest first; those that are not named above come last.
export const inOrder = (tiers) => [
  ...Object.keys(NAMES).filter((tier) => tiers.has(tier)),
  ...[...tiers].filter((tier) => !(tier in NAMES)),
];
