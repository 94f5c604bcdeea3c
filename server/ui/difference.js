// What two texts do not have in common, by words.

const MOST = 1500; // words of a text: longer ones are compared by their ends only

const wordsOf = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

// The lengths of the longest common subsequences of what is behind each pair of places.
function lengthsOf(one, other) {
  const width = other.length + 1;
  const lengths = new Uint16Array((one.length + 1) * width);
  for (let i = one.length - 1; i >= 0; i -= 1) {
    for (let j = other.length - 1; j >= 0; j -= 1) {
      const next = (i + 1) * width + j;
      lengths[i * width + j] = one[i] === other[j] ? lengths[next + 1] + 1 : Math.max(lengths[next], lengths[i * width + j + 1]);
    }
  }
  return (i, j) => lengths[i * width + j];
}

const join = (parts, text, same) => {
  const last = parts.at(-1);
  if (last?.same === same) last.text += text;
  else parts.push({ text, same });
};

// Both texts as parts { text, same }.
export function differencesOf(left, right) {
  const [one, other] = [wordsOf(left), wordsOf(right)];
  let start = 0;
  while (start < one.length && one[start] === other[start]) start += 1;
  let end = 0;
  while (end < Math.min(one.length, other.length) - start && one.at(-1 - end) === other.at(-1 - end)) end += 1;
  const [a, b] = [one.slice(start, one.length - end), other.slice(start, other.length - end)];
  const isLong = a.length > MOST || b.length > MOST;
  const length = isLong ? () => 0 : lengthsOf(a, b);
  const parts = [[], []];
  const both = (text) => parts.forEach((some) => join(some, text, true));
  both(one.slice(0, start).join(""));
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (!isLong && i < a.length && j < b.length && a[i] === b[j]) {
      both(a[i]);
      i += 1;
      j += 1;
    } else if (j >= b.length || (i < a.length && length(i + 1, j) >= length(i, j + 1))) {
      join(parts[0], a[i], false);
      i += 1;
    } else {
      join(parts[1], b[j], false);
      j += 1;
    }
  }
  both(one.slice(one.length - end).join(""));
  return parts.map((some) => some.filter(({ text }) => text));
}
