// Bundles each entry file to one ES module, copies uPlot's style, and writes the licences and the hashes.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const ENTRIES = ["ui", "markdown", "highlight", "uplot"];
const { dependencies } = JSON.parse(readFileSync("package.json", "utf8"));
const packages = [...Object.keys(dependencies), "@preact/signals-core"].sort();

await build({
  entryPoints: ENTRIES.map((name) => `${name}.js`),
  bundle: true,
  charset: "utf8",
  format: "esm",
  legalComments: "none",
  minify: true,
  outdir: "out",
  target: "es2022",
});
writeFileSync("out/uplot.css", readFileSync("node_modules/uplot/dist/uPlot.min.css"));

const licences = packages.map((name) => {
  const folder = `node_modules/${name}`;
  const { version, license } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
  const text = readFileSync(`${folder}/LICENSE`, "utf8").trim();
  return `${name} ${version}: ${license}\n\n${text}\n`;
});
writeFileSync("out/LICENSES.txt", licences.join(`\n${"=".repeat(80)}\n\n`));

const lines = readdirSync("out")
  .sort()
  .map((name) => `${createHash("sha256").update(readFileSync(`out/${name}`)).digest("hex")}  ${name}\n`);
writeFileSync("out/SHA256SUMS", lines.join(""));
