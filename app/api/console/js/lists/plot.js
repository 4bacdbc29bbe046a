// A plot of stacked bars, one a day. The table below it says the same to who cannot see it.
import { compact, number } from "../format.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { exactUsd } from "./sums.js";

const HEIGHT = 200;
const EDGE = { left: 54, right: 6, top: 10, bottom: 22 };
const LABEL_PX = 72;
const MAX_BAR_PX = 44;
const DAY = new Intl.DateTimeFormat(navigator.languages, { day: "numeric", month: "short", timeZone: "UTC" });
const LONG_DAY = new Intl.DateTimeFormat(navigator.languages, { dateStyle: "long", timeZone: "UTC" });

const total = (values) => values.reduce((sum, value) => sum + value, 0);

/** `series` are `{label, values}`, the first at the bottom; the values are numbers, or micro-dollars with `isMoney`. */
export function Plot({ title, days, series, isMoney = false }) {
  const [frame, width] = useWidth();
  const [at, setAt] = useState(null);
  const write = isMoney ? exactUsd : number;
  const valueOf = ({ values }) => (at === null ? total(values) : values[at] ?? 0);
  const all = write(total(series.map(valueOf)));
  const step = (width - EDGE.left - EDGE.right) / days.length;
  const look = (event) => {
    const i = Math.floor((event.clientX - frame.current.getBoundingClientRect().left - EDGE.left) / step);
    setAt(i >= 0 && i < days.length ? i : null);
  };
  return html`<figure class="plot">
    <figcaption><b>${title}</b> <span class="muted">${at === null ? "in all" : LONG_DAY.format(new Date(days[at]))}: ${all}</span></figcaption>
    <div ref=${frame} class="plot-area">
      ${width > 0 && html`<svg width=${width} height=${HEIGHT} role="img" onPointerMove=${look} onPointerLeave=${() => setAt(null)}
        aria-label="${title}: bars for ${days.length} days, in all ${write(total(series.map(({ values }) => total(values))))}. The table below has the numbers.">
        <${Bars} ...${{ days, series, isMoney, width, step, at }} />
      </svg>`}
    </div>
    <ul class="legend">${series.map((one, i) => html`<li><i class="swatch plot-${i + 1}"></i><span dir="auto">${one.label}</span> <b>${write(valueOf(one))}</b></li>`)}</ul>
  </figure>`;
}

/** A ref, and the width of the element that it is given to. */
function useWidth() {
  const [frame, [width, setWidth]] = [useRef(null), useState(0)];
  useEffect(() => {
    const resized = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    resized.observe(frame.current);
    return () => resized.disconnect();
  }, []);
  return [frame, width];
}

function Bars({ days, series, isMoney, width, step, at }) {
  const sums = days.map((_, i) => total(series.map(({ values }) => values[i])));
  const ticks = ticksTo(Math.max(...sums), isMoney ? 1 : 0.001);
  const scale = (HEIGHT - EDGE.top - EDGE.bottom) / ticks.at(-1);
  const y = (value) => HEIGHT - EDGE.bottom - value * scale;
  const x = (i) => EDGE.left + (i + 0.5) * step;
  const bar = Math.max(1, Math.min(MAX_BAR_PX, step * 0.76));
  const floors = days.map(() => 0);
  const paths = series.map(({ values }) => values.map((value, i) => {
    if (!value) return "";
    const height = value * scale;
    const bottom = y(floors[i]);
    floors[i] += value;
    return `M${x(i) - bar / 2} ${bottom}h${bar}v${-height}h${-bar}z`;
  }).join(""));
  const every = Math.ceil(LABEL_PX / step);
  return html`
    ${at !== null && html`<rect class="plot-day" x=${EDGE.left + at * step} y="0" width=${step} height=${HEIGHT - EDGE.bottom} />`}
    ${ticks.map((tick) => html`<line x1=${EDGE.left} x2=${width - EDGE.right} y1=${y(tick)} y2=${y(tick)} />
      <text x=${EDGE.left - 8} y=${y(tick) + 4} text-anchor="end">${isMoney ? `$${compact(tick / 1e6)}` : compact(tick)}</text>`)}
    ${paths.map((d, i) => html`<path d=${d} class="plot-${i + 1}" />`)}
    ${days.map((day, i) => i % every === 0 && html`<text x=${x(i)} y=${HEIGHT - 5} text-anchor="middle">${DAY.format(new Date(day))}</text>`)}`;
}

/** Round numbers from 0 to at least `high`, four or five steps. */
export function ticksTo(high, least) {
  const rough = Math.max(high, least) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
  return Array.from({ length: Math.ceil(Math.max(high, least) / step - 1e-9) + 1 }, (_, i) => i * step);
}
