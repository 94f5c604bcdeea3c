// Which messages of a long conversation are rendered: the last ones, and earlier ones when one scrolls up to them.

import { useEffect, useLayoutEffect, useReducer, useRef } from "./vendor/htm-3.1.1/standalone.module.js";

const STEP = 40; // messages
const NEAR = 1200; // pixels above which earlier messages are rendered

// Of `count` messages of session `id` in the scrolled `box`: { from, look }. Messages before number `from` are not
// rendered; `look` is to be called when the box was scrolled. `wanted`: the number of one that has to be there, or null.
export function useWindow(box, id, count, wanted) {
  const [, redraw] = useReducer((times) => times + 1, 0);
  const now = useRef({ id: null, count: 0, from: 0 });
  const below = useRef(null); // pixels from what is seen to the end, while earlier messages are added
  const isLoaded = now.current.id !== id || count < now.current.count || count > now.current.count + STEP;
  const from = isLoaded ? Math.max(0, count - STEP) : now.current.from;
  now.current = { id, count, from: wanted === null ? from : Math.max(0, Math.min(from, wanted - STEP / 2)) };
  const back = (steps) => {
    below.current = box.current.scrollHeight - box.current.scrollTop;
    now.current.from = Math.max(0, now.current.from - steps);
    redraw();
  };
  useLayoutEffect(() => {
    if (below.current === null) return;
    box.current.scrollTop = box.current.scrollHeight - below.current;
    below.current = null;
  });
  useEffect(() => {
    const all = () => back(now.current.from); // paper has all of them
    addEventListener("beforeprint", all);
    return () => removeEventListener("beforeprint", all);
  }, []);
  const look = () => {
    if (now.current.from > 0 && below.current === null && box.current.scrollTop < NEAR) back(STEP / 2);
  };
  return { from: now.current.from, look };
}
