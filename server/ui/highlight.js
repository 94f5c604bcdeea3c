// Colours in code, by highlight.js. It and the grammar of a language are loaded when they are first needed.

const MOST = 60_000; // characters: longer code stays plain
const NAMES = {
  bash: "sh zsh",
  c: "h",
  cmake: "",
  cpp: "c++ cc cxx hpp",
  csharp: "cs c#",
  css: "",
  dart: "",
  diff: "patch",
  dockerfile: "docker",
  elixir: "ex exs",
  erlang: "erl",
  go: "golang",
  graphql: "gql",
  haskell: "hs",
  http: "",
  ini: "toml cfg conf",
  java: "",
  javascript: "js jsx mjs cjs",
  json: "json5 jsonc",
  julia: "jl",
  kotlin: "kt kts",
  latex: "tex",
  less: "",
  lua: "",
  makefile: "make mk",
  markdown: "md",
  matlab: "",
  nginx: "",
  objectivec: "objc m mm",
  ocaml: "ml",
  perl: "pl",
  pgsql: "postgres postgresql plpgsql",
  php: "",
  powershell: "ps ps1",
  protobuf: "proto",
  python: "py gyp",
  r: "",
  ruby: "rb",
  rust: "rs",
  scala: "",
  scss: "",
  shell: "console shellsession",
  sql: "",
  swift: "",
  typescript: "ts tsx mts",
  vbnet: "vb",
  vim: "viml",
  xml: "html xhtml svg rss",
  yaml: "yml",
};
const WITHIN = { markdown: ["xml"], php: ["xml"], xml: ["css", "javascript"], shell: ["bash"] }; // grammars that a grammar uses

const byName = new Map(Object.entries(NAMES).flatMap(([name, others]) => [[name, name], ...others.split(" ").map((other) => [other, name])]));
const loaded = new Map(); // name -> promise
let core = null;

async function load(name) {
  core ??= import("./vendor/highlight-11.12.0/core.min.js");
  const [{ default: hljs }, { default: grammar }] = await Promise.all([
    core,
    import(`./vendor/highlight-11.12.0/languages/${name}.min.js`),
    ...(WITHIN[name] ?? []).map(grammarOf),
  ]);
  hljs.registerLanguage(name, grammar);
  return (text) => hljs.highlight(text, { language: name, ignoreIllegals: true }).value;
}

function grammarOf(name) {
  if (!loaded.has(name)) {
    const wanted = load(name).catch((error) => {
      loaded.delete(name); // no connection: the next block tries again
      core = null;
      throw error;
    });
    loaded.set(name, wanted);
  }
  return loaded.get(name);
}

// HTML of the code, not yet sanitised; null if the language is unknown or the code too long.
export async function highlighted(text, language) {
  const name = byName.get(language.toLowerCase());
  if (!name || text.length > MOST) return null;
  try {
    return (await grammarOf(name))(text);
  } catch {
    return null;
  }
}
