// A plot of stacked bars, one a day. The table below it says the same to who cannot see it.
import { compact, number } from "../format.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { exactUsd } from "./sums.js";

const HEIGHT_PX = 220;
const UTC = "Etc/UTC";
const DAY = new Intl.DateTimeFormat(navigator.languages, { day: "numeric", month: "short", timeZone: "UTC" });
const LONG_DAY = new Intl.DateTimeFormat(navigator.languages, { dateStyle: "long", timeZone: "UTC" });
const dark = matchMedia("(prefers-color-scheme: dark)");

/** `series` are `{label, values}`, the first at the bottom; the values are numbers, or micro-dollars with `isMoney`. */
export function Plot({ title, days, series, isMoney = false }) {
  const [frame, box] = [useRef(null), useRef(null)];
  const [at, setAt] = useState(null);
  const theme = useTheme();
  const write = isMoney ? exactUsd : number;
  useEffect(() => {
    let [plot, isGone] = [null, false];
    const draw = async () => {
      const { default: UPlot } = await import("../../vendor/uplot.js");
      if (isGone) return;
      plot = new UPlot(optionsOf({ UPlot, box: box.current, series, setAt, isMoney }), dataOf(days, series), box.current);
    };
    draw();
    const resized = new ResizeObserver(() => plot?.setSize({ width: box.current.clientWidth, height: HEIGHT_PX }));
    resized.observe(frame.current);
    return () => {
      isGone = true;
      resized.disconnect();
      plot?.destroy();
    };
  }, [days.join(), JSON.stringify(series), theme]);
  const total = (i) => series.reduce((sum, one) => sum + (i === null ? one.values.reduce((a, b) => a + b, 0) : one.values[i]), 0);
  const valueOf = (one) => (at === null ? one.values.reduce((a, b) => a + b, 0) : one.values[at] ?? 0);
  return html`<figure class="plot" ref=${frame}>
    <figcaption><b>${title}</b> <span class="muted">${at === null ? "in all" : LONG_DAY.format(new Date(days[at]))}: ${write(total(at))}</span></figcaption>
    <div ref=${box} role="img" aria-label="${title}: bars for ${days.length} days, in all ${write(total(null))}. The table below has the numbers."></div>
    <ul class="legend">${series.map((one, i) => html`<li><i class="swatch plot-${i + 1}"></i><span dir="auto">${one.label}</span> <b>${write(valueOf(one))}</b></li>`)}</ul>
  </figure>`;
}

/** Another value whenever the colours are others. */
function useTheme() {
  const [number, setNumber] = useState(0);
  useEffect(() => {
    const changed = () => setNumber((last) => last + 1);
    const watch = new MutationObserver(changed);
    watch.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    dark.addEventListener("change", changed);
    return () => {
      watch.disconnect();
      dark.removeEventListener("change", changed);
    };
  }, []);
  return number;
}

/** uPlot draws each bar from the axis: the sums of all below come first, so that lower ones are drawn over them. */
function dataOf(days, series) {
  const sums = days.map(() => 0);
  const stacked = series.map(({ values }) => values.map((value, i) => (sums[i] += value)));
  return [days.map((day) => Date.parse(day) / 1000), ...stacked.reverse()];
}

function optionsOf({ UPlot, box, series, setAt, isMoney }) {
  const colours = coloursOf(box);
  const bars = UPlot.paths.bars({ size: [0.75, 48], radius: 0.1 });
  const scaled = (value) => (isMoney ? `$${compact(value / 1e6)}` : compact(value));
  const axis = { stroke: colours.text, font: "12px system-ui, sans-serif", ticks: { show: false } };
  return {
    width: box.clientWidth, height: HEIGHT_PX, legend: { show: false },
    tzDate: (seconds) => UPlot.tzDate(new Date(seconds * 1000), UTC),
    padding: [8, 8, 0, 0],
    cursor: { drag: { x: false, y: false }, points: { show: false }, y: false },
    scales: { x: { range: (_plot, low, high) => [low - 43_200, high + 43_200] }, y: { range: (_plot, _low, high) => [0, high * 1.05 || 1] } },
    axes: [
      { ...axis, size: 26, gap: 2, grid: { show: false }, space: 70, incrs: [1, 2, 5, 7, 14, 30, 61, 91, 183, 365].map((d) => d * 86_400), values: (_plot, splits) => splits.map((s) => DAY.format(s * 1000)) },
      { ...axis, size: 56, grid: { stroke: colours.grid, width: 1 }, values: (_plot, splits) => splits.map(scaled) },
    ],
    series: [{}, ...series.map((one, i) => ({ label: one.label, paths: bars, fill: colours.series[i], stroke: colours.series[i], width: 0, points: { show: false } })).reverse()],
    hooks: { setCursor: [(plot) => setAt(plot.cursor.idx ?? null)] },
  };
}

function coloursOf(box) {
  const style = getComputedStyle(box);
  const read = (name) => {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    box.append(probe);
    const { color } = getComputedStyle(probe);
    probe.remove();
    return color;
  };
  return { text: style.color, grid: read("--border"), series: [1, 2, 3, 4, 5, 6].map((i) => read(`--plot-${i}`)) };
}
