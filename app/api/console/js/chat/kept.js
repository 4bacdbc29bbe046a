// What a page needs to go on with an answer after it was reloaded: the request under its key, and the events so far.
import { me } from "../session.js";

const PREFIX = "tokenring.live.";
const MAX_CHARS = 500_000;

export function keep(conversationId, { post, answer, message: { resumed, asked } }) {
  if (me.peek() === null) return;
  const text = JSON.stringify({ owner: me.peek()?.owner, conversationId, post, answer, resumed, asked });
  try {
    if (text.length < MAX_CHARS) sessionStorage.setItem(PREFIX + post.key, text);
    else forget({ post });
  } catch {
    forget({ post }); // no room: the answer is read again from its first event
  }
}

export function forget({ post }) {
  try {
    sessionStorage.removeItem(PREFIX + post.key);
  } catch {
    // nothing is kept
  }
}

export function keptPosts() {
  try {
    const names = Object.keys(sessionStorage).filter((name) => name.startsWith(PREFIX));
    return names.map((name) => JSON.parse(sessionStorage[name])).filter(({ owner }) => owner === me.peek()?.owner);
  } catch {
    return [];
  }
}
