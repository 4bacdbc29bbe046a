// The open chats of this tab: the messages of each conversation, and the answers that are on their way.
import { getJson } from "../api.js";
import { refreshConversations } from "../conversations.js";
import { notify } from "../notices.js";
import { random } from "../random.js";
import { navigate, route } from "../router.js";
import { me } from "../session.js";
import { read, write } from "../storage.js";
import { effect, signal } from "../ui.js";
import { emptyAnswer, imagesOf, storedAnswer, textOf } from "./fold.js";
import { forget, keep, keptPosts } from "./kept.js";
import { modelToAsk, sampling } from "./settings.js";
import { cancel, follow } from "./stream.js";
import { Tree } from "./tree.js";

const chats = new Map();
let fresh = null;

// The chat of a conversation; without an id, the one that is about to begin.
export function chatOf(id) {
  if (id) {
    if (!chats.has(id)) chats.set(id, new Chat(id));
    return chats.get(id);
  }
  return (fresh ??= new Chat(null));
}

// What one owner has read here is not for the next.
let owner = null;
effect(() => {
  const { owner: name = null } = me.value ?? {};
  if (name === owner) return;
  owner = name;
  for (const chat of [fresh, ...chats.values()]) chat?.live.peek()?.leave.abort();
  chats.clear();
  fresh = null;
});

// The question with which the server began to ask for keys.
function refusedQuestion() {
  const text = read("question", { tab: true }) ?? "";
  write("question", null, { tab: true });
  return text;
}

let numChats = 0;
let localIds = 0;
const localId = () => `local-${++localIds}`;
const isLocal = (id) => id?.startsWith("local-");
const DRAW_MS = 40; // between drawings of an answer on its way
const LATER_MS = 3000;
export const LARGE_CHARS = 100_000; // a text that no field shows, as each letter would take a while

class Chat {
  constructor(id) {
    this.number = ++numChats;
    this.id = signal(id);
    this.tree = new Tree();
    this.path = []; // the messages that are shown
    this.changed = signal(0); // messages came or went, or another branch is shown
    this.live = signal(null); // the answer on its way
    this.problem = signal(null); // {error, until, again}: the last request, or the reading of the chat, failed
    this.loading = signal(Boolean(id));
    this.draft = signal(read(this.draftName()) ?? (id ? "" : refusedQuestion()));
    this.pasted = signal([]); // large texts that go before what is written; a reload loses them
  }

  draftName() {
    return `draft.${me.peek()?.owner}.${this.id.peek() ?? "new"}`;
  }

  // The text that is being written survives a reload, unless it is so large that each letter would take a while.
  write(text) {
    this.draft.value = text;
    write(this.draftName(), text.length > LARGE_CHARS ? null : text || null);
  }

  redraw() {
    this.path = this.tree.path();
    this.changed.value += 1;
  }

  // Reads the conversation, and goes on with what this page was waiting for before it was reloaded.
  async open() {
    if (this.live.peek()) return;
    const kept = keptPosts().find((entry) => entry.conversationId === this.id.peek());
    if (this.id.peek()) await this.load();
    if (!kept || this.problem.peek()) return;
    if (this.live.peek() || kept.answer.id) forget(kept);
    else this.begin(kept);
  }

  async load() {
    this.giveBack();
    try {
      const { messages } = await getJson(`/api/conversations/${encodeURIComponent(this.id.peek())}`);
      if (this.live.peek()) return; // something was asked meanwhile, and the answer is not in what was read
      const leaf = this.path.at(-1)?.id;
      const old = this.tree.byId;
      this.tree = new Tree(messages.map((message) => ({ ...message, answer: storedAnswer(message), ...drawn(old.get(message.id)) })));
      if (this.tree.byId.has(leaf)) this.tree.choose(leaf);
      this.problem.value = null;
      this.loading.value = false;
    } catch (error) {
      this.problem.value = { error, until: 0, again: () => this.open() };
      if ([0, 503].includes(error.status)) setTimeout(() => this.problem.peek()?.error === error && this.open(), LATER_MS);
    }
    this.redraw();
    const running = [...this.tree.byId.values()].find((message) => message.status === "in_progress");
    if (running && !this.live.peek()) this.attach(running);
  }

