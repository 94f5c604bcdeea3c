// The words of the page. They stand in the code in English, in calls of `t` and `plural`; `words/` has a file for each
// other language, with all of them. The language is the browser's, if there is a file, or the one chosen in the
// settings. Modules that import this one wait for it.

const NAME = "warmturn-language";

// By the name that each has for itself.
export const LANGUAGES = { en: "English", de: "Deutsch", he: "עברית" };
const RIGHT_TO_LEFT = ["he"];

// The chosen language; "" for the browser's.
export function chosenLanguage() {
  try {
    const kept = JSON.parse(localStorage.getItem(NAME) ?? '""');
    return kept in LANGUAGES ? kept : "";
  } catch {
    return "";
  }
}

// Choose a language, and load the page again in it.
export function chooseLanguage(name) {
  try {
    localStorage.setItem(NAME, JSON.stringify(name));
  } catch {
    // no storage: the browser's language stays
  }
  location.reload();
}

const ofBrowser = () => navigator.languages.map((name) => name.split("-")[0]).find((name) => name in LANGUAGES);

async function read(name) {
  try {
    return name === "en" ? {} : (await import(`./words/${name}.js`)).default;
  } catch {
    return null; // the file did not come: English
  }
}

const wanted = chosenLanguage() || ofBrowser() || "en";
const found = await read(wanted);
const table = found ?? {};

export const language = found ? wanted : "en";

document.documentElement.lang = language;
document.documentElement.dir = RIGHT_TO_LEFT.includes(language) ? "rtl" : "ltr";

const forms = new Intl.PluralRules(language);
const whole = new Intl.NumberFormat(language, { maximumFractionDigits: 0 });
const lists = new Intl.ListFormat(language);

export const count = (number) => whole.format(Math.round(number));
export const decimal = (number, digits) =>
  number.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });
export const listed = (names) => lists.format(names);

const filled = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);

// The text in the page's language. `values` stand in it as {name}.
export const t = (text, values = {}) => filled(table[text] ?? text, values);

// One of two texts, or of the forms that the language has, by a number. It stands in them as {n}.
export function plural(number, one, many, values = {}) {
  const form = forms.select(number);
  const text = table[many]?.[form] ?? table[many]?.other ?? (number === 1 ? one : many);
  return filled(text, { ...values, n: count(number) });
}
