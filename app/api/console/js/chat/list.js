// The messages near the view, and room for the others: a chat of 10,000 messages has a few dozen in the page.
const MARGIN_PX = 1000; // drawn above and below what is seen
const GUESS_PX = 160;
const STEP_PX = 250; // more of the margin is drawn with each frame

export class MessageList {
  // `mount(element, item)` draws an item and returns its update function; `scroller` holds `element`.
  constructor(scroller, element, mount, unmount) {
    Object.assign(this, { scroller, element, mount, unmount });
    this.items = [];
    this.heights = new Map(); // by key, as they were last seen
    this.drawn = new Map(); // by key
    this.above = document.createElement("div");
    this.below = document.createElement("div");
    element.append(this.above, this.below);
    this.following = true; // the end is in view
    this.margin = 0;
    this.sizes = new ResizeObserver((entries) => {
      for (const { target } of entries) this.heights.set(target.key, target.offsetHeight);
      if (this.following) this.toEnd();
      else this.soon();
    });
    this.sizes.observe(scroller);
    scroller.addEventListener("scroll", () => {
      this.following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
      this.onFollow?.(this.following);
      this.soon();
    }, { passive: true });
  }

  set(items) {
    this.items = items;
    const keys = new Set(items.map(({ key }) => key));
    for (const [key, node] of this.drawn) if (!keys.has(key)) this.remove(key, node);
    for (const item of items) {
      const node = this.drawn.get(item.key);
      if (node) this.mount(node, item);
    }
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

  height = ({ key }) => this.heights.get(key) ?? GUESS_PX;

  draw() {
    const { scroller, items, element } = this;
    const anchor = this.following ? null : this.anchor();
    const page = scroller.clientHeight;
    const total = items.reduce((sum, item) => sum + this.height(item), 0);
    const top = this.following ? total - page : scroller.scrollTop - element.offsetTop;
    if (!anchor) this.margin = 0;
    const [from, to] = [top - this.margin, top + page + this.margin];
    const wanted = [];
    let [y, above, below] = [0, 0, 0];
    for (const item of items) {
      const end = y + this.height(item);
      if (end < from) above = end;
      else if (y > to) below += end - y;
      else wanted.push(item);
      y = end;
    }
    this.place(wanted);
    this.above.style.height = `${above}px`;
    this.below.style.height = `${below}px`;
    if (anchor?.node.isConnected) scroller.scrollTop += anchor.node.getBoundingClientRect().top - anchor.top;
    if (this.margin < MARGIN_PX) {
      this.margin += STEP_PX;
      this.soon();
    }
  }

  place(wanted) {
    const keys = new Set(wanted.map(({ key }) => key));
    for (const [key, node] of this.drawn) if (!keys.has(key)) this.remove(key, node);
    let after = this.above;
    for (const item of wanted) {
      let node = this.drawn.get(item.key);
      if (!node) {
        node = document.createElement("article");
        node.key = item.key;
        this.drawn.set(item.key, node);
        after.after(node);
        this.mount(node, item);
        this.heights.set(item.key, node.offsetHeight);
        this.sizes.observe(node);
      }
      after = node;
    }
  }

  close() {
    this.sizes.disconnect();
    cancelAnimationFrame(this.pending);
    for (const node of this.drawn.values()) this.unmount(node);
    this.element.replaceChildren();
  }

  // The first drawn message in view: it stays where it is while room above it is measured.
  anchor() {
    const edge = this.scroller.getBoundingClientRect().top;
    for (const node of this.element.children) {
      const { top, bottom } = node.getBoundingClientRect();
      if (node.key && bottom > edge) return { node, top };
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
}
