// The words of the page. They stand in the code in English, in calls of `t`; `words/` has a file for each other
// language.

// The text in the page's language. `values` stand in it as {name}.
export function t(text, values = {}) {
  return text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}
