// Pictures and sounds: chosen, dropped or pasted into a message, and shown where they were said.

import { html, useEffect, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { call } from "./api.js";
import { Icon, IconButton } from "./bits.js";
import { modelNow } from "./models.js";
import { state, toast, update } from "./store.js";
import { t } from "./words.js";

const LARGEST = 20 * 2 ** 20; // bytes, as the server has it
const MOST = 100;
const TYPES = {
  image: ["image/png", "image/jpeg", "image/webp", "image/gif"],
  audio: ["audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave", "audio/flac", "audio/x-flac", "audio/ogg", "audio/mpeg"],
};
const ADD = {
  image: t("Add pictures"),
  audio: t("Add sounds"),
  both: t("Add pictures or sounds"),
};
const NOT_TAKEN = { image: t("This model takes no pictures."), audio: t("This model takes no sounds.") };
const NOT_GOOD = {
  image: t("Pictures are PNG, JPEG, WebP or GIF of at most 20 MB."),
  audio: t("Sounds are WAV, FLAC, Ogg or MP3 of at most 20 MB."),
};

const kindsTaken = () => Object.keys(TYPES).filter((kind) => modelNow()?.warmturn?.media?.includes(kind));
export const takesMedia = () => kindsTaken().length > 0;
const kindOf = ({ type }) => type.slice(0, type.indexOf("/"));
const isMedium = (file) => kindOf(file) in TYPES;

// --- what is written and not sent ----------------------------------------------------------------------------

const waiting = new Map(); // conversation -> media beside its draft; not kept when the page is closed

export const picturesOf = (id) => waiting.get(id ?? "new") ?? [];

export function keepPictures(id, pictures) {
  waiting.set(id ?? "new", pictures);
  update({ drafts: state.drafts + 1 });
}

const read = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ kind: kindOf(file), at: 0, url: reader.result, blob: file });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

// Put files beside the draft of a conversation.
export async function addPictures(id, files) {
  const media = [...files].filter(isMedium);
  const refused = media.find((file) => !kindsTaken().includes(kindOf(file)));
  if (refused) return toast(NOT_TAKEN[kindOf(refused)]);
  const good = media.filter((file) => TYPES[kindOf(file)].includes(file.type) && file.size <= LARGEST);
  const bad = media.find((file) => !good.includes(file));
  if (bad) toast(NOT_GOOD[kindOf(bad)]);
  const added = await Promise.all(good.map(read));
  if (added.length) keepPictures(id, [...picturesOf(id), ...added].slice(0, MOST));
}

// A message as it is sent: with parts, if it has pictures. What the server has is named by its path.
export function wire({ media, ...message }) {
  if (!media?.length) return message;
  const parts = [];
  let from = 0;
  for (const one of media) {
    const at = Math.min(Math.max(one.at, from), message.content.length);
    if (at > from) parts.push({ type: "text", text: message.content.slice(from, at) });
    const type = one.kind === "image" ? "image_url" : "audio_url";
    parts.push({ type, [type]: { url: one.url ?? `/v1/media/${one.digest}` } });
    from = at;
  }
  if (from < message.content.length) parts.push({ type: "text", text: message.content.slice(from) });
  return { ...message, content: parts };
}

// --- shown ---------------------------------------------------------------------------------------------------

// The address of a medium's bytes in this page, null until they are here, and whether they are lost. The request for
// one that the server has carries the key, which an address cannot.
function useBytes(one) {
  const [source, setSource] = useState(null);
  const [lost, setLost] = useState(false);
  useEffect(() => {
    let made = null;
    let gone = false;
    const show = (blob) => {
      if (!gone) setSource((made = URL.createObjectURL(blob)));
    };
    if (one.blob) show(one.blob);
    else
      call(`v1/media/${one.digest}`)
        .then((response) => response.blob())
        .then(show)
        .catch(() => !gone && setLost(true));
    return () => {
      gone = true;
      if (made) URL.revokeObjectURL(made);
    };
  }, [one]);
  return [source, lost];
}

export function Picture({ one, label = t("Picture") }) {
  const [source, lost] = useBytes(one);
  if (lost) return html`<span class="picture lost">${t("This picture cannot be shown.")}</span>`;
  const size = one.width ? { width: one.width, height: one.height } : {};
  return html`<img class="picture" src=${source ?? undefined} alt=${label} ...${size} />`;
}

function Sound({ one, label }) {
  const [source, lost] = useBytes(one);
  if (lost) return html`<span class="picture lost">${t("This sound cannot be played.")}</span>`;
  return html`<audio class="sound" controls preload="metadata" src=${source ?? undefined} aria-label=${label}></audio>`;
}

const ANIMATED = ["gif", "webp", "png"]; // videos that are shown as pictures

const Medium = ({ one, index }) =>
  one.kind === "video" && !ANIMATED.includes(one.format)
    ? html`<span class="picture lost">${t("A video")}</span>`
    : one.kind !== "audio"
    ? html`<${Picture} one=${one} label=${t("Picture {n}", { n: index + 1 })} />`
    : html`<${Sound} one=${one} label=${t("Sound {n}", { n: index + 1 })} />`;

// The pictures and sounds of a message, if it has any.
export function Pictures({ media }) {
  if (!media?.length) return null;
  return html`<div class="pictures">
    ${media.map((one, index) => html`<${Medium} key=${one.digest ?? index} one=${one} index=${index} />`)}
  </div>`;
}

// --- the input field -----------------------------------------------------------------------------------------

// What is beside a draft, and can be taken away.
export function Attached({ id, pictures }) {
  if (!pictures.length) return null;
  const remove = (one) => keepPictures(id, picturesOf(id).filter((other) => other !== one));
  return html`<ul class="attached" aria-label=${t("Pictures and sounds to send")}>
    ${pictures.map(
      (one, index) => html`<li key=${one.url}>
        <${Medium} one=${one} index=${index} />
        <${IconButton} icon="close" onClick=${() => remove(one)}
          label=${one.kind === "image" ? t("Remove picture {n}", { n: index + 1 }) : t("Remove sound {n}", { n: index + 1 })} />
      </li>`,
    )}
  </ul>`;
}

export function PictureButton({ id }) {
  const input = useRef(null);
  const chosen = () => {
    addPictures(id, input.current.files);
    input.current.value = "";
  };
  const kinds = kindsTaken();
  const label = kinds.length > 1 ? ADD.both : ADD[kinds[0]];
  return html`<button type="button" class="attach" aria-label=${label} title=${label} onClick=${() => input.current.click()}>
    <${Icon} name="picture" />
    <input ref=${input} class="hidden" type="file" accept=${kinds.flatMap((kind) => TYPES[kind]).join()} multiple tabindex="-1" aria-hidden="true"
      onClick=${(event) => event.stopPropagation()} onChange=${chosen} />
  </button>`;
}

// Files that are dropped anywhere on the page go to the open conversation.
export function useDrops(id) {
  useEffect(() => {
    const holdsFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    const over = (event) => {
      if (holdsFiles(event)) event.preventDefault(); // else the browser would open the file
    };
    const drop = (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      addPictures(id, event.dataTransfer.files);
    };
    document.addEventListener("dragover", over);
    document.addEventListener("drop", drop);
    return () => {
      document.removeEventListener("dragover", over);
      document.removeEventListener("drop", drop);
    };
  }, [id]);
}

export function pasted(id, event) {
  const files = [...(event.clipboardData?.files ?? [])].filter(isMedium);
  if (!files.length) return;
  event.preventDefault();
  addPictures(id, files);
}
