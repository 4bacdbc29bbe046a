// Numbers, money and times as the browser's language writes them.
const LOCALES = navigator.languages;
const INTEGER = new Intl.NumberFormat(LOCALES, { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat(LOCALES, { notation: "compact", maximumFractionDigits: 1 });
const PERCENT = new Intl.NumberFormat(LOCALES, { style: "percent", maximumFractionDigits: 1 });
const DATE = new Intl.DateTimeFormat(LOCALES, { dateStyle: "medium" });
const DATE_TIME = new Intl.DateTimeFormat(LOCALES, { dateStyle: "medium", timeStyle: "short" });
const TIME = new Intl.DateTimeFormat(LOCALES, { timeStyle: "short" });
const NONE = "–";

const isMissing = (value) => value === null || value === undefined || Number.isNaN(value);

/** A whole number, as 12,345. */
export const number = (value) => (isMissing(value) ? NONE : INTEGER.format(value));

/** A large number in few characters, as 12.3K. */
export const compact = (value) => (isMissing(value) ? NONE : COMPACT.format(value));

/** A ratio, as 12.5%. */
export const percent = (ratio) => (isMissing(ratio) ? NONE : PERCENT.format(ratio));

/** A number with at most `digits` decimals. */
export function decimal(value, digits = 1) {
  if (isMissing(value)) return NONE;
  return new Intl.NumberFormat(LOCALES, { maximumFractionDigits: digits }).format(value);
}

/** An amount in US dollars; a small one keeps two digits that are not 0, up to the ledger's six decimals. */
export function money(usd) {
  if (isMissing(usd)) return NONE;
  const size = Math.abs(usd);
  const digits = size === 0 || size >= 1 ? 2 : Math.min(6, 1 - Math.floor(Math.log10(size)));
  const options = { style: "currency", currency: "USD", minimumFractionDigits: 2, maximumFractionDigits: Math.max(2, digits) };
  return new Intl.NumberFormat(LOCALES, options).format(usd);
}

/** Seconds, as 350 ms, 4.2 s, 3 min 5 s, 2 h 10 min or 3 d 4 h. */
export function duration(s) {
  if (isMissing(s)) return NONE;
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${decimal(s)} s`;
  const whole = Math.round(s);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** A Unix time in seconds, as a date. */
export const date = (unixS) => (isMissing(unixS) ? NONE : DATE.format(unixS * 1000));

/** A Unix time in seconds, as date and time. */
export const dateTime = (unixS) => (isMissing(unixS) ? NONE : DATE_TIME.format(unixS * 1000));

/** A Unix time in seconds, short: the time today, else the date. */
export function when(unixS) {
  if (isMissing(unixS)) return NONE;
  const isToday = new Date(unixS * 1000).toDateString() === new Date().toDateString();
  return isToday ? TIME.format(unixS * 1000) : date(unixS);
}

/** Bytes, as 12 kB or 3.4 MB. */
export function bytes(value) {
  if (isMissing(value)) return NONE;
  const steps = ["B", "kB", "MB", "GB", "TB"];
  const step = value < 1 ? 0 : Math.min(steps.length - 1, Math.floor(Math.log10(value) / 3));
  return `${decimal(value / 1000 ** step, step && value / 1000 ** step < 10 ? 1 : 0)} ${steps[step]}`;
}
