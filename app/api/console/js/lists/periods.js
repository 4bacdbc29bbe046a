// Periods of UTC days, each written as 2026-11-20.
export const PERIODS = { month: "This month", last: "Last month", week: "Last 7 days", range: "Other days" };

const DAY_MS = 86_400_000;
const written = (ms) => new Date(ms).toISOString().slice(0, 10);

export const today = () => written(Date.now());

/** Whether a text is a day that there is. */
export function isDay(text) {
  const ms = Date.parse(`${text}T00:00:00Z`);
  return /^\d{4}-\d{2}-\d{2}$/.test(text) && !Number.isNaN(ms) && written(ms) === text;
}

/** The month so many months from this one. */
export function monthOf(offset, now = new Date()) {
  const [year, month] = [now.getUTCFullYear(), now.getUTCMonth() + offset];
  return { from: written(Date.UTC(year, month, 1)), to: written(Date.UTC(year, month + 1, 0)) };
}

/** First and last day of a chosen period; one of now ends today. */
export function rangeOf({ name, from, to }) {
  if (name === "month") return { from: monthOf(0).from, to: today() };
  if (name === "last") return monthOf(-1);
  return name === "week" ? { from: written(Date.now() - 6 * DAY_MS), to: today() } : { from, to };
}

/** Every day of a range, at most those of ten years. */
export function daysOf({ from, to }) {
  const [first, last] = [from, to].map((day) => Date.parse(`${day}T00:00:00Z`));
  const count = Math.min(3660, Math.round((last - first) / DAY_MS) + 1);
  return Array.from({ length: Math.max(0, count) }, (_, i) => written(first + i * DAY_MS));
}
