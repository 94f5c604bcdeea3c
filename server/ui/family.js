// A session and its forks as one tree of turns. Two sessions share a turn where it has the same id in both.

export const TIERS = ["device", "host", "disk", "remote"];

// What a turn's tokens cost, part by part, in the order in which they are drawn. They add up to prompt and reply.
export function costOf(turn) {
  const { cache } = turn;
  const parts = cache
    ? { ...cache.reused, recomputed: cache.recomputed, fresh: cache.new }
    : { device: turn.cached_tokens, fresh: turn.prompt_tokens - turn.cached_tokens };
  return { device: 0, host: 0, disk: 0, remote: 0, recomputed: 0, fresh: 0, ...parts, reply: turn.completion_tokens };
}

export const reusedOf = (cost) => cost.device + cost.host + cost.disk + cost.remote;
export const loadedOf = (cost) => cost.host + cost.disk + cost.remote;
export const totalOf = (cost) => reusedOf(cost) + cost.recomputed + cost.fresh + cost.reply;

// The nodes of a tree of /v1/sessions/{id}/tree: id -> { id, turn, parent, children, sessions, kv }, under one `root`
// without a turn. `kv` has the tiers that hold the timeline up to the turn's end, for any session that has it.
export function familyOf(tree) {
  const root = { id: null, turn: null, parent: null, children: [], sessions: [], kv: new Set() };
  const nodes = new Map();
  const paths = new Map(); // session id -> its nodes
  for (const { session, turns } of tree.data) {
    let node = root;
    const path = [];
    root.sessions.push(session.id);
    for (const turn of turns ?? []) {
      let next = nodes.get(turn.id);
      if (!next) {
        next = { id: turn.id, turn, parent: node, children: [], sessions: [], kv: new Set() };
        nodes.set(turn.id, next);
        node.children.push(next);
      }
      next.sessions.push(session.id);
      const end = turn.prompt_tokens + turn.completion_tokens;
      // The last sampled token of a timeline is never in the cache.
      for (const tier of TIERS) if ((session.kv?.[tier]?.tokens ?? 0) >= end - 1) next.kv.add(tier);
      path.push(next);
      node = next;
    }
    paths.set(session.id, path);
  }
  for (const node of nodes.values()) node.children.sort((one, other) => one.turn.created_at - other.turn.created_at);
  root.children.sort((one, other) => one.turn.created_at - other.turn.created_at);
  return { root, nodes, paths, sessions: new Map(tree.data.map(({ session }) => [session.id, session])) };
}

// The session to open for a node: the one used last of those that have it.
export function latestOf(family, node) {
  const used = (id) => family.sessions.get(id).last_used_at;
  return node.sessions.reduce((best, id) => (used(id) > used(best) ? id : best));
}

// The turns that stand where this one does, itself among them.
export const variantsOf = (node) => node.parent.children;

const sizeOf = (node) => 1 + node.children.reduce((sum, child) => sum + sizeOf(child), 0);
const SHOWN_OF_SIDE = 3; // turns of a side branch that are shown; more are folded

// The tree as rows from top to bottom. Side branches stand right below the turn that they leave, one lane further in;
// the branch of `current` goes straight on. Each row: { node, lane, from, through, hidden }: `from` is the lane of its
// parent, `through` tells of the lines that pass it, { lane, current }, `hidden` the number of turns that are folded below it.
export function rowsOf(family, current, unfolded) {
  const rows = [];
  const main = new Set((family.paths.get(current) ?? []).map((node) => node.id));
  const walk = (start, startLane, startFrom, through) => {
    let [node, lane, from] = [start, startLane, startFrom];
    for (;;) {
      const onward = node.children.find((child) => main.has(child.id)) ?? node.children.at(-1);
      const sides = node.children.filter((child) => child !== onward);
      const below = sizeOf(node) - 1;
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
  return rows;
}
