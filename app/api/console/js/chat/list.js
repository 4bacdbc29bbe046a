// The messages near the view, and room for the others: a chat of 10,000 messages has a few dozen in the page.
const MARGIN_PX = 1000; // drawn above and below what is seen
const STEP_PX = 250; // more of the margin is drawn with each frame
const GUESS_PX = 160; // of a message that was not drawn yet
const NEAR_PX = 40; // so near, the end is followed

export class MessageList {
  /** `mount(node, item)` draws an item, also anew; `onFollow(isFollowing)` is told whether the end is in view. */
  constructor(scroller, element, mount, unmount, onFollow) {
    Object.assign(this, { scroller, element, mount, unmount });
    this.items = [];
    this.heights = new Map(); // by key, as they were last seen
    this.tops = new Float64Array(1); // of all items, and the end
    this.measured = 0; // tops up to this index are right
    this.drawn = new Map(); // nodes by key
    this.above = element.appendChild(document.createElement("div"));
    this.below = element.appendChild(document.createElement("div"));
    this.following = true;
    this.margin = 0;
    this.scrolled = 0;
    this.sizes = new ResizeObserver((entries) => {
      for (const { target } of entries) if (target.key) this.measure(target);
      if (this.following) scroller.scrollTop = scroller.scrollHeight;
      this.soon();
    });
    this.sizes.observe(scroller);
    scroller.addEventListener("scroll", () => {
      const { scrollTop } = scroller;
      const below = scroller.scrollHeight - scrollTop - scroller.clientHeight;
      const following = below < (scrollTop < this.scrolled ? 2 : NEAR_PX); // who scrolls up wants to leave the end
      this.scrolled = scrollTop;
      if (following !== this.following) onFollow((this.following = following));
      this.soon();
    }, { passive: true });
  }

  set(items) {
    this.items = items;
    this.tops = new Float64Array(items.length + 1);
    this.measured = 0;
    const gone = new Map(this.drawn);
    for (const item of items) {
      const node = this.drawn.get(item.key);
      if (!node) continue;
      gone.delete(item.key);
      this.mount(node, item);
    }
    for (const [key, node] of gone) this.remove(key, node);
    this.draw();
    if (this.following) this.toEnd();
  }

  toEnd() {
    this.following = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.soon();
  }

  soon() {
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this.draw();
      if (this.following) this.scroller.scrollTop = this.scroller.scrollHeight;
    });
  }

  measure(node) {
    this.heights.set(node.key, node.offsetHeight);
    this.measured = Math.min(this.measured, node.index);
  }

  /** The index of the item at a distance from the top. */
  at(y) {
    const { items, tops } = this;
    for (; this.measured < items.length; this.measured += 1) {
      tops[this.measured + 1] = tops[this.measured] + (this.heights.get(items[this.measured].key) ?? GUESS_PX);
    }
    let [low, high] = [0, items.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tops[middle + 1] > y) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  draw() {
    const { scroller, items, element } = this;
    if (!items.length) return;
    const anchor = this.following ? null : this.anchor();
    if (!anchor) this.margin = 0;
    const last = this.at(Infinity);
    const top = this.following ? this.tops[last + 1] - scroller.clientHeight : scroller.scrollTop - element.offsetTop;
    const first = this.at(top - this.margin);
    const end = this.at(top + scroller.clientHeight + this.margin) + 1;
    this.place(first, end);
    this.at(0);
    this.above.style.height = `${this.tops[first]}px`;
    this.below.style.height = `${this.tops[items.length] - this.tops[end]}px`;
    if (anchor?.node.isConnected) scroller.scrollTop += anchor.node.getBoundingClientRect().top - anchor.top;
    if (this.margin < MARGIN_PX) {
      this.margin += STEP_PX;
      this.soon();
    }
  }

  place(first, end) {
    const wanted = this.items.slice(first, end);
    const keys = new Set(wanted.map(({ key }) => key));
    for (const [key, node] of this.drawn) if (!keys.has(key)) this.remove(key, node);
    let before = this.above;
    wanted.forEach((item, number) => {
      let node = this.drawn.get(item.key);
      if (!node) {
        node = Object.assign(document.createElement("article"), { key: item.key });
        this.drawn.set(item.key, node);
        before.after(node);
        this.mount(node, item);
        this.sizes.observe(node);
      }
      node.index = first + number;
      if (!this.heights.has(item.key)) this.measure(node);
      before = node;
    });
  }

  /** The first message in view: it stays where it is while the room above it becomes known. */
  anchor() {
    const edge = this.scroller.getBoundingClientRect().top;
    for (const node of this.drawn.values()) {
      const { top, bottom } = node.getBoundingClientRect();
      if (bottom > edge && top < edge + this.scroller.clientHeight) return { node, top };
    }
    return null;
  }

  remove(key, node) {
    if (node.contains(document.activeElement)) this.scroller.focus({ preventScroll: true });
    this.sizes.unobserve(node);
    this.unmount(node);
    node.remove();
    this.drawn.delete(key);
  }

  close() {
    this.sizes.disconnect();
    cancelAnimationFrame(this.pending);
    for (const node of this.drawn.values()) this.unmount(node);
    this.element.replaceChildren();
  }
}
