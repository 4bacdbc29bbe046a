// Rows of GET /api/usage added up. All are whole numbers, so that sums are the ledger's own.
const SUMMED = [
  "requests", "input_tokens", "cached_tokens", "uncached", "output_tokens", "reasoning_tokens", "withheld_tokens", "cost_micro_usd",
];
const MAX_STACKS = 6;
const UNSTORED = { none: "without a stored key", unknown: "not recorded" };
const USD = new Intl.NumberFormat(navigator.languages, {
  style: "currency", currency: "USD", minimumFractionDigits: 2, maximumFractionDigits: 6,
});

/** Micro-dollars in dollars, with every digit that the ledger has. */
export const exactUsd = (microUsd) => USD.format(microUsd / 1e6);

/** Writes micro-dollars exactly, all of a column with as many decimals. */
export function usdWriter(amounts) {
  const digits = amounts.every((microUsd) => microUsd % 10_000 === 0) ? 2 : 6;
  const options = { style: "currency", currency: "USD", minimumFractionDigits: digits, maximumFractionDigits: digits };
  const usd = new Intl.NumberFormat(navigator.languages, options);
  return (microUsd) => usd.format(microUsd / 1e6);
}

export function sumOf(rows) {
  return Object.fromEntries(SUMMED.map((name) => [name, rows.reduce((sum, row) => sum + (row[name] ?? 0), 0)]));
}

/** The rows added up for each value of a name; days newest first, others by cost, then by tokens. */
export function grouped(rows, by) {
  const parts = new Map();
  for (const row of rows) {
    const id = String(row[by]);
    if (!parts.has(id)) parts.set(id, []);
    parts.get(id).push(row);
  }
  const groups = [...parts].map(([id, of]) => ({ id, key_name: of[0].key_name, owner: of[0].owner, ...sumOf(of) }));
  const size = (group) => group.input_tokens + group.output_tokens;
  if (by === "day") return groups.sort((a, b) => (a.id < b.id ? 1 : -1));
  return groups.sort((a, b) => b.cost_micro_usd - a.cost_micro_usd || size(b) - size(a));
}

/** What a group is called. */
export function labelOf(group, by) {
  if (by !== "key") return group.id;
  return group.key_name ? `${group.key_name} (${group.id})` : UNSTORED[group.id] ?? group.id;
}

/** For each group, or for all together, one number a day: `{label, values}`. Small groups are one, the last. */
export function stacks(rows, days, by, of) {
  const read = typeof of === "string" ? (row) => row[of] : of;
  const at = new Map(days.map((day, i) => [day, i]));
  const groups = by === null ? [] : grouped(rows, by);
  const named = groups.length > MAX_STACKS ? groups.slice(0, MAX_STACKS - 1) : groups;
  const places = new Map(named.map((group, i) => [group.id, i]));
  const series = named.map((group) => ({ label: labelOf(group, by), values: days.map(() => 0) }));
  if (named.length < groups.length || by === null) series.push({ label: "All others", values: days.map(() => 0) });
  for (const row of rows) {
    const place = by === null ? 0 : places.get(String(row[by])) ?? series.length - 1;
    if (at.has(row.day)) series[place].values[at.get(row.day)] += read(row);
  }
  return series;
}

const FIELDS = [
  "day", "model", "key", "key_name", "owner", "requests", "input_tokens", "cached_tokens", "output_tokens",
  "reasoning_tokens", "withheld_tokens", "cost_usd", "cost_micro_usd",
];

/** The rows as CSV. What a spreadsheet would take for a formula is text in it. */
export function fileOf(rows) {
  const fields = FIELDS.filter((name) => rows.some((row) => name in row));
  const cell = (value) => {
    const text = String(value ?? "");
    const safe = typeof value !== "number" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return [fields, ...rows.map((row) => fields.map((name) => row[name]))].map((line) => `${line.map(cell).join(",")}\r\n`).join("");
}
