// Which messages of a conversation are drawn: those near the visible ones. The others are there with their text only,
// for searches in the page, screen readers and the length of the scroll bar.

import { Component, h, useEffect, useMemo, useRef } from "./vendor/htm-3.1.1/standalone.module.js";
import { heightOf } from "./blocks.js";
import { isSame } from "./bits.js";
import { t } from "./words.js";

const MARGIN = "200% 0px"; // above and below what is visible. Browsers know the sizes of what is nearer.
const MORE = 60; // pixels of a message beside its text
const ROLES = { user: t("You"), assistant: t("Reply") };

// Tells elements within the scrolled `box` whether they are near: { watch, all, end }.
function watcherOf(box) {
  const known = new Map(); // element -> { isNear, tell }
  const news = new Map(); // element -> what it was not told yet: { near, far }
  let frame = 0;
  const later = () => {
    if (news.size) frame ||= requestAnimationFrame(work);
  };
  // One in each frame, the nearest to what is seen first.
  const work = () => {
    frame = 0;
    const next = [...news].sort(([, one], [, other]) => one.far - other.far).filter(([element]) => !isHeld(element));
    if (!next.length) return;
    const [[element, { near }]] = next;
    news.delete(element);
    known.get(element).tell(near);
    later();
  };
  const seen = (entries) => {
    const middle = box.clientHeight / 2;
    for (const { target, isIntersecting: near, boundingClientRect: at } of entries) {
      if (known.get(target)?.isNear() === !near) news.set(target, { near, far: Math.abs((at.top + at.bottom) / 2 - middle) });
      else news.delete(target);
    }
    later();
  };
  const observer = new IntersectionObserver(seen, { root: box, rootMargin: MARGIN });
  document.addEventListener("selectionchange", later);
  return {
    watch: (element, isNear, tell) => {
      known.set(element, { isNear, tell });
      observer.observe(element);
      return () => {
        observer.unobserve(element);
        known.delete(element);
        news.delete(element);
      };
    },
    all: () => {
      news.clear();
      known.forEach(({ tell }) => tell(true));
    },
    end: () => {
      observer.disconnect();
      document.removeEventListener("selectionchange", later);
    },
  };
}

// Whether somebody uses an element: it has the focus, or selected text.
function isHeld(element) {
  const selection = getSelection();
  return element.contains(document.activeElement) || (!selection.isCollapsed && selection.containsNode(element, true));
}

export function useWatcher(box) {
  const made = useRef(null);
  // Made when the first message asks for it, which is before effects of the list run.
  const watcher = useMemo(() => ({ watch: (...about) => (made.current ??= watcherOf(box.current)).watch(...about) }), []);
  useEffect(() => {
    const all = () => made.current?.all(); // paper has all of them
    addEventListener("beforeprint", all);
    return () => {
      removeEventListener("beforeprint", all);
      made.current?.end();
    };
  }, []);
  return watcher;
}

// Some messages of the list, one after the other. `draw` draws one while they are near; with `begins` they always are.
export class Stretch extends Component {
  constructor(props) {
    super(props);
    this.state = { near: props.begins };
  }
  static getDerivedStateFromProps({ begins }) {
    return begins ? { near: true } : null;
  }
  componentDidMount() {
    this.leave = this.props.watcher.watch(this.base, () => this.state.near, (near) => this.setState({ near: near || this.props.begins }));
  }
  componentWillUnmount() {
    this.leave();
  }
  shouldComponentUpdate({ messages }, { near }) {
    return near || near !== this.state.near || !isSame(messages, this.props.messages);
  }
  render({ messages, draw }, { near }) {
    const about = heightOf(messages.map(({ content }) => ({ raw: content ?? "" }))) + MORE * messages.length;
    const style = { containIntrinsicBlockSize: `auto ${about}px` };
    return h("div", { class: "stretch", style }, messages.map(near ? draw : far));
  }
}

const far = ({ role, content, index }) =>
  h("article", { key: index, class: `message ${role} far`, dir: "auto", "aria-label": ROLES[role], "data-message": index }, content);