  attach(message) {
    const kept = keptPosts().find((entry) => entry.answer.id === message.request_id);
    this.tree.choose(message.id);
    message.answer = kept?.answer ?? { ...emptyAnswer(), id: message.request_id, messageId: message.id };
    message.asked = { parent: message.parent_id, messages: [] };
    this.run(message, kept?.post ?? { key: message.request_id });
  }

  // Sends messages that go below `parent`, null being the top.
  send(messages, parent, extra = {}) {
    const json = { ...sampling(), stream: true, stream_options: { include_usage: true }, messages, ...extra };
    if (this.id.value) Object.assign(json, { conversation_id: this.id.value, parent_id: parent ?? "root" });
    this.begin({ asked: { messages, parent, extra }, post: { key: random(), json }, answer: emptyAnswer() });
  }

  begin({ asked, post, answer }) {
    this.dropUnsent();
    this.problem.value = null;
    let parent = asked.parent;
    for (const message of asked.messages) {
      const id = localId();
      this.tree.add({ ...message, id, parent_id: parent });
      parent = id;
    }
    const id = localId();
    const message = { id, key: id, parent_id: parent, role: "assistant", status: "in_progress", answer, asked };
    this.tree.add(message);
    this.tree.choose(id);
    this.run(message, post);
  }

  async run(message, post) {
    const { answer } = message;
    message.tick ??= signal(0);
    message.resumed ??= [];
    const live = { message, answer, post, state: signal(null), stopping: signal(false), leave: new AbortController() };
    this.live.value = live;
    this.redraw();
    const keepNow = () => keep(this.id.value, live);
    keepNow();
    for (const name of ["pagehide", "visibilitychange"]) addEventListener(name, keepNow);
    let drawing = 0;
    const draw = () => {
      drawing = 0;
      message.tick.value += 1;
    };
    let error = null;
    try {
      if (post.json) post.json.model ??= await modelToAsk();
      await follow(answer, post, {
        signal: live.leave.signal,
        state: (state) => (live.state.value = state),
        resumed: (eventId) => message.resumed.push(eventId),
        change: () => {
          this.learn(live);
          drawing ||= setTimeout(draw, DRAW_MS);
        },
      });
    } catch (refusal) {
      error = refusal;
    }
    for (const name of ["pagehide", "visibilitychange"]) removeEventListener(name, keepNow);
    if (!me.peek()) return; // signed out: it goes on when its owner is back
    forget(live);
    this.live.value = null;
    if (error) this.fail(message, error);
    else message.status = live.stopping.peek() ? "cancelled" : answer.error ? "failed" : "complete";
    if (answer.finish === "content_filter") message.status = "blocked";
    if (!error && !answer.id) {
      message.status = "unsent"; // given up before the server had it
      this.giveBack();
    }
    draw();
    this.redraw();
    refreshConversations();
  }

  // Takes the ids from the first event.
  learn(live) {
    const { message, answer } = live;
    if (live.stopping.peek()) this.stop();
    if (answer.messageId && message.id !== answer.messageId) this.tree.rename(message, answer.messageId);
    if (this.id.peek() || !answer.conversationId) return;
    write(this.draftName(), null);
    this.id.value = answer.conversationId;
    this.write(this.draft.peek());
    chats.set(answer.conversationId, this);
    keep(answer.conversationId, live);
    fresh = null;
    const { name, id } = route.peek();
    if (name === "chat" && id === null) navigate(`#/chat/${answer.conversationId}`, { replace: true });
    refreshConversations();
  }

