// HTML that may be shown: the only way from text of models to the document. The browser accepts no other HTML (trusted
// types).

import DOMPurify from "./vendor/dompurify-3.4.18/purify.es.mjs";

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a b blockquote br button code del div em h1 h2 h3 h4 h5 h6 hr i input li ol p pre s span strong sub sup".split(
      " ",
    ),
    ..."table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: "href class start align type checked disabled tabindex title target rel".split(" "),
  ADD_URI_SAFE_ATTR: "start align type checked disabled tabindex target rel".split(" "), // they hold no addresses
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_TRUSTED_TYPE: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  if (node.nodeName === "INPUT") {
    node.setAttribute("type", "checkbox"); // of a task list; nothing else is an input
    node.setAttribute("disabled", "");
  }
});

export const sanitised = (html) => DOMPurify.sanitize(html, ALLOWED);

export const escaped = (text) => text.replace(/[&<>"']/g, (mark) => `&#${mark.charCodeAt(0)};`);
