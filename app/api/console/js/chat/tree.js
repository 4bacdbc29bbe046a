// A conversation is a tree of messages; a path through it is what is shown.

export class Tree {
  constructor(messages = []) {
    this.byId = new Map();
    this.children = new Map([[null, []]]);
    this.chosen = new Map();
    for (const message of messages) this.add(message);
  }

  add(message) {
    this.byId.set(message.id, message);
    const parent = this.byId.has(message.parent_id) ? message.parent_id : null;
    message.parent_id = parent;
    this.children.set(message.id, []);
    this.children.get(parent).push(message);
    this.chosen.delete(parent); // what is new is shown
  }

  remove(id) {
    const message = this.byId.get(id);
    const siblings = this.children.get(message.parent_id);
    siblings.splice(siblings.indexOf(message), 1);
    this.byId.delete(id);
    this.chosen.delete(message.parent_id);
  }

  // The answer of a request has its own id only once its first event is here.
  rename(message, id) {
    const children = this.children.get(message.id);
    this.byId.delete(message.id);
    this.children.delete(message.id);
    for (const child of children) child.parent_id = id;
    message.id = id;
    this.byId.set(id, message);
    this.children.set(id, children);
  }

  siblings(message) {
    return this.children.get(message.parent_id) ?? [message];
  }

  // Shows the branch on which a message is.
  choose(id) {
    for (let at = this.byId.get(id); at; at = this.byId.get(at.parent_id)) this.chosen.set(at.parent_id, at.id);
  }

  path() {
    const path = [];
    for (let parent = null; ; ) {
      const children = this.children.get(parent);
      if (!children.length) return path;
      const message = children.find((child) => child.id === this.chosen.get(parent)) ?? children.at(-1);
      path.push(message);
      parent = message.id;
    }
  }
}

// The path as it is drawn: an answer that continues another is one item with it.
export function items(path) {
  const list = [];
  for (const message of path) {
    const last = list.at(-1);
    const continues = message.role === "assistant" && last?.head.role === "assistant";
    if (continues) last.messages.push(message);
    else list.push({ key: message.key ?? message.id, head: message, messages: [message] });
  }
  return list;
}