  fail(message, error) {
    if (message.answer.id) {
      message.status = "interrupted";
      setTimeout(() => this.live.peek() || this.load(), LATER_MS); // the store has what the stream no longer has
      return;
    }
    message.status = "unsent";
    if (error.status === 401) {
      this.giveBack();
      if (me.peek().open) write("question", this.draft.peek(), { tab: true }); // whoever signs in here has another name
      return;
    }
    if (error.code === "conversation_busy") {
      notify("This conversation is being answered in another tab; send again when it has ended.", { kind: "error" });
      this.load(); // and reads along
      return;
    }
    const until = error.retryAfterS ? Date.now() + error.retryAfterS * 1000 : 0;
    this.problem.value = { error, until, again: () => this.sendAgain(), edit: () => this.reopen() };
  }

  sendAgain() {
    const { messages, parent, extra } = this.dropUnsent();
    this.send(messages, parent, extra);
  }

  // A refused request is not in the store: it goes when another one is sent. Returns what it asked.
  dropUnsent() {
    const message = this.tree.path().at(-1);
    if (message?.status !== "unsent") return null;
    for (let at = message; at && at.id !== message.asked.parent; at = this.tree.byId.get(at.parent_id)) {
      this.tree.remove(at.id);
    }
    return message.asked;
  }

  // What was refused for good is changed: where it was written, or in its place beside a draft and with images.
  reopen() {
    const question = this.path.findLast(({ role }) => role === "user");
    const isNew = this.path.at(-1).asked?.messages.length > 0;
    if (!isNew || this.draft.peek() || imagesOf(question.content).length) return void question.edit?.();
    this.giveBack();
    this.problem.value = null;
    this.redraw();
    document.querySelector(".composer textarea")?.focus();
  }

  // The text of an unsent message goes back to where it was written.
  giveBack() {
    const asked = this.dropUnsent();
    if (!asked?.messages.length || this.draft.peek()) return;
    const text = textOf(asked.messages.at(-1).content);
    if (text.length > LARGE_CHARS) this.pasted.value = [text, ...this.pasted.peek()];
    else this.write(text);
  }

  stop() {
    const live = this.live.peek();
    if (!live || live.cancelled) return;
    const isBroken = typeof live.state.peek()?.until === "number";
    if (isBroken || (live.stopping.peek() && !live.answer.id)) live.leave.abort();
    live.stopping.value = true;
    if (!live.answer.id) return; // once it has begun, or at another click
    live.cancelled = true;
    cancel(live.answer.id).catch(() => (live.cancelled = false));
  }

  // Another branch.
  show(id) {
    this.tree.choose(id);
    this.redraw();
  }

  regenerate = (message) => this.withIds(message, (own) => this.send([], own.parent_id));

  // After what is stored: a server that was killed had sent more.
  continue = (message) => this.withIds(message, (own) => this.send([], own.id, { continue_final_message: true }));

  edit(message, content) {
    const changed = { role: message.role, content };
    const unsent = this.path.at(-1);
    if (unsent.status !== "unsent" || unsent.parent_id !== message.id) {
      this.withIds(message, (own) => this.send([changed], own.parent_id));
      return;
    }
    const { messages, parent, extra } = this.dropUnsent();
    this.send([...messages.slice(0, -1), changed], parent, extra);
  }

  // Ids of messages that this page has sent are read from the store once they are needed.
  async withIds(message, act) {
    if (this.live.peek()) return;
    const at = this.path.indexOf(message);
    if (this.path.slice(0, at + 1).some(({ id }) => isLocal(id))) {
      await this.load();
      if (this.problem.peek()) notify(this.problem.peek().error.message, { kind: "error" });
      if (this.problem.peek() || this.live.peek()) return;
    }
    if (this.path[at]) act(this.path[at]);
  }
}

// What a message keeps when its chat is read again.
const drawn = (message) => message && { key: message.key, tick: message.tick, resumed: message.resumed };
