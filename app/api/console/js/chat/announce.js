// Reads an answer out sentence by sentence: a screen reader that is told each token says nothing.
const PAUSE_MS = 2000;
const END = /[.!?…。！？؟।][”"')\]]*\s|[。！？]|\n/g;

export class Announcer {
  constructor(say) {
    this.say = say;
    this.start(0);
  }

  start(at) {
    this.at = at;
    this.spokenAt = 0;
  }

  /** `text` is all of the answer so far; `whole` says that it has ended. */
  hear(text, whole) {
    const rest = text.slice(this.at);
    if (!whole && Date.now() - this.spokenAt < PAUSE_MS) return;
    const end = whole ? rest.length : [...rest.matchAll(END)].reduce((_, match) => match.index + match[0].length, 0);
    if (!end && !whole) return;
    this.at += end;
    this.spokenAt = Date.now();
    this.say(rest.slice(0, end).replace(/[#*`_>|]/g, "") + (whole ? " Answer ended." : ""));
  }
}
