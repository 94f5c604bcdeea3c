// A session and its forks as one tree of turns. Two sessions share a turn where it has the same id in both.

// The cost of a turn: tokens `reused`, by tier, and tokens computed. Together they are its prompt and reply.
export function costOf(turn) {
  const { cache } = turn;
  const parts = cache
    ? { reused: cache.reused, recomputed: cache.recomputed, fresh: cache.new }
    : { reused: { device: turn.cached_tokens }, fresh: turn.prompt_tokens - turn.cached_tokens };
  return { ...NOTHING, ...parts, reply: turn.completion_tokens };
}

const NOTHING = { reused: {}, recomputed: 0, fresh: 0, reply: 0 };

function sumOf(one, other) {
  const reused = { ...one.reused };
  for (const [tier, tokens] of Object.entries(other.reused)) reused[tier] = (reused[tier] ?? 0) + tokens;
  const computed = ["recomputed", "fresh", "reply"].map((part) => [part, one[part] + other[part]]);
  return { reused, ...Object.fromEntries(computed) };
}

export const reusedOf = (cost) => Object.values(cost.reused).reduce((sum, tokens) => sum + tokens, 0);
export const loadedOf = (cost) => reusedOf(cost) - (cost.reused.device ?? 0);
export const totalOf = (cost) => reusedOf(cost) + cost.recomputed + cost.fresh + cost.reply;

const nodeOf = (turn, parent) => {
  const cost = turn ? costOf(turn) : NOTHING;
  const spent = parent ? sumOf(parent.spent, cost) : cost;
  return { id: turn?.id ?? null, turn, parent, cost, spent, size: 1, children: [], sessions: [], kv: new Set() };
};

// The nodes of a tree of /v1/sessions/{id}/tree without the sessions that are `removed`:
// id -> { id, turn, parent, children, sessions, cost, spent, size, kv }, under one `root` without a turn. `spent` is the
// cost of all turns up to here, `size` counts the node and what is below it, `kv` has the tiers that hold the timeline up
// to the turn's end, for any session that has it.
export function familyOf(tree, removed) {
  const root = nodeOf(null, null);
  const nodes = new Map();
  const paths = new Map(); // session id -> its nodes
  const shown = tree.data.filter(({ session }) => !removed.has(session.id));
  for (const { session, turns } of shown) {
    let node = root;
    const path = [];
    root.sessions.push(session.id);
    for (const turn of turns ?? []) {
      let next = nodes.get(turn.id);
      if (!next) {
        next = nodeOf(turn, node);
        nodes.set(turn.id, next);
        node.children.push(next);
      }
      next.sessions.push(session.id);
      const end = turn.prompt_tokens + turn.completion_tokens;
      // The last sampled token of a timeline is never in the cache.
      for (const [tier, { tokens }] of Object.entries(session.kv ?? {})) if (tokens >= end - 1) next.kv.add(tier);
      path.push(next);
      node = next;
    }
    paths.set(session.id, path);
  }
  for (const node of [...nodes.values()].reverse()) node.parent.size += node.size; // children come after their parent
  for (const node of [root, ...nodes.values()])
    node.children.sort((one, other) => one.turn.created_at - other.turn.created_at);
  return { root, nodes, paths, sessions: new Map(shown.map(({ session }) => [session.id, session])) };
}

// The session to open for a node: the one used last of those that have it.
export function latestOf(family, node) {
  const used = (id) => family.sessions.get(id).last_used_at;
  return node.sessions.reduce((best, id) => (used(id) > used(best) ? id : best));
}

// The siblings of a turn, itself included.
export const variantsOf = (node) => node.parent.children;

// Whether a sibling has the same user message, so that only the replies differ.
export const isTwin = (node) =>
  variantsOf(node).some((other) => other !== node && other.turn.preview === node.turn.preview);

const SHOWN_OF_SIDE = 3; // turns of a side branch that are shown; more are folded

// The tree as rows from top to bottom. Side branches are right below the turn where they begin, one lane further in;
// the branch of `current` stays in its lane. Each row: { node, lane, from, through, hidden, last, current, at, among }:
// `from` is the lane of its parent, `through` are the lines that pass it, { lane, current }, `hidden` the number of
// turns that are folded below it, and it is number `at` of the `among` rows beside it in that lane.
export function rowsOf(family, current, unfolded) {
  const rows = [];
  const main = new Set((family.paths.get(current) ?? []).map((node) => node.id));
  const walk = (start, startLane, startFrom, through) => {
    let [node, lane, from] = [start, startLane, startFrom];
    for (;;) {
      const onward = node.children.find((child) => main.has(child.id)) ?? node.children.at(-1);
      const sides = node.children.filter((child) => child !== onward);
      const below = node.size - 1;
      const fold =
        lane > 0 &&
        node.turn &&
        from !== lane &&
        below >= SHOWN_OF_SIDE &&
        !unfolded.has(node.id) &&
        !main.has(node.id);
      const isCurrent = main.has(node.id) || !node.turn;
      rows.push({ node, lane, from, through, hidden: fold ? below : 0, last: fold || !onward, current: isCurrent });
      if (fold || !onward) return;
      for (const side of sides) walk(side, lane + 1, lane, [...through, { lane, current: main.has(onward.id) }]);
      [node, from] = [onward, lane];
    }
  };
  walk(family.root, 0, 0, []);
  return counted(rows);
}

function counted(rows) {
  const open = []; // lane -> the rows there since the last one further out
  for (const row of rows) {
    open.length = row.lane + 1;
    open[row.lane] ??= [];
    row.at = open[row.lane].push(row);
    row.beside = open[row.lane];
  }
  for (const row of rows) row.among = row.beside.length;
  return rows;
}
