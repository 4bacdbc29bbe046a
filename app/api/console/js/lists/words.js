// Where a title has the words of a search, as the server finds them: without case and accents.
const WORD = /[\p{L}\p{N}\p{M}]+/gu;
const MIN_BEGINNING = 4;
const RUN_ON = /[\u0e00-\u1dff\u2e80-\u{10ffff}]/u;

/** Text without case and accents, as two spellings of one letter are the same. */
export function folded(text) {
  return text.normalize("NFKD").replace(/[\u0300-\u036f]/g, "").toLowerCase().normalize("NFC");
}

/** The text in runs, `[{text, isHit}]`. */
export function highlighted(text, query) {
  const words = (query.match(WORD) ?? []).map(folded);
  if (!words.length) return [{ text, isHit: false }];
  const last = words.at(-1);
  const asBeginning = last.length >= MIN_BEGINNING || RUN_ON.test(last);
  const runs = [];
  let end = 0;
  for (const match of text.matchAll(WORD)) {
    const word = folded(match[0]);
    if (!words.includes(word) && !(asBeginning && word.startsWith(last))) continue;
    if (match.index > end) runs.push({ text: text.slice(end, match.index), isHit: false });
    runs.push({ text: match[0], isHit: true });
    end = match.index + match[0].length;
  }
  if (end < text.length) runs.push({ text: text.slice(end), isHit: false });
  return runs;
}
