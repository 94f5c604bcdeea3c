// Pictures: chosen, dropped or pasted into a message, and shown where they were said.

import { html, useEffect, useRef, useState } from "./vendor/htm-3.1.1/standalone.module.js";
import { call } from "./api.js";
import { Icon, IconButton } from "./bits.js";
import { modelNow } from "./models.js";
import { state, toast, update } from "./store.js";
import { t } from "./words.js";

const LARGEST = 20 * 2 ** 20; // bytes, as the server has it
const MOST = 100;
const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];

export const takesPictures = () => Boolean(modelNow()?.warmturn?.media?.includes("image"));

// --- what is written and not sent ----------------------------------------------------------------------------

const waiting = new Map(); // conversation -> pictures beside its draft; not kept when the page is closed

export const picturesOf = (id) => waiting.get(id ?? "new") ?? [];

export function keepPictures(id, pictures) {
  waiting.set(id ?? "new", pictures);
  update({ drafts: state.drafts + 1 });
}

const read = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ kind: "image", at: 0, url: reader.result, blob: file });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });

// Put files beside the draft of a conversation.
export async function addPictures(id, files) {
  const pictures = [...files].filter(({ type }) => type.startsWith("image/"));
  if (!pictures.length) return;
  if (!takesPictures()) return toast(t("This model takes no pictures."));
  const good = pictures.filter(({ type, size }) => KINDS.includes(type) && size <= LARGEST);
  if (good.length < pictures.length) toast(t("Pictures are PNG, JPEG, WebP or GIF of at most 20 MB."));
  const added = await Promise.all(good.map(read));
  keepPictures(id, [...picturesOf(id), ...added].slice(0, MOST));
}

// A message as it is sent: with parts, if it has pictures. What the server has is named by its path.
export function wire({ media, ...message }) {
  if (!media?.length) return message;
  const parts = [];
  let from = 0;
  for (const one of media) {
    const at = Math.min(Math.max(one.at, from), message.content.length);
    if (at > from) parts.push({ type: "text", text: message.content.slice(from, at) });
    parts.push({ type: "image_url", image_url: { url: one.url ?? `/v1/media/${one.digest}` } });
    from = at;
  }
  if (from < message.content.length) parts.push({ type: "text", text: message.content.slice(from) });
  return { ...message, content: parts };
}

// --- shown ---------------------------------------------------------------------------------------------------

// A picture of a message. The request for one that the server has carries the key, which an address cannot.
export function Picture({ one, label = t("Picture") }) {
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
  if (lost) return html`<span class="picture lost">${t("This picture cannot be shown.")}</span>`;
  const size = one.width ? { width: one.width, height: one.height } : {};
  return html`<img class="picture" src=${source ?? undefined} alt=${label} ...${size} />`;
}

// The pictures of a message, if it has any; of other media the kind.
export function Pictures({ media }) {
  if (!media?.length) return null;
  return html`<div class="pictures">
    ${media.map((one, index) =>
      one.kind === "image"
        ? html`<${Picture} key=${one.digest ?? index} one=${one} label=${t("Picture {n}", { n: index + 1 })} />`
        : html`<span class="picture lost" key=${index}>${t("A sound")}</span>`,
    )}
  </div>`;
}

// --- the input field -----------------------------------------------------------------------------------------

// The pictures beside a draft, which can be taken away.
export function Attached({ id, pictures }) {
  if (!pictures.length) return null;
  const remove = (one) => keepPictures(id, picturesOf(id).filter((other) => other !== one));
  return html`<ul class="attached" aria-label=${t("Pictures to send")}>
    ${pictures.map(
      (one, index) => html`<li key=${one.url}>
        <${Picture} one=${one} label=${t("Picture {n}", { n: index + 1 })} />
        <${IconButton} icon="close" label=${t("Remove picture {n}", { n: index + 1 })} onClick=${() => remove(one)} />
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
  return html`<button type="button" class="attach" aria-label=${t("Add pictures")} title=${t("Add pictures")} onClick=${() => input.current.click()}>
    <${Icon} name="picture" />
    <input ref=${input} class="hidden" type="file" accept=${KINDS.join()} multiple tabindex="-1" aria-hidden="true"
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
  const files = [...(event.clipboardData?.files ?? [])].filter(({ type }) => type.startsWith("image/"));
  if (!files.length) return;
  event.preventDefault();
  addPictures(id, files);
}
