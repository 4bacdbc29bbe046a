// usage: node build.mjs CONSOLE: writes CONSOLE/vendor (libraries), CONSOLE/dist (what browsers load) and SHA256SUMS.
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join, relative, sep } from "node:path";
import { build } from "esbuild";

const root = process.argv[2];
const SHIPPED = { bundle: true, charset: "utf8", format: "esm", legalComments: "none", minify: true, target: "es2022" };

for (const folder of ["vendor", "dist"]) {
  rmSync(join(root, folder), { recursive: true, force: true });
  mkdirSync(join(root, folder));
}

const entries = readdirSync("libraries").map((name) => join("libraries", name));
await build({ ...SHIPPED, entryPoints: entries, outdir: join(root, "vendor") });
writeFileSync(join(root, "vendor/LICENSES.txt"), licences());

await build({ ...SHIPPED, entryPoints: [join(root, "js/main.js")], outfile: join(root, "dist/console.js") });
await build({ ...SHIPPED, entryPoints: [join(root, "css/console.css")], outfile: join(root, "dist/console.css") });

const lines = filesIn(root).map((path) => `${digest(join(root, path))}  ${path}\n`);
writeFileSync(join(root, "SHA256SUMS"), lines.join(""));

/** The licences of the libraries, and of the one that a library brings with it. */
function licences() {
  const { dependencies } = JSON.parse(readFileSync("package.json", "utf8"));
  const texts = [...Object.keys(dependencies), "@preact/signals-core"].sort().map((name) => {
    const { version, license } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
    return `${name} ${version}: ${license}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}\n`;
  });
  return texts.join(`\n${"=".repeat(80)}\n\n`);
}

function filesIn(folder) {
  return readdirSync(folder, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile() && entry.name !== "SHA256SUMS")
    .map((entry) => relative(folder, join(entry.parentPath, entry.name)).split(sep).join("/"))
    .sort();
}

function digest(path) {
  return createHash("sha256").update(readFileSync(path)).digest("hex");
}
